"""Compare the rate of `shoal infer`, in texts per second, with that of a load generator at its best setting.

    python benchmarks/infer.py [--num 768]

The load generator is a closed loop of tritonclient: C requests at a time of B texts each. Each of its settings is tried
once. The best is measured again in turns with `shoal infer`, which is timed as its users see it: the rows of a CSV
file, from the first read to the last write. Both send the same texts: those of the CLEAR corpus if SHOAL_DATA_DIR names
its folder, else shoal's own. The record is benchmarks/results/infer-DATE.json. (That of 2026-11-21 was measured with
NVIDIA's perf_analyzer as the load generator.)
"""

from __future__ import annotations

import csv
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the server

import numpy as np
import typer
from records import write_record

from shoal import Client, compose, serve
from shoal.clients.bulk.files import infer_to_file
from shoal.clients.bulk.inputs import make_feed
from shoal.clients.bulk.output_formats import make_format
from shoal.clients.bulk.scoring import served
from shoal.clients.bulk.tables import scan_table
from shoal.readability.corpus import find_corpus
from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset, train
from shoal.serving.server.launch import Server
from shoal.system.machine import describe_machine, library_versions

ENSEMBLE = "ensemble_all"
SETTINGS = ((1, 8), (1, 16), (8, 2), (8, 4), (16, 2), (32, 2))  # texts a request, requests at a time
SECONDS = 24.0  # of load at each setting, after a warm-up
REPEATS = 5


def main(num: int = 768) -> None:
    """Measure and record."""
    corpus = find_corpus()
    texts = [corpus.texts[i] for i in np.random.default_rng(0).permutation(len(corpus))[:num]]
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        train(corpus, f"{folder}/artifacts", preset=Preset(num_rows=200, encoder=EncoderSettings(max_steps=1)))
        repository = compose(ENSEMBLE, f"{folder}/repository", artifacts=f"{folder}/artifacts")
        source = _write(Path(folder) / "texts.csv", texts)
        with serve(repository) as server:
            _infer(server, source)  # warm
            once = {setting: _closed_loop(server, texts, *setting) for setting in SETTINGS}
            best = max(once, key=lambda setting: once[setting])
            rounds = [
                {"infer": _infer(server, source), str(best): _closed_loop(server, texts, *best)} for _ in range(REPEATS)
            ]
    medians = {name: statistics.median(turn[name] for turn in rounds) for name in rounds[0]}
    ratio = statistics.median(turn["infer"] / turn[str(best)] for turn in rounds)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("numpy", "torch", "tritonclient", "nvidia-pytriton"),
        "load": "closed loop of tritonclient",
        "texts": {"number": num, "corpus": corpus.name, "mean_bytes": sum(len(t.encode()) for t in texts) / num},
        "unit": "texts per second; settings are (texts a request, requests at a time)",
        "each_setting_once": {str(setting): round(rate, 2) for setting, rate in once.items()},
        "rounds": [{name: round(rate, 2) for name, rate in turn.items()} for turn in rounds],
        "medians": {name: round(rate, 2) for name, rate in medians.items()},
        "infer_over_best, median of the rounds": round(ratio, 3),
    }
    path = write_record("infer", result)
    print(result["medians"], f"ratio {ratio:.3f}", path)


def _write(path: Path, texts: Sequence[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    return path


def _infer(server: Server, source: Path) -> float:
    """Texts a second of what the command does."""
    output = source.with_name("scores.csv")
    with Client(server.grpc_url) as client, scan_table(source) as table:
        model = served(client, ENSEMBLE)
        start = time.perf_counter()
        feed, form = make_feed(model.spec, table, text_column="text"), make_format(".csv", table, model)
        done = infer_to_file(
            table, model, feed, form, output, settings={}, on_rows=lambda done, fraction: None, is_fresh=True
        )
        return done.num_rows / (time.perf_counter() - start)


def _closed_loop(server: Server, texts: Sequence[str], batch: int, callers: int) -> float:
    """Texts a second of ``callers`` threads that each send the next request when the last is answered."""
    import tritonclient.grpc as triton

    rounds, lock, answered, begin = cycle(texts), threading.Lock(), [0], time.perf_counter() + 2.0

    def call() -> None:
        with triton.InferenceServerClient(server.grpc_url) as client:
            while time.perf_counter() < begin + SECONDS:
                with lock:
                    chosen = [[next(rounds).encode()] for _ in range(batch)]
                excerpt = triton.InferInput("excerpt", [batch, 1], "BYTES")
                excerpt.set_data_from_numpy(np.array(chosen, np.object_))
                client.infer(ENSEMBLE, [excerpt])
                with lock:
                    answered[0] += batch * (begin <= time.perf_counter() < begin + SECONDS)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answered[0] / SECONDS


if __name__ == "__main__":
    typer.run(main)
