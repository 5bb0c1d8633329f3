"""Commands that train: what they print and write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.readability.corpus import Corpus
from tests.support.commands import Shoal

pytestmark = pytest.mark.usefixtures("trained_for_a_moment")


def test_train_and_compose(shoal: Shoal, tmp_path: Path) -> None:
    printed = shoal("train", "--out", tmp_path / "artifacts")
    assert "RMSE on unseen texts: encoder" in printed
    assert "these scores are a demonstration" in printed
    assert f"artifacts: {tmp_path / 'artifacts'}" in printed
    report = json.loads(shoal("train", "--out", tmp_path / "artifacts", "--json"))
    assert report["seed"] == 0
    repository = tmp_path / "repository"
    printed = shoal("compose", "ensemble_all", repository, "--artifacts", tmp_path / "artifacts")
    assert f"next: shoal serve {repository}\n" in printed
    printed = shoal("compose", "ensemble_all", repository, "--artifacts", tmp_path / "artifacts", "--target", "26.06")
    assert f"next: shoal serve {repository} --print" in printed
    assert "tritonserver:26.06-py3" in shoal("serve", repository, "--print")


def test_a_cross_validation_of_a_file_of_ones_own(
    shoal: Shoal, tiny_bert: Path, passages: Corpus, tmp_path: Path
) -> None:
    lines = (json.dumps({"passage": t, "grade": g}) for t, g in zip(passages.texts, passages.targets, strict=True))
    (tmp_path / "my.jsonl").write_text("\n".join(lines), encoding="utf-8")
    columns = ["--data", tmp_path / "my.jsonl", "--text-column", "passage", "--target-column", "grade"]
    train = (
        "train", *columns, "--folds", 2, "--epochs", 0.5, "--batch-size", 8, "--learning-rate", 1e-3, "--dropout", 0.1,
        "--accumulation", 2, "--gradient-checkpointing", "--dtype", "fp32", "--seed", 3, "--encoder", tiny_bert,
        "--out", tmp_path / "artifacts",
    )  # fmt: skip
    printed = shoal(*train)
    assert re.search(r"weight of the encoder in the blend: [01]\.\d\d\n", printed)
    assert "2-fold cross-validation" in printed
    assert "mean of training rows" in printed
    assert f"report: {tmp_path / 'artifacts' / 'report.html'}" in printed
    report = json.loads((tmp_path / "artifacts" / "report.json").read_text(encoding="utf-8"))
    assert (report["seed"], report["preset"]["num_folds"], report["corpus"]["name"]) == (3, 2, "my.jsonl")
    assert report["preset"]["encoder"] == {
        "max_epochs": 0.5, "max_steps": None, "batch_size": 8, "learning_rate": 1e-3, "weight_decay": 0.01,
        "warm_up": 0.1, "evaluations": 3, "patience": 3, "dropout": 0.1, "accumulation": 2,
        "gradient_checkpointing": True, "dtype": "fp32",
    }  # fmt: skip
    assert shoal(*train, "--json").startswith("{")  # at once: it has been trained already
    with pytest.raises(
        InputError, match=r"holds a finished training that had other settings: seed 3, now 4\. Name ano"
    ):
        shoal(*train, "--seed", 4)
    with pytest.raises(InputError, match="were trained on 100 of the 100 texts"):
        shoal("evaluate", tmp_path / "artifacts", *columns)
    printed = shoal("evaluate", tmp_path / "artifacts", *columns, "--seen", "include")
    assert "100 texts of my.jsonl" in printed
    assert "100 of them were trained on: this does not measure new texts." in printed
    result = json.loads(shoal("evaluate", tmp_path / "artifacts", *columns, "--seen", "include", "--json"))
    assert {entry["name"] for entry in result["predictions"]} >= {"encoder", "forest", "blend"}
