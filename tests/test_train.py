from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.component.bundle import sha256
from shoal.errors import InputError
from shoal.repository.compose import compose
from shoal.training.corpus import Corpus
from shoal.training.train import train
from tests.conftest import ROOT, TINY


def test_another_encoder_serves_in_the_same_slot(tiny_bert: Path, passages: Corpus, tmp_path: Path) -> None:
    from shoal.serving.local import Pipeline

    stages: dict[str, tuple[int, int]] = {}
    report = train(
        passages, tmp_path / "artifacts", encoder=str(tiny_bert), preset=TINY,
        on_progress=lambda stage, done, total: stages.__setitem__(stage, (done, total)),
    )  # fmt: skip
    assert list(stages) == ["load encoder", "train forest", "train encoder", "export encoder", "score held-out texts"]
    assert set(report["held_out_rmse"]) == {"encoder", "forest", "blend", "mean_of_training"}
    repository = compose("ensemble_all", tmp_path / "repository", artifacts=tmp_path / "artifacts")
    scores = Pipeline.load(repository / "ensemble_all")(excerpt=["w1 " * 200])
    assert np.isfinite(scores["SCORE"]).all()  # cut at this encoder's own 64 positions


def test_the_same_seed_gives_the_same_text_artifacts(tiny_bert: Path, passages: Corpus, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(passages, tmp_path / name, encoder=str(tiny_bert), preset=TINY, seed=5)
    for artifact in ("preprocess.json", "vocab.txt", "checkpoint.tl"):
        assert sha256(tmp_path / "one" / artifact) == sha256(tmp_path / "two" / artifact)


def test_what_is_no_artifact_folder_is_not_replaced(passages: Corpus, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(InputError, match=r"shoal did not make it \(it holds no report\.json of shoal's\)"):
        train(passages, tmp_path, preset=TINY)


def test_a_failed_training_leaves_no_folder(passages: Corpus, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        train(passages, tmp_path / "artifacts", encoder=str(tmp_path / "nowhere"), preset=TINY)
    assert list(tmp_path.iterdir()) == []


def test_the_leafs_own_scripts(artifacts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "artifacts"
    subprocess.run(["cp", "-r", artifacts, copy], check=True)
    before = sha256(copy / "checkpoint.tl")
    script = ROOT / "models" / "cuml" / "train.py"
    run = subprocess.run([sys.executable, script, copy, "--seed", "7"], capture_output=True, text=True, check=True)
    assert "checkpoint.tl" in run.stdout
    assert sha256(copy / "checkpoint.tl") != before
    compose("ensemble_all", tmp_path / "repository", artifacts=copy)
    encoder = ROOT / "models" / "bert-large" / "train.py"
    assert "--encoder" in subprocess.run([sys.executable, encoder, "--help"], capture_output=True, text=True).stdout
