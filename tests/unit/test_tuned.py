"""The choice of `shoal tune`, and plan files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.tuned import read_tuned
from shoal.errors import ArtifactError
from shoal.lab.tune import BATCHES, Candidate, _conclude, _spearman

PLAN = {"dtype": "int8", "reason": "fast", "machine": {"cpu": "a"}, "models": {"encoder": "0" * 64}}


def _candidate(dtype: str, rate: float, shift: float = 0.0) -> Candidate:
    """Make a candidate whose scores are ``shift`` above 0 to 99."""
    scores = [np.arange(100.0).reshape(100, 1) + shift]
    return Candidate(dtype, seconds={rows: [rows / rate] for rows in BATCHES}, scores=scores, peak_mib=1)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([("fp32", 1.0), ("bf16", 1.04), ("int8", 1.09)], "int8"),
        ([("fp32", 1.0), ("bf16", 1.04), ("int8", 1.04)], "fp32"),
        ([("fp32", 1.0), ("bf16", 2.0), ("int8", 2.05)], "bf16"),
        ([("fp32", 1.0), ("bf16", 2.0), ("int8", 3.0)], "int8"),
        ([("fp32", 1.0), ("bf16", 2.0), ("int8", 3.0, 0.5)], "bf16"),
        ([("fp32", 1.0), ("bf16", 2.0, 0.0029), ("int8", 3.0, 0.0031)], "bf16"),
        ([("fp32", 1.0), ("bf16", 0.5), ("int8", 0.9)], "fp32"),
        ([("fp32", 1.0), ("bf16", 2.0), ("int8", 3.0, float("nan"))], "bf16"),
    ],
)
def test_the_fastest_whose_error_is_small(candidates: list[Any], chosen: str) -> None:
    found = [_candidate(*each) for each in candidates]
    plan = _conclude(found, np.arange(100.0).tolist())  # the error of fp32 is 0, and of others their shift
    assert plan["dtype"] == chosen


def test_int8_needs_labels() -> None:
    found = [_candidate("fp32", 1.0), _candidate("bf16", 1.5), _candidate("int8", 9.0)]
    assert _conclude(found, None)["dtype"] == "bf16"
    skipped = Candidate("bf16", "this processor has no BF16 instructions")
    plan = _conclude([found[0], skipped, found[2]], None)
    assert plan["dtype"] == "fp32"
    assert plan["candidates"][1] == {"dtype": "bf16", "why_not": "this processor has no BF16 instructions"}


def test_rank_correlation() -> None:
    from scipy.stats import spearmanr

    one, other = np.random.default_rng(0).normal(size=(2, 50))
    assert _spearman(one, other) == pytest.approx(spearmanr(one, other)[0])


def test_a_plan_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(PLAN), encoding="utf-8")
    found = read_tuned(path)
    assert (found.dtype, found.reason, found.cpu, found.models) == ("int8", "fast", "a", {"encoder": "0" * 64})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "{", json.dumps({**PLAN, "machine": "a"}), json.dumps({**PLAN, "models": ["encoder"]}),
     json.dumps({**PLAN, "models": {"encoder": 1}}), json.dumps({**PLAN, "dtype": 8})],
)  # fmt: skip
def test_what_is_no_plan_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"is not a plan of `shoal tune`"):
        read_tuned(path)


def test_no_plan_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tuned\.json"):
        read_tuned(tmp_path / "tuned.json")
