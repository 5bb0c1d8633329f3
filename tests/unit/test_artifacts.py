"""Errors for bad artifacts, at compose and at start: they name file, fault and fix."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import treelite
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestRegressor

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.clients.local import load_component
from shoal.errors import ArtifactError
from shoal.kit.component.files import sha256
from shoal.kit.component.provenance import METADATA, dump_ties, read_archive
from shoal.kit.forests.checkpoints import read_forest
from shoal.serving.server.launch import find_cause
from tests.support.faults import ALONE, MODELS, TOGETHER, Fault, edit, holds  # fmt: skip
from tests.support.links import linked, said_of


def inodes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in sorted(folder.rglob("*"))}


def refuse(call: Callable[[], object], message: str, name: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        call()
    assert message in str(refused.value)
    assert name in refused.value.what
    assert "\n" not in str(refused.value)
    assert "shoal train" in refused.value.fix


@pytest.mark.parametrize(("name", "fault", "change", "message"), ALONE, ids=[f"{f[0]}: {f[1]}" for f in ALONE])
def test_a_bad_artifact_is_neither_composed_nor_started(
    artifacts: Path, repository: Path, tmp_path: Path, name: str, fault: str, change: Fault, message: str
) -> None:
    folder = linked(artifacts, tmp_path / "artifacts", name, change)
    target = tmp_path / "target"
    shutil.copytree(repository, target, copy_function=os.link)
    before = inodes(target)
    words = said_of(folder / name, message)
    refuse(lambda: compose("ensemble_all", target, artifacts=folder), words, name)
    assert inodes(target) == before
    assert {path.name for path in tmp_path.iterdir()} == {"artifacts", "target"}

    model = MODELS[name]
    hand = linked(repository, tmp_path / "hand", f"{model}/1/{name}", change)
    words = said_of(hand / model / "1" / name, message)
    if fault in ("a folder", "a dead link"):
        words = words.partition(" it is ")[2] or words.removeprefix("it is ")
    elif name == "vocab.txt" and fault != "empty":
        words = "vocab.txt is not the one preprocess.json was made with"
    refuse(lambda: load_component(read_config(hand / model)), words, name)


@pytest.mark.parametrize(("fault", "name", "change", "message", "refuser"), TOGETHER, ids=[f[0] for f in TOGETHER])
def test_artifacts_that_do_not_belong_together(
    artifacts: Path, repository: Path, tmp_path: Path, fault: str, name: str, change: Fault, message: str, refuser: str
) -> None:
    folder = linked(artifacts, tmp_path / fault, name, change)
    if name == "vocab.txt":
        bundle = folder / "preprocess.json"
        digest = sha256(folder / name)
        bundle.unlink()
        shutil.copyfile(artifacts / "preprocess.json", bundle)
        edit(vocabulary_sha256=digest)(bundle)
    refuse(lambda: compose("ensemble_all", tmp_path / "target", artifacts=folder), message, name)
    hand = linked(repository, tmp_path / "hand", f"preprocess/1/{name}", change)
    refuse(lambda: load_component(read_config(hand / refuser)), f"was made with another {name} than {hand}", name)


def test_damaged_reports(artifacts: Path, tmp_path: Path) -> None:
    folder = linked(artifacts, tmp_path / "artifacts", "report.json", holds("{"))
    for text, message in (("{", "is not a training report: Expecting"), ('{"contents": [1]}', "its contents are not")):
        (folder / "report.json").write_text(text, encoding="utf-8")
        refuse(lambda: compose("ensemble_all", tmp_path / "target", artifacts=folder), message, "report.json")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Treelite's, of a version that is newer
@settings(max_examples=150)
@given(st.data())
def test_no_damaged_forest_reaches_treelite(small_forest: bytes, damaged: Path, data: st.DataObject) -> None:
    """Treelite ends the process on damaged files. If a flipped bit leaves a valid forest, Treelite accepts it too."""
    damaged.write_bytes(damage(small_forest, data))
    try:
        read = read_forest(damaged)
    except ArtifactError as error:
        assert str(damaged) in error.what  # noqa: PT017
        return
    if read.num_features == 6:
        scores = treelite.gtil.predict(treelite.Model.deserialize(str(damaged)), np.zeros((2, 6), np.float32))
        assert np.isfinite(scores).all()


@settings(max_examples=150)
@given(st.data())
def test_no_damaged_archive_gives_other_scores(small_archive: bytes, damaged: Path, data: st.DataObject) -> None:
    damaged.write_bytes(damage(small_archive, data))
    try:
        ties = read_archive(damaged)
        scores = score(damaged)
    except (ArtifactError, RuntimeError):  # torch's own refusal, of what only torch reads
        return
    assert ties == {"vocab.txt": "0"}
    assert torch.equal(scores, score(damaged.with_name("whole.pt")))


def score(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path))(torch.ones(1, 4))


def damage(content: bytes, data: st.DataObject) -> bytes:
    """Cut off, or with a flipped bit."""
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(-1, 7))
    return content[:at] if bit < 0 else content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "damaged"


@pytest.fixture(scope="module")
def small_forest(damaged: Path) -> bytes:
    rows = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    treelite.sklearn.import_model(RandomForestRegressor(3, random_state=0).fit(rows, rows[:, 0])).serialize(
        str(damaged)
    )
    return damaged.read_bytes()


@pytest.fixture(scope="module")
def small_archive(damaged: Path) -> bytes:
    whole = damaged.with_name("whole.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)), torch.zeros(1, 4))
        torch.jit.save(module, str(whole), _extra_files={METADATA: dump_ties({"vocab.txt": "0"})})
    return whole.read_bytes()


def test_every_model_that_did_not_load_is_named() -> None:
    log = "\"failed to load 'a' version 1: Internal: x\\n\\nAt:\"\n\"failed to load 'b' version 1: y\"\n"
    assert find_cause(log * 2) == "failed to load 'a' version 1: Internal: x; failed to load 'b' version 1: y"
