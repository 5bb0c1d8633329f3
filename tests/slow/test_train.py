from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.errors import InputError
from shoal.kit.component.files import sha256
from shoal.readability.corpus import Corpus
from shoal.readability.evaluate import evaluate
from shoal.readability.train import train
from tests.conftest import Scale
from tests.support.artifacts import TINY
from tests.support.once import ROOT
from tests.support.training import FOLDS

# Trains on shoal's passages in a process of its own, and says each step.
TRAIN = """
import sys
from pathlib import Path
from shoal.readability.corpus import read_passages
from shoal.readability.train import train
from tests.support.training import FOLDS
def say(stage, done, total):
    print(stage, done, flush=True)
train(read_passages(), sys.argv[1], encoder=sys.argv[2], preset=FOLDS, save_every=0, on_progress=say)
"""


def test_another_encoder_serves_in_the_same_slot(tiny_bert: Path, passages: Corpus, tmp_path: Path) -> None:
    from shoal.clients.local import load

    stages: dict[str, tuple[int, int]] = {}
    report = train(
        passages, tmp_path / "artifacts", encoder=str(tiny_bert), preset=TINY,
        on_progress=lambda stage, done, total: stages.__setitem__(stage, (done, total)),
    )  # fmt: skip
    assert list(stages) == [
        "load encoder", "train forest", "train encoder", "export encoder", "score held-out texts", "report",
    ]  # fmt: skip
    names = {"encoder", "forest", "blend", "boosted forest", "mean of training rows"}
    assert set(report["unseen_rmse"]) == names
    repository = compose("ensemble_all", tmp_path / "repository", artifacts=tmp_path / "artifacts")
    scores = load(repository / "ensemble_all")(excerpt=["w1 " * 200])
    assert np.isfinite(scores["SCORE"]).all()  # cut at this encoder's own 64 positions


def run(out: Path, encoder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TRAIN, str(out), str(encoder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def read(artifacts: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((artifacts / "report.json").read_text(encoding="utf-8"))
    return report


@pytest.fixture(scope="module")
def unbroken(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "artifacts"
    with run(out, tiny_bert) as process:
        process.communicate()
    assert process.returncode == 0
    return out


def test_a_full_training(unbroken: Path, passages: Corpus) -> None:
    report = read(unbroken)
    assert report["evaluation"]["kind"] == "2-fold cross-validation"
    assert report["num_trained_on"] == report["evaluation"]["num_texts"] == 100
    assert [entry["fold"] for entry in report["encoder"]["chosen"]] == [1, 2]
    assert report["encoder"]["name"] == "bert0"  # the folder's name, without its path
    share = np.median([entry["best_step"] / entry["num_steps"] for entry in report["encoder"]["chosen"]])
    assert report["encoder"]["num_steps"] == max(1, round(share * FOLDS.encoder.count_steps(100)))
    best = {
        head: np.mean([min(entry["inner_rmse"][head] for entry in fold) for fold in report["encoder"]["histories"]])
        for head in ("mean", "cls")
    }
    assert report["encoder"]["head"] == min(best, key=lambda head: best[head])
    assert json.loads((unbroken / "postprocess.json").read_text(encoding="utf-8")) == {
        "bert_weight": report["bert_weight"]
    }
    with (unbroken / "unseen.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["text"]) for row in rows] == list(range(1, 101))
    assert [float(row["target"]) for row in rows] == passages.targets.tolist()
    for name in ("encoder", "forest", "blend", "boosted forest"):
        scores = np.array([float(row[name]) for row in rows])
        rmse = float(np.sqrt(np.mean((scores - passages.targets) ** 2)))
        assert rmse == pytest.approx(report["unseen_rmse"][name], abs=1e-4)
    assert len((unbroken / "trained_on.txt").read_text(encoding="utf-8").split()) == 100
    assert (unbroken / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert list(unbroken.parent.iterdir()) == [unbroken]


# Of the files that are listed, those that hold seconds differ from run to run.
TIMED = {"report.html"}


@pytest.mark.parametrize("killed_at", ["encoder, fold 2 of 2 1", "", "train encoder 3", "report 0"])
def test_the_same_seed_gives_the_same_bytes_interrupted_or_not(
    unbroken: Path, tiny_bert: Path, tmp_path: Path, killed_at: str, scale: Scale
) -> None:
    if not scale.is_full and killed_at != "encoder, fold 2 of 2 1":
        pytest.skip("in make verify")
    out = tmp_path / "artifacts"
    if killed_at:
        with run(out, tiny_bert) as process:
            assert process.stdout
            for line in process.stdout:
                if line.startswith(killed_at):
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
    with run(out, tiny_bert) as process:
        printed = process.communicate()[0].splitlines()
    assert process.returncode == 0
    first, second = read(unbroken), read(out)
    for name in first["files"].keys() - TIMED:
        assert sha256(out / name) == sha256(unbroken / name), name
    for key in ("unseen_rmse", "evaluation", "encoder", "importances", "bert_weight"):
        assert second[key] == first[key], key
    assert list(tmp_path.iterdir()) == [out]
    if killed_at.startswith("encoder, fold 2"):
        assert "encoder, fold 1 of 2 1" in printed  # read, not trained again
        assert not any(line.startswith("encoder, fold 1 of 2 2") for line in printed)


def test_seeds_that_are_none(passages: Corpus, tmp_path: Path) -> None:
    for seed in (-1, 2**32):
        with pytest.raises(InputError, match=rf"The seed is {seed}\. Give one from 0 to 4294967295\."):
            train(passages, tmp_path / "artifacts", preset=TINY, seed=seed)


def test_folders_without_artifacts_are_not_replaced(passages: Corpus, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(InputError, match=r"shoal did not make it \(it holds no report\.json of shoal's\)"):
        train(passages, tmp_path, preset=TINY)


def test_a_failed_training_leaves_no_folder(passages: Corpus, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        train(passages, tmp_path / "artifacts", encoder=str(tmp_path / "nowhere"), preset=TINY)
    assert list(tmp_path.iterdir()) == []


def test_the_leafs_own_scripts(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    copy = tmp_path / "artifacts"
    subprocess.run(["cp", "-r", artifacts, copy], check=True)
    before = sha256(copy / "checkpoint.tl")
    script = ROOT / "models" / "cuml" / "train.py"
    run = subprocess.run([sys.executable, script, copy, "--seed", "7"], capture_output=True, text=True, check=True)
    assert "checkpoint.tl" in run.stdout
    assert sha256(copy / "checkpoint.tl") != before
    assert all(sha256(copy / name) == expected for name, expected in read(copy)["files"].items())
    assert len((copy / "trained_on.txt").read_text(encoding="utf-8").split()) == 100
    compose("ensemble_all", tmp_path / "repository", artifacts=copy)
    report = read(copy)
    assert report["contents"]["cuml"] == "random forest, 100 trees of depth 16, by scikit-learn"
    assert report.keys().isdisjoint({"evaluation", "importances"})
    assert not (copy / "unseen.csv").exists()
    assert evaluate(copy, Corpus("new", ("A cat.", "The dog sat."), np.array([0.0, 1.0])))["num_seen"] == 0
    encoder = ROOT / "models" / "bert-large" / "train.py"
    assert "--encoder" in subprocess.run([sys.executable, encoder, "--help"], capture_output=True, text=True).stdout
