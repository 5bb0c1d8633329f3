"""What an execution environment costs: to build, pack and unpack, in bytes, and at each load of a model.

    python benchmarks/environments.py [--num 7]

The environment is the one of the readability components on CPU, made from a conda channel in a folder (this Python and
this environment's NumPy, tokenizers and array-api-compat), so that no network is measured; the venv is made
by pip, and not timed. The model that is loaded is `preprocess`, alone in a repository, without an environment, with a
folder, with a venv and with the archive, in turn. A load is what Triton's log says of it, from `loading` to
`successfully loaded`. The first turn is not counted: it writes
what Python compiles. The result goes to benchmarks/results/environments-DATE.json.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import typer

from shoal import compose, serve
from shoal.environment.archive import unpack
from shoal.environment.building import Built, build
from shoal.environment.spec import Request
from shoal.machine import describe_machine, library_versions
from shoal.readability.corpus import find_corpus
from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset, train

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.channel import build_channel

ROOT = Path(__file__).parents[1]
MODEL = "preprocess"
PACKAGES = ("numpy", "tokenizers", "array-api-compat")


def main(num: int = 7) -> None:
    """Measure and record."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        train(find_corpus(), folder / "artifacts", preset=Preset(num_rows=200, encoder=EncoderSettings(max_steps=1)))
        built, seconds = make(folder)
        start = time.perf_counter()
        unpacked = unpack(built.environment, folder / "unpacked")
        seconds["unpack"] = time.perf_counter() - start
        venv = build(
            Request(Path(__file__).parents[1] / "env" / "requirements-embedded.txt", folder / "venv", engine="venv")
        )
        stubs = {"": built.stub} if built.stub else {}
        repositories = {
            "none": alone(folder, "none", {}, {}),
            "folder": alone(folder, "folder", {"": unpacked}, stubs),
            "venv": alone(folder, "venv-repository", {"": venv.environment.parent}, {}),
            "archive": alone(folder, "archive", {"": built.environment.parent}, {}),
        }
        loads: dict[str, list[float]] = {kind: [] for kind in repositories}
        for _ in range(num + 1):
            for kind, repository in repositories.items():
                loads[kind].append(load_seconds(repository, folder / "log"))
        medians = {kind: float(np.median(values[1:])) for kind, values in loads.items()}
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "versions": library_versions(*PACKAGES, "py-rattler", "conda-pack", "nvidia-pytriton"),
            "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
            "bytes": {"packed": built.environment.stat().st_size, "unpacked": built.record["num_bytes"]},
            "load_seconds": {kind: [round(value, 4) for value in values] for kind, values in loads.items()},
            "load_median": {kind: round(value, 4) for kind, value in medians.items()},
            "load_ratio_to_none": {kind: round(value / medians["none"], 3) for kind, value in medians.items()},
        }
    path = Path(__file__).parent / "results" / f"environments-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("seconds", "bytes", "load_median", "load_ratio_to_none")}, indent=1))


def make(folder: Path) -> tuple[Built, dict[str, float]]:
    """Build the environment from a local channel; with the seconds of each stage."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    url = build_channel(folder / "channel", Path(sys.base_prefix), PACKAGES, folder / "work")
    specs = [f"python ={python}", *PACKAGES]
    source = folder / "environment.yml"
    source.write_text(f"channels: ['{url}']\ndependencies: {json.dumps(specs)}\n", encoding="utf-8")
    seconds: dict[str, float] = {}

    def clock(stage: str, done: int, _: int) -> None:
        seconds[stage] = time.perf_counter() - (seconds[stage] if done else 0)

    return build(Request(source, folder / "env"), clock), seconds


def alone(folder: Path, name: str, environments: Mapping[str, Path], stubs: Mapping[str, Path]) -> Path:
    """A repository of the one model."""
    composed = compose(
        "ensemble_all", folder / name, artifacts=folder / "artifacts", environments=environments, stubs=stubs
    )
    for path in composed.iterdir():
        if path.name != MODEL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return composed


def load_seconds(repository: Path, log: Path) -> float:
    """How long Triton took to load the model, by its log."""
    with serve(repository, log=log):
        pass
    text = log.read_text(encoding="utf-8")
    begin, end = (_time(text, words) for words in (f'"loading: {MODEL}:1"', f"\"successfully loaded '{MODEL}'\""))
    return (end - begin).total_seconds()


def _time(text: str, words: str) -> Any:
    found = re.search(rf"^I(\d{{4}} [\d:.]+) .*{re.escape(words)}", text, re.MULTILINE)
    if not found:
        raise SystemExit(f"Triton's log has no line {words}.")
    return datetime.strptime(f"{time.gmtime().tm_year}{found[1]}", "%Y%m%d %H:%M:%S.%f")


if __name__ == "__main__":
    typer.run(main)
