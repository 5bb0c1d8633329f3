"""Forests that cannot be served as their library answers: each fault is named, and nothing is written."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.authoring.check.boosters import read_ubjson
from shoal.authoring.project.importing.boosters import read_xgboost
from shoal.authoring.project.importing.forests import draft_forest
from shoal.authoring.project.importing.isolated_reader import read_apart
from shoal.errors import ArtifactError, InputError, ShoalError
from tests.support.planted_imports import FAULTS, MISTAKES, Make, xgboosted

pytestmark = pytest.mark.usefixtures("may_start_processes")  # forests are read in a process of their own


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # the libraries' own, about such training
@pytest.mark.parametrize(("make", "message", "fix"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_named_and_nothing_is_written(make: Make, message: str, fix: str, tmp_path: Path) -> None:
    source = make(tmp_path)
    with pytest.raises(ArtifactError) as refused:
        shoal.add_model(source, "leaf", project=tmp_path)
    assert message in refused.value.what
    assert "\n" not in str(refused.value)
    assert refused.value.fix
    assert fix in refused.value.fix
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(("make", "options", "message", "fix"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_named(make: Make, options: dict[str, Any], message: str, fix: str, tmp_path: Path) -> None:
    source = make(tmp_path)
    with pytest.raises(InputError) as refused:
        shoal.add_model(source, "leaf", project=tmp_path, **options)
    assert message in refused.value.what
    assert fix in refused.value.fix
    assert not (tmp_path / "models").exists()


def test_a_reader_that_ends_is_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treelite ends the process on some files; the calling process survives."""
    for code, words in (("import os; os.abort()", "killed by SIGABRT"), ("raise SystemExit('gone')", "ended: gone")):
        (tmp_path / "treelite.py").write_text(code, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(ArtifactError, match=words):
            read_apart("lightgbm", b"tree", "model.txt")


def test_no_damage_of_a_booster_is_answered_otherwise(tmp_path: Path) -> None:
    """Each cut is refused; a changed byte is refused, or makes another whole forest."""
    whole = xgboosted(suffix=".ubj")(tmp_path).read_bytes()
    draw = random.Random(0)
    for size in [0, 1, 2, *(draw.randrange(len(whole)) for _ in range(100)), len(whole) - 1]:
        with pytest.raises(ArtifactError):
            read_xgboost(whole[:size], "model.ubj")
    for _ in range(5):
        spoilt = bytearray(whole)
        spoilt[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (tmp_path / "spoilt.ubj").write_bytes(spoilt)
        try:
            draft_forest(tmp_path / "spoilt.ubj", "leaf")
        except ShoalError as error:
            assert "spoilt.ubj" in error.what or "XGBoost" in error.what  # noqa: PT017


def test_both_of_xgboosts_formats_say_the_same(tmp_path: Path) -> None:
    text = json.loads(xgboosted()(tmp_path).read_bytes())
    binary = read_ubjson(xgboosted(suffix=".ubj")(tmp_path).read_bytes())

    def settle(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: settle(entry) for name, entry in sorted(value.items())}
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list):
            return [settle(entry) for entry in value]
        return round(float(value), 4) if isinstance(value, int | float) else value

    assert settle(text) == settle(binary)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "it is cut off, or damaged, at byte 1"),
        (b"[$S#i\1", "an array of type 'S'"),
        (b"{x", "a length of type 'x'"),
        (b"{i\1aX}", "'X' at byte 4 means nothing"),
        (b"[" * 100_000, "it is nested too deep"),
        (b"ZZ", "1 bytes too many"),
    ],
)
def test_invalid_ubjson_is_reported(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_ubjson(content)


def test_every_value_of_ubjson() -> None:
    assert read_ubjson(b"[i\xffU\xffI\0\1l\0\0\0\1TFZSi\2ok[#i\1Ti]]") == [
        -1,
        255,
        1,
        1,
        True,
        False,
        None,
        "ok",
        [True],
        93,
    ]
