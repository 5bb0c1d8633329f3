"""What a text costs after a million texts, beside what it costs after the first ten thousand.

    python benchmarks/readability/growth.py [--num-texts 1000000] [--artifacts DIR]

Texts are made of the corpus's words, drawn at random, and each holds a word that was never seen before. They go through
the served components `preprocess` and `cuml` in this process, one thread each. At the end two of them take turns over
the same fresh texts: the one that has seen all, and one that has seen the first ten thousand. `bert-large`, which
would take a day, answers the same few rows once every 50,000 texts. Times are the processor's, of this process alone.
The result, with hardware and versions, goes to benchmarks/results/growth-DATE.json.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from prepare import SMALL, make_artifacts, say
from systems import run_component

from shoal import compose
from shoal.component.base import Component
from shoal.local import load_component
from shoal.machine import describe_machine, library_versions
from shoal.readability.corpus import find_corpus
from shoal.repository.config import read_config
from shoal.repository.placement import Plan

YOUNG = 10_000
WINDOW = 50_000
BATCH = 500
SAMPLE = 16  # rows that the encoder answers, once a window
TURNS, TURN = 100, 64  # of the comparison at the end: so many batches of so many texts
RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = ("numpy", "torch", "tokenizers", "onnxruntime", "treelite")

Call = Callable[[Any], Any]


def main(
    num_texts: int = 1_000_000,
    artifacts: Annotated[Path | None, typer.Option(help="kept there, and taken from there")] = None,
) -> None:
    """Measure and record."""
    corpus = find_corpus()
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        known = (artifacts or folder / "artifacts").resolve()
        make_artifacts(corpus, known, encoder=SMALL, layers=0)
        repository = compose("ensemble_all", folder / "repository", artifacts=known, plan=Plan(dtype="fp32"))

        def load(model: str) -> Component:
            return load_component(read_config(repository / model))

        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "versions": library_versions(*LIBRARIES),
            "corpus": corpus.name,
            "texts": num_texts,
            "words_a_text_that_were_never_seen": 1,
            "young_is_after": YOUNG,
            **grow(load, corpus.texts, num_texts),
        }
    path = RESULTS / f"growth-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "windows"}, indent=1))


def grow(load: Callable[[str], Component], corpus: list[str], num_texts: int) -> dict[str, Any]:
    """Windows of the long walk, and the comparison at its end."""
    young, old, forest, encoder = load("preprocess"), load("preprocess"), load("cuml"), load("bert-large")

    def score(reader: Component) -> Call:
        return lambda batch: run_component(forest, input__0=run_component(reader, INPUT0=batch)["TREE_FEATS"])

    made, windows = make_texts(corpus, seed=0), list[dict[str, float]]()
    rows = run_component(young, INPUT0=np.array([[text.encode()] for text in corpus[:SAMPLE]], np.object_))
    sample = {"INPUT__0": rows["BERT_IDS"], "INPUT__1": rows["BERT_AM"]}
    for _ in range(3):  # the fused graph is proved, and compiled
        run_component(encoder, **sample)
    slowest = 0.0
    for start in range(0, num_texts, BATCH):
        batch = take(made, min(BATCH, num_texts - start))
        if start < YOUNG:
            score(young)(batch)
        if start % WINDOW == 0:
            windows.append({"from": start, "seconds": 0.0, "encoder_ms_a_row": 0.0, "resident_mib": 0.0})
        spent = clock(score(old), batch)
        slowest = max(slowest, spent) if start >= YOUNG else 0.0
        windows[-1]["seconds"] += spent
        if start % WINDOW == 0:
            milliseconds = 1e3 * clock(lambda sample: run_component(encoder, **sample), sample) / SAMPLE
            windows[-1]["encoder_ms_a_row"] = round(milliseconds, 3)
            say(f"{start:,} texts")
        windows[-1]["resident_mib"] = resident_mib()
    for window in windows:
        num = min(WINDOW, num_texts - int(window["from"]))
        window["microseconds_a_text"] = round(1e6 * window.pop("seconds") / num, 2)
    return {
        **compare({"young": score(young), "old": score(old)}, make_texts(corpus, seed=1)),
        "slowest_batch_of_500_ms": round(1e3 * slowest, 1),
        "encoder_last_half_over_first": round(halves([window["encoder_ms_a_row"] for window in windows]), 4),
        "windows": windows,
    }


def compare(ways: dict[str, Call], texts: Iterator[bytes]) -> dict[str, Any]:
    """Both ways in turns over the same texts."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        batch = take(texts, TURN)
        for name in sorted(ways, reverse=bool(turn % 2)):
            seconds[name].append(clock(ways[name], batch) / TURN)
    ratios = np.divide(seconds["old"], seconds["young"])
    return {
        "microseconds_a_text": {name: round(1e6 * float(np.median(each)), 2) for name, each in seconds.items()},
        "old_over_young": {f"p{q}": round(float(np.percentile(ratios, q)), 4) for q in (25, 50, 75)},
    }


def halves(values: list[float]) -> float:
    """The median of the last half over that of the first."""
    middle = len(values) // 2
    return float(np.median(values[middle:]) / np.median(values[: middle or 1]))


def clock(call: Call, batch: Any) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    call(batch)
    return time.process_time() - start


def take(texts: Iterator[bytes], number: int) -> Any:
    """Byte strings ``[number, 1]``."""
    return np.array([[next(texts)] for _ in range(number)], np.object_)


def make_texts(corpus: list[str], seed: int) -> Iterator[bytes]:
    """Texts of as many words as an excerpt has, drawn from all the corpus's, and one that nobody wrote."""
    rng, words = np.random.default_rng(seed), np.array(" ".join(corpus).encode().split(), np.object_)
    num_words = len(words) // len(corpus)
    while True:
        for row in rng.integers(len(words), size=(1000, num_words)):
            yield b" ".join([*words[row], b"%x" % rng.integers(2**63)])


def resident_mib() -> float:
    """What this process holds in memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024, 1)


if __name__ == "__main__":
    typer.run(main)
