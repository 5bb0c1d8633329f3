"""What Triton costs at batch 1: the same ensemble over gRPC, over HTTP and in this process, in turn.

    python benchmarks/latency.py [--num 200]

It trains nothing worth keeping: scores do not matter here, shapes do. Texts are the CLEAR corpus's where SHOAL_DATA_DIR
names its folder, else shoal's own. The hosts take turns, ten texts each, the same texts. The first text of a turn is
not counted, since it finds its code and weights pushed out of the caches by the host before. (Where the hosts alternate
text by text, every call does: then gRPC's p50 lay 2.0 to 4.5 ms above the call in process, in three runs.) The result,
with hardware and versions, goes to benchmarks/results/latency-DATE.json.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the server

import numpy as np
import typer
from records import write_record

from shoal import Client, compose, load, serve
from shoal.readability.corpus import find_corpus
from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset, train
from shoal.system.machine import describe_machine, library_versions

ENSEMBLE = "ensemble_all"
NUM_A_TURN = 10


def main(num: int = 200) -> None:
    """Measure and record."""
    corpus = find_corpus()
    texts = [corpus.texts[i] for i in np.random.default_rng(0).permutation(len(corpus))[: num + NUM_A_TURN]]
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        train(corpus, f"{folder}/artifacts", preset=Preset(num_rows=200, encoder=EncoderSettings(max_steps=1)))
        repository = compose(ENSEMBLE, f"{folder}/repository", artifacts=f"{folder}/artifacts")
        pipeline = load(repository / ENSEMBLE)
        with (
            serve(repository) as server,
            Client(server.grpc_url) as grpc,
            Client(server.http_url, protocol="http") as http,
        ):
            seconds = measure(
                {
                    "in process": lambda text: pipeline(excerpt=[text]),
                    "grpc": lambda text: grpc.infer(ENSEMBLE, excerpt=[text]),
                    "http": lambda text: http.infer(ENSEMBLE, excerpt=[text]),
                },
                texts,
            )
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("numpy", "torch", "treelite", "tokenizers", "tritonclient"),
        "corpus": corpus.name,
        "encoder": "sentence-transformers/all-MiniLM-L6-v2, fp32",
        "num_texts": num,
        "milliseconds": {host: summary(times) for host, times in seconds.items()},
        "p50_above_in_process_ms": {
            host: round(1e3 * float(np.median(seconds[host]) - np.median(seconds["in process"])), 3)
            for host in ("grpc", "http")
        },
        "median_of_paired_differences_ms": {
            host: round(1e3 * float(np.median(np.subtract(seconds[host], seconds["in process"]))), 3)
            for host in ("grpc", "http")
        },
    }
    print(write_record("latency", result).read_text(encoding="utf-8"))


def measure(hosts: dict[str, Callable[[str], Any]], texts: list[str]) -> dict[str, list[float]]:
    """Seconds of each call, host by host; the first turn of each is warm-up."""
    seconds: dict[str, list[float]] = {host: [] for host in hosts}
    for start in range(0, len(texts), NUM_A_TURN):
        for host, call in hosts.items():
            seconds[host] += [_time(call, text) for text in texts[start : start + NUM_A_TURN]][1:]
    return {host: times[NUM_A_TURN - 1 :] for host, times in seconds.items()}


def _time(call: Callable[[str], Any], text: str) -> float:
    start = time.perf_counter()
    call(text)
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    return {f"p{q}": round(1e3 * float(np.percentile(seconds, q)), 3) for q in (10, 50, 90)}


if __name__ == "__main__":
    typer.run(main)
