"""Findings about environments, forests and networks: planted mistakes, damaged files, and torch's own answer."""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.authoring.check import environments, forest, torchscript
from shoal.authoring.check.findings import Finding
from shoal.authoring.check.forest import FILES, UnreadableError, read_trees
from shoal.authoring.check.repositories import read_repository
from shoal.authoring.check.torchscript import ForeignError, Script, arguments, find_method
from shoal.authoring.environment.targets import find_target
from tests.support import planted_environments, planted_forest, planted_torchscript
from tests.support.planted import Plant


def look(family: ModuleType, path: Path, target: str | None = None) -> list[Finding]:
    repository = read_repository(path, find_target(target) if target else None)
    return [finding for model in repository.models for finding in family.find(model, repository)]


def cuts(content: bytes) -> list[bytes]:
    """Its beginnings: all short ones, and some of each length."""
    lengths = {*range(0, min(len(content), 60)), *range(0, len(content), max(1, len(content) // 70))}
    return [content[:length] for length in sorted(lengths)]


def spoils(content: bytes, count: int = 80) -> list[bytes]:
    """It, with a few bytes changed."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        spoilt = bytearray(content)
        for _ in range(draw.choice((1, 3, 30))):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        found.append(bytes(spoilt))
    return found


DAMAGED: list[tuple[str, ModuleType, Callable[[], dict[str, Any]], str, str]] = [
    ("checkpoint", forest, lambda: planted_forest.GOOD, planted_forest.FILE, "forest-unreadable"),
    ("json", forest, lambda: planted_forest.BOOSTED, "forest/1/xgboost.json", "forest-unreadable"),
    ("text", forest, lambda: planted_forest.LIGHTGBM, "forest/1/model.txt", ""),
    ("torch", torchscript, planted_torchscript.good, planted_torchscript.FILE, "torchscript-foreign"),
    (
        "environment",
        environments,
        lambda: planted_environments.GOOD,
        planted_environments.ARCHIVE,
        "environment-misfit",
    ),
]


@pytest.mark.parametrize(("family", "edits", "file", "rule"), [d[1:] for d in DAMAGED], ids=[d[0] for d in DAMAGED])
def test_damage_is_found_or_passed_over_and_nothing_is_raised(
    family: ModuleType, edits: Callable[[], dict[str, Any]], file: str, rule: str, tmp_path: Path
) -> None:
    root = Plant("", "", "", "", {}, edits()).write(tmp_path / "r", is_bad=False)
    content = (root / file).read_bytes()
    repository = read_repository(root / file.split("/")[0])
    (model,) = repository.models
    for cut in cuts(content):
        (root / file).write_bytes(cut)
        found = list(family.find(model, repository))
        assert not rule or rule in {finding.rule.id for finding in found}, len(cut)
    for spoilt in spoils(content):
        (root / file).write_bytes(spoilt)
        list(family.find(model, repository))


@pytest.mark.parametrize("model_type", FILES)
def test_foreign_forests_are_refused_by_name_or_passed_over(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / FILES[model_type]
    draw = random.Random(model_type)
    begins = (b"", b"{", b"{}", b"[]", b"null", b'{"learner": 1}', b'{"learner": {"learner_model_param": []}}', b"tree")
    for begin in begins:
        for content in (begin, begin + draw.randbytes(300), begin + b"[" * 100_000):
            path.write_bytes(content)
            with suppress(UnreadableError):
                read_trees(path, model_type)


@pytest.mark.parametrize("kind", ["regressor", "classifier", "two targets"])
def test_a_checkpoint_says_what_treelite_says(kind: str, tmp_path: Path) -> None:
    treelite = pytest.importorskip("treelite")
    path = tmp_path / "checkpoint.tl"
    path.write_bytes(planted_forest.checkpoint(kind))
    trees, model = read_trees(path, "treelite_checkpoint"), treelite.Model.deserialize(str(path))
    about = model.get_header_accessor()
    assert trees.num_features == model.num_feature
    assert trees.num_targets == int(about.get_field("num_target")[0])
    assert trees.num_classes == max(about.get_field("num_class"))
    assert trees.task == int(about.get_field("task_type")[0])


# --- TorchScript, beside torch -----------------------------------------------------------------------------------


def saved() -> list[tuple[str, bool]]:
    from tests.support import modules

    return [(kind, False) for kind in modules.KINDS] + [(kind, True) for kind in modules.TRACEABLE]


def open_script(content: bytes, tmp_path: Path) -> Script:
    (tmp_path / "model.pt").write_bytes(content)
    return Script(tmp_path / "model.pt")


@pytest.mark.parametrize(("kind", "is_traced"), saved())
def test_forward_is_what_torch_says_it_is(kind: str, is_traced: bool, tmp_path: Path) -> None:
    import torch

    content = planted_torchscript.archive(kind, is_traced=is_traced)
    script = open_script(content, tmp_path)
    owner = script.find_class(script.main)
    forward = find_method(owner, "forward") if owner else None
    assert forward is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = torch.jit.load(io.BytesIO(content)).forward.schema
    expected = [(a.name, str(a.type).replace("NoneType", "None"), a.has_default_value()) for a in schema.arguments[1:]]
    assert [(name, has_default) for name, _, has_default in arguments(forward)] == [(n, d) for n, _, d in expected]
    assert [kind == "Tensor" for _, kind, _ in arguments(forward)] == [t == "Tensor" for _, t, _ in expected]


BOUND = (("placed", True), ("listed", True), ("on host", False), ("on gpu", False), ("held", False))


@pytest.mark.parametrize(("kind", "is_traced"), [*saved(), ("placed", True), ("listed", True), ("buffered", True)])
def test_a_device_is_found_in_its_line_and_nowhere_else(kind: str, is_traced: bool, tmp_path: Path) -> None:
    script = open_script(planted_torchscript.archive(kind, is_traced=is_traced), tmp_path)
    found = list(script.devices())
    assert bool(found) == ((kind, is_traced) in BOUND)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        for name, line, text in found:
            (member,) = (member for member in archive.namelist() if member.endswith(f"/{name}"))
            assert archive.read(member).decode().splitlines()[line - 1].strip() == text
            assert 'torch.device("c' in text or text == "place : Device"


CLEAN: dict[str, dict[str, Any]] = {
    "arguments' names in any order": {"inputs": (("mask", "TYPE_INT64"), ("ids", "TYPE_INT64"))},
    "names of one's own": {"inputs": (("tokens", "TYPE_INT64"), ("kept", "TYPE_INT64"))},
    "indices in any order": {"inputs": (("INPUT__1", "TYPE_INT64"), ("INPUT__0", "TYPE_INT64"))},
    "names of one's own in Python": {
        "inputs": (("a", "TYPE_INT64"), ("b", "TYPE_INT64")),
        "more": 'runtime: "model.py"',
    },
}


@pytest.mark.parametrize("fields", CLEAN.values(), ids=CLEAN)
def test_artifacts_that_the_backend_accepts_are_not_findings(fields: dict[str, Any], tmp_path: Path) -> None:
    root = Plant("", "", "", "", {}, planted_torchscript.good(**fields)).write(tmp_path / "r", is_bad=False)
    assert look(torchscript, root) == []


def test_weights_with_a_class_are_right_for_nvidias_python_runtime(tmp_path: Path) -> None:
    edits = {**planted_torchscript.good(planted_torchscript.weights), "net/1/model.py": "import torch"}
    root = Plant("", "", "", "", {}, edits).write(tmp_path / "r", is_bad=False)
    assert look(torchscript, root) == []


def test_a_label_or_a_chance_is_as_wide_as_fil_writes_it(tmp_path: Path) -> None:
    """A classifier of two classes, in XGBoost's way: one chance, which older releases turn into two."""
    more = (planted_forest.THRESHOLD, planted_forest.parameter("predict_proba", "true"))
    for width, target, is_right in ((1, "24.11", False), (2, "24.11", True), (1, "26.06", True), (2, "26.06", True)):
        content = planted_forest.config("xgboost_json", *more, width=width, output_class="true")
        trees = planted_forest.xgboost(objective="binary:logistic")
        edits: dict[str, Any] = {planted_forest.CONFIG: content, "forest/1/xgboost.json": trees}
        root = Plant("", "", "", "", {}, edits).write(tmp_path / f"{width}-{target}", is_bad=False)
        assert (look(forest, root, target) == []) == is_right


def test_other_files_of_torch_are_not_archives(tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match="no code"):
        open_script(planted_torchscript.weights(), tmp_path)


# --- environments ------------------------------------------------------------------------------------------------


def test_a_folder_is_read_by_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    (folder / "lib/python3.9/site-packages/numpy-1.26.4.dist-info").mkdir(parents=True)
    (folder / "lib/python3.9/site-packages/numpy-1.26.4.dist-info/METADATA").write_text(
        "Name: numpy\nVersion: 1.26.4\n"
    )
    (folder / "lib/python3.1").symlink_to("python3.9")
    (folder / "bin").mkdir()
    for name in ("bin/activate", "bin/python3", "pyvenv.cfg"):
        (folder / name).write_text("")
    plant = Plant("", "", "", "", {}, planted_environments.path(str(folder)))
    root = plant.write(tmp_path / "r", is_bad=False)
    assert {f.rule.id for f in look(environments, root)} == {"environment-outside"}
    (misfit,) = [f for f in look(environments, root, "embedded") if f.rule.id == "environment-misfit"]
    assert "Python 3.9" in misfit.what
    site = folder / "lib/python3.9/site-packages"
    (site / "numpy-1.26.4.dist-info/METADATA").write_text("Name: other\nVersion: 1\n")
    found = [f.what for f in look(environments, root) if f.rule.id == "environment-misfit"]
    assert "has no NumPy" in " ".join(found)
    (folder / "bin/activate").write_text("export PYTHONPATH=/opt/packages\n")  # where NumPy may be
    assert "environment-misfit" not in {f.rule.id for f in look(environments, root)}
    (folder / "bin/activate").write_text("")
    (site / "more.pth").write_text("/opt/packages\n")
    assert "environment-misfit" not in {f.rule.id for f in look(environments, root)}


def test_only_the_beginning_of_a_large_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.authoring.environment.inspection._GLANCE", 10)
    environments._read_archive.cache_clear()
    plant = Plant("", "", "", "", {}, planted_environments.GOOD)
    root = plant.write(tmp_path / "r", is_bad=False)
    assert look(environments, root, "embedded") == []
    (root / planted_environments.ARCHIVE).write_bytes(planted_environments.environment(python="3.9"))
    assert {f.rule.id for f in look(environments, root, "embedded")} == {"environment-misfit"}


def test_odd_things_in_place_of_files_are_passed_over(tmp_path: Path) -> None:
    import os

    root = Plant("", "", "", "", {}, planted_environments.GOOD).write(tmp_path / "r", is_bad=False)
    archive = root / planted_environments.ARCHIVE
    archive.unlink()
    os.mkfifo(archive)
    assert look(environments, root) == []
    for edits, file in ((planted_forest.GOOD, planted_forest.FILE), (planted_torchscript.good(), "net/1/model.pt")):
        other = Plant("", "", "", "", {}, edits).write(tmp_path / file.split("/")[0], is_bad=False)
        (other / file).unlink()
        os.mkfifo(other / file)
        for family in (forest, torchscript):
            look(family, other)
