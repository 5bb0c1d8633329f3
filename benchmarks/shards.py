"""Compare sharded runs of `shoal infer`: one worker on one core, two on two, and today's single output file.

    python benchmarks/shards.py [--num 5600] [--rounds 5]

The readability ensemble with the small encoder scores texts of 20 to 60 words in this machine's processes, each command
pinned to its cores and timed as its users see it, the start included. A model that does nothing shows what reading,
planning and writing cost: the same rows, as a folder and as a file. The ways take turns. The record is
benchmarks/results/shards-DATE.json.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer
from records import write_record

from shoal import compose
from shoal.readability.corpus import find_corpus
from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset, train
from shoal.system.machine import describe_machine, library_versions

WORDS = ("the", "of", "and", "a", "to", "in", "is", "it", "was", "cat", "because", "knowledge", "precondition")
FILES = 8
NOTHING_ROWS = 100_000
NOTHING = """import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

from shoal import Component


class Nothing(Component):
    def run(self, batch):
        return {"score": np.zeros((len(batch["TEXT"]), 1), np.float32)}


TritonPythonModel = Nothing.for_triton()
"""
CONFIG = """name: "nothing"
backend: "python"
max_batch_size: 64
input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "score" data_type: TYPE_FP32 dims: [ 1 ] }]
"""
Way = tuple[Path, Path, int, list[int]]  # repository, inputs, workers, cores


def main(num: int = 5600, rounds: int = 5) -> None:
    """Measure and record."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        settings = Preset(num_rows=200, encoder=EncoderSettings(max_steps=1))
        train(find_corpus(), str(folder / "artifacts"), preset=settings)
        readability = compose("ensemble_all", folder / "readability", artifacts=folder / "artifacts")
        texts, rows = _write(folder / "texts", num), _write(folder / "rows", NOTHING_ROWS)
        nothing = _write_nothing(folder / "nothing")
        ways: dict[str, Way] = {
            "one worker, one core": (readability, texts, 1, cores[:1]),
            "two workers, two cores": (readability, texts, 2, cores),
            "one file, two cores": (readability, texts, 0, cores),
            "nothing, one worker, one core": (nothing, rows, 1, cores[:1]),
            "nothing, one file, one core": (nothing, rows, 0, cores[:1]),
        }
        turns = [{name: _run(folder, *way) for name, way in ways.items()} for _ in range(rounds)]
    one, two, file, folder_rows, file_rows = (statistics.median(turn[name] for turn in turns) for name in ways)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("numpy", "torch", "treelite"),
        "texts": {"number": num, "words": "20 to 60", "files": FILES},
        "rows of the model that does nothing": NOTHING_ROWS,
        "unit": "seconds of a command, with its start; ratios are medians of the rounds",
        "rounds": [{name: round(seconds, 2) for name, seconds in turn.items()} for turn in turns],
        "medians": {name: round(statistics.median(turn[name] for turn in turns), 2) for name in ways},
        "two workers over one": _ratio(turns, "one worker, one core", "two workers, two cores"),
        "two workers over one file": _ratio(turns, "one file, two cores", "two workers, two cores"),
        "microseconds a row that does nothing": {
            "folder": round(folder_rows / NOTHING_ROWS * 1e6, 1), "file": round(file_rows / NOTHING_ROWS * 1e6, 1),
        },
        "nothing, of readability on one core": round(folder_rows / NOTHING_ROWS / (one / num), 4),
    }  # fmt: skip
    print(write_record("shards", result), result["medians"], f"{one / two:.2f} {file / two:.2f}")


def _ratio(turns: list[dict[str, float]], slow: str, fast: str) -> float:
    return round(statistics.median(turn[slow] / turn[fast] for turn in turns), 3)


def _run(folder: Path, repository: Path, source: Path, workers: int, cores: list[int]) -> float:
    """Seconds of a command; ``workers`` is 0 for one output file, whose input is one file."""
    out = folder / ("out" if workers else "out.jsonl")
    if out.exists():
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    pattern = f"{source}/*.jsonl" if workers else f"{source}.jsonl"
    options = ["--local", "--repository", str(repository), "--input", pattern, "--output", str(out)]
    if workers:
        options += ["--workers", str(workers), "--shard-rows", str(_count(source) // (2 * FILES))]
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "infer", *options]
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    start = time.perf_counter()
    subprocess.run(pinned, check=True, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    return time.perf_counter() - start


def _count(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.iterdir())


def _write(folder: Path, num: int) -> Path:
    """Write texts to ``FILES`` files of a folder, and all of them to one beside it."""
    draw = random.Random(2)
    folder.mkdir()
    lines = []
    for number in range(num):
        text = " ".join(draw.choices(WORDS, k=draw.randint(20, 60)))
        lines.append(json.dumps({"id": number, "text": f"{text}."}) + "\n")
    for at in range(FILES):
        part = lines[at * num // FILES : (at + 1) * num // FILES]
        (folder / f"{at}.jsonl").write_text("".join(part), encoding="utf-8")
    folder.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _write_nothing(folder: Path) -> Path:
    """Write a repository of one model that reads a text and answers 0."""
    (folder / "nothing" / "1").mkdir(parents=True)
    (folder / "nothing" / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (folder / "nothing" / "1" / "model.py").write_text(NOTHING, encoding="utf-8")
    return folder


if __name__ == "__main__":
    typer.run(main)
