"""Options of the commands that train, evaluate and build environments: each value is obeyed.

A line for each option, as in ``tests/unit/test_option_repositories.py``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.readability import train as training
from shoal.readability.corpus import Corpus
from shoal.serving.server.runtime import find_runtime
from tests.support.artifacts import TINY
from tests.support.environments import WHEELS
from tests.support.options import PRINTED, Both, Elsewhere, Shoal, Table, check_both, rows
from tests.support.published import publish

pytestmark = pytest.mark.verify

TRAIN = "train --out a --encoder bert"
COLUMNS = f"{TRAIN} --data columns.csv"
MODEL = "a/model.pt"
EVALUATE = "evaluate trained"
BUILD = "env build requirements.txt --out e --engine venv --stub none"
COMPILE = f"{BUILD} --stub compile --stub-builder builder"
TABLE: Table = {
    "train --out": Both("train --encoder bert", "--out b", "--out a"),
    "train --preset": Both(f"{TRAIN} --data few.csv", "", "--preset full", "a/report.json"),
    "train --data": Both(TRAIN, "--data few.csv", "--data more.csv", MODEL),
    "train --text-column": Both(
        f"{COLUMNS} --target-column target", "--text-column text", "--text-column other", MODEL
    ),
    "train --target-column": Both(
        COLUMNS, "--target-column target --text-column text", "--target-column score --text-column text", MODEL
    ),
    "train --group-column": Elsewhere("unit/test_corpus.py::test_texts_of_one_group_stay_together"),
    "train --encoder": Both("train --out a", "--encoder bert", "--encoder published/score", MODEL),
    "train --revision": Both(TRAIN, "", "--revision abc"),
    "train --seed": Both(TRAIN, "", "--seed 1", MODEL),
    "train --folds": Both(TRAIN, "", "--folds 2", "a/report.html"),
    "train --forest": Both(TRAIN, "", "--forest boosted", "*.tl"),
    "train --epochs": Both(TRAIN, "", "--epochs 1", MODEL),
    "train --batch-size": Both(TRAIN, "", "--batch-size 4", MODEL),
    "train --learning-rate": Both(TRAIN, "", "--learning-rate 1e-2", MODEL),
    "train --dropout": Both(TRAIN, "", "--dropout 0.5", MODEL),
    "train --accumulation": Elsewhere("slow/test_fit.py::test_saving_memory_gives_the_same_gradient"),
    "train --gradient-checkpointing": Elsewhere("slow/test_fit.py::test_saving_memory_gives_the_same_gradient"),
    "train --dtype": Both(TRAIN, "", "--dtype bf16", MODEL),
    "train --fresh": Elsewhere("slow/test_option_training.py::test_a_finished_training_is_repeated_with_fresh"),
    "train --json": Both(TRAIN, "", "--json"),
    "evaluate --data": Both(EVALUATE, "--data new.csv", "--data newer.csv"),
    "evaluate --text-column": Both(f"{EVALUATE} --data new.csv", "--text-column text", "--text-column other"),
    "evaluate --target-column": Both(f"{EVALUATE} --data new.csv", "--target-column target", "--target-column score"),
    "evaluate --seen": Both(f"{EVALUATE} --data mixed.csv", "--seen skip", "--seen include"),
    "evaluate --unseen": Both(f"{EVALUATE} --data new.csv", "", "--unseen"),
    "evaluate --json": Both(f"{EVALUATE} --data new.csv", "", "--json"),
    "quickstart --out": Both("quickstart --encoder bert", "", "--out here", "*report.html"),
    "quickstart --data": Both("quickstart --encoder bert", "", "--data few.csv", PRINTED),
    "quickstart --encoder": Both("quickstart", "--encoder bert", "--encoder published/score", PRINTED),
    "quickstart --llm": Both("quickstart", "--encoder bert", "--llm", PRINTED),
    "env build --out": Both(BUILD, "", "--out f", "*/env.json"),
    "env build --target": Both(BUILD, "", "--target 24.06", "*/env.json"),
    "env build --python": Both(BUILD, "", "--python 3.7"),
    "env build --for": Elsewhere("unit/test_wanted.py::test_the_file_of_a_model_with_special_requirements"),
    "env build --gpu": Both(COMPILE, "", "--gpu"),
    "env build --engine": Both(BUILD, "", "--engine micromamba"),
    "env build --stub": Both(BUILD, "", "--stub wheel", "*stub"),
    "env build --stub-builder": Both(BUILD, "--stub compile", "--stub compile --stub-builder builder"),
    "env build --channel": Elsewhere("slow/test_build.py::test_channels_that_are_not_there"),
    "env build --json": Both(BUILD, "", "--json"),
}


@pytest.fixture(scope="module", autouse=True)
def _moments() -> Iterator[None]:
    """Let both presets train for a moment, on shoal's own passages; wheels come from a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.PRESETS, "quick", TINY)
        patch.setitem(training.PRESETS, "full", replace(TINY, num_folds=2))
        patch.delenv("SHOAL_DATA_DIR", raising=False)
        patch.setenv("PIP_FIND_LINKS", str(WHEELS))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setattr("shoal.lab.llm_quickstart._STEPS", 2)
        yield


@pytest.fixture(scope="module")
def world(tiny_bert: Path, passages: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    (root / "bert").symlink_to(tiny_bert)
    publish(tiny_bert, root / "published")
    seen = list(zip(passages.texts, passages.targets.tolist(), strict=True))
    new = [(f"{number} words of a new text.", float(number)) for number in range(6)]
    for name, texts in (
        ("few", seen[:50]), ("more", seen), ("columns", seen), ("new", new), ("newer", new[1:]),
        ("mixed", new + seen[:9]),
    ):  # fmt: skip
        with (root / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "other", "target", "score"])
            writer.writerows([text, text[:20], target, target**2] for text, target in texts)
    (root / "requirements.txt").write_text("numpy<2\n")
    (root / "builder").write_text(
        f'#!/bin/sh\n[ "$SHOAL_STUB_GPU" = OFF ] && cp {find_runtime().stub} "$SHOAL_STUB_OUT"\n'
    )
    (root / "builder").chmod(0o755)
    Shoal(root, tmp_path_factory.mktemp("first")).run(f"train --encoder bert --out {root / 'trained'}")
    return root


@pytest.fixture(scope="module")
def shoal(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Shoal:
    return Shoal(world, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("entry", rows(TABLE))
def test_two_values_give_two_results(entry: Both, shoal: Shoal) -> None:
    check_both(shoal, entry)


def test_a_finished_training_is_repeated_with_fresh(shoal: Shoal) -> None:
    line = "train --out ../again --encoder bert --epochs 0.05"
    assert shoal.run(line)[PRINTED].startswith("0 ")
    assert "holds a finished training that had other settings" in shoal.run(f"{line} --seed 1")[PRINTED]
    assert shoal.run(f"{line} --seed 1 --fresh")[PRINTED].startswith("0 ")
