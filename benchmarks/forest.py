"""Engines for the forest on the host, one thread each: scikit-learn, Treelite's GTIL, nvForest.

    python benchmarks/forest.py [--seconds 0.5] [--rounds 7]

The forest is the published recipe's, 100 trees of depth 16 on 207 features, grown on the CLEAR corpus where
SHOAL_DATA_DIR names its folder, else on shoal's own passages (whose trees are small). Rows are features of real texts.
Engines take turns at every batch size; nvForest is left out where it is not installed (`shoal[gpu]`). Exactness stands
beside speed: the greatest difference to scikit-learn, which adds up in FP64.
It does not show several threads, GPUs or other forests. The result, with hardware and versions, goes to
benchmarks/results/forest-DATE.json.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from threadpoolctl import threadpool_limits

from shoal.forests.treelite import load_forest
from shoal.machine import describe_machine, library_versions
from shoal.readability.corpus import find_corpus
from shoal.readability.forest import export_forest, fit_bundle, forest_inputs, train_forest

BATCHES = (1, 64, 512)
LIBRARIES = ("numpy", "scikit-learn", "treelite", "nvforest-cu13")
RESULTS = Path(__file__).parent / "results"

Predict = Callable[[Any], Any]  # FP32 [rows, 207] to scores [rows]


def main(seconds: float = 0.5, rounds: int = 7, results: Path = RESULTS) -> None:
    """Measure and record."""
    corpus = find_corpus()
    bundle = fit_bundle(corpus.texts, vocabulary_sha256="", is_lowercase=True, max_length=256)
    rows = forest_inputs(bundle, corpus.texts)
    forest = train_forest(bundle, corpus.texts, corpus.targets, seed=0)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        checkpoint = Path(folder) / "checkpoint.tl"
        export_forest(forest, rows, checkpoint, bundle_sha256="")
        engines = {"scikit-learn": forest.predict, "treelite": treelite_engine(checkpoint)}
        if importlib.util.find_spec("nvforest"):
            engines["nvforest"] = nvforest_engine(checkpoint)
        with threadpool_limits(1):  # of the OpenMP that the engines have loaded
            expected = forest.predict(rows)
            differences = {name: float(np.abs(predict(rows) - expected).max()) for name, predict in engines.items()}
            turns = [measure(engines, rows, seconds) for _ in range(rounds)]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions(*LIBRARIES),
        "corpus": corpus.name,
        "forest": {
            "trees": len(forest.estimators_),
            "depth": forest.max_depth,
            "nodes": sum(tree.tree_.node_count for tree in forest.estimators_),
            "rows_compared": len(rows),
        },
        "greatest_difference_to_scikit_learn": differences,
        "rounds, microseconds a call": turns,
        "medians": {
            str(batch): {name: describe(batch, [turn[str(batch)] for turn in turns], name) for name in engines}
            for batch in BATCHES
        },
    }  # fmt: skip
    path = results / f"forest-{result['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(to_markdown(result))
    print(path)


def measure(engines: dict[str, Predict], rows: Any, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of a call, by batch size and engine: the median of ``seconds`` of calls, on rows that go round."""
    return {
        str(batch): {name: round(1e6 * _time(predict, rows, batch, seconds), 2) for name, predict in engines.items()}
        for batch in BATCHES
    }


def _time(predict: Predict, rows: Any, batch: int, seconds: float) -> float:
    parts = [np.ascontiguousarray(rows[i : i + batch]) for i in range(0, len(rows) - batch + 1, batch)] or [rows]
    predict(parts[-1])
    times: list[float] = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        part = parts[len(times) % len(parts)]
        start = time.perf_counter()
        predict(part)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def describe(batch: int, turns: list[dict[str, float]], name: str) -> dict[str, float]:
    """Of one engine at one batch size."""
    microseconds = float(np.median([turn[name] for turn in turns]))
    return {
        "us_a_call": round(microseconds, 2),
        "rows_per_s": round(1e6 * batch / microseconds, 1),
        "times_as_fast_as_treelite": round(float(np.median([turn["treelite"] / turn[name] for turn in turns])), 3),
    }


def to_markdown(result: dict[str, Any]) -> str:
    """A row an engine and batch size."""
    lines = [
        "| batch | engine | us a call | rows/s | x treelite | greatest difference |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for batch, engines in result["medians"].items():
        for name, found in engines.items():
            difference = result["greatest_difference_to_scikit_learn"][name]
            lines.append(f"| {batch} | {name} | " + " | ".join(map(str, found.values())) + f" | {difference:.1e} |")
    return "\n".join(lines) + "\n"


def treelite_engine(checkpoint: Path) -> Predict:
    """As shoal's backend serves it."""
    predict = load_forest(checkpoint)
    return lambda rows: predict(rows).reshape(-1)


def nvforest_engine(checkpoint: Path) -> Predict:
    """nvForest on the host."""
    import nvforest

    forest = nvforest.load_model(str(checkpoint), model_type="treelite_checkpoint", device="cpu", precision="single")
    return lambda rows: np.asarray(forest.predict(rows)).reshape(-1)


if __name__ == "__main__":
    typer.run(main)
