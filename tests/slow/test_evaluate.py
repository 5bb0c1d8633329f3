from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import ArtifactError, InputError
from shoal.readability.corpus import Corpus
from shoal.readability.evaluate import evaluate
from shoal.readability.train import split
from tests.support.artifacts import TINY
from tests.support.commands import Shoal

Json = dict[str, object]


def rmses(result: Json) -> dict[str, float]:
    predictions = result["predictions"]
    assert isinstance(predictions, list)
    return {entry["name"]: entry["rmse"] for entry in predictions}


def test_rows_that_were_trained_on_are_refused(artifacts: Path, passages: Corpus) -> None:
    """Whatever their case and spacing."""
    known = split(passages, TINY, 0)[0]
    first = ", ".join(str(row + 1) for row in sorted(known)[:5])
    message = (
        r"The models of .* were trained on 80 of the 100 texts of shoal passages"
        rf" \(numbers {first}, \.\.\. without the header\)"
    )
    with pytest.raises(InputError, match=message):
        evaluate(artifacts, passages)
    shouted = passages.take(known[:1])
    shouted = replace(shouted, texts=(f"  {shouted.texts[0].upper()}\n",))
    with pytest.raises(InputError, match=r"--seen skip to score the others, or --seen include to score all\."):
        evaluate(artifacts, shouted)
    with pytest.raises(InputError, match="trained on every text of the file: there is nothing left"):
        evaluate(artifacts, shouted, seen="skip")
    with pytest.raises(InputError, match=r"seen is 'maybe'\. Use one of refuse, skip, include"):
        evaluate(artifacts, passages, seen="maybe")


def test_the_figures_of_the_training_need_no_texts(artifacts: Path, shoal: Shoal) -> None:
    report = json.loads((artifacts / "report.json").read_text(encoding="utf-8"))
    assert json.loads(shoal("evaluate", artifacts, "--unseen", "--json")) == report["evaluation"]
    printed = shoal("evaluate", artifacts, "--unseen")
    assert all(f"{entry['rmse']:.3f}" in printed for entry in report["evaluation"]["predictions"])


def test_the_served_scores_are_those_of_the_report(artifacts: Path, passages: Corpus) -> None:
    """The held-out rows are those not trained on; the exported models give them the scores of the report."""
    report = json.loads((artifacts / "report.json").read_text(encoding="utf-8"))
    steps: list[tuple[str, int, int]] = []
    result = evaluate(artifacts, passages, seen="skip", on_progress=lambda *step: steps.append(step))
    assert (result["num_seen"], result["corpus"]["num_texts"]) == (80, 20)
    served = {name: rmse for name, rmse in report["unseen_rmse"].items() if name != "boosted forest"}
    assert rmses(result) == pytest.approx(served, abs=2e-4)
    assert steps[-1] == ("score", 20, 20)
    assert len(result["artifacts"]["model.pt"]) == 64
    everything = evaluate(artifacts, passages, seen="include")
    assert everything["corpus"]["num_texts"] == 100
    assert rmses(everything)["forest"] < rmses(result)["forest"]


def test_new_texts(artifacts: Path) -> None:
    corpus = Corpus("new", ("A cat sat here.", "", "The quick brown fox.") * 15, np.linspace(-1, 1, 45))
    result = evaluate(artifacts, corpus)
    assert result["num_seen"] == 0
    assert {"encoder", "forest", "blend", "mean of training rows"} == set(rmses(result))
    alone = evaluate(artifacts, corpus.take([0]))["predictions"]
    assert all(entry["rmse_interval"] is None for entry in alone)  # of one text
    assert evaluate(artifacts, corpus.take(range(10)))["predictions"][0]["rmse_interval"] is not None


def test_folders_that_are_none(artifacts: Path, passages: Corpus, tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"is not an artifact folder of this shoal version: it has no report\.json of a"
    ):
        evaluate(tmp_path, passages)
    copy = tmp_path / "copy"
    shutil.copytree(artifacts, copy)
    (copy / "trained_on.txt").write_text("", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"trained_on\.txt is not the file that was trained with the others"):
        evaluate(copy, passages)
