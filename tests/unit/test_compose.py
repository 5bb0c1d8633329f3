from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.authoring.composition import compose as composing
from shoal.authoring.composition import writing
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.manifest import MANIFEST, read_manifest
from shoal.authoring.repository.plan import Plan
from shoal.authoring.vendoring import find_carried
from shoal.cli import app
from shoal.clients.local import Pipeline, load
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.kit.component.files import sha256
from shoal.kit.component.triton import CALLING
from shoal.readability.corpus import Corpus
from shoal.system import paths
from tests.support.bulk import MODEL_FOLDERS
from tests.support.once import ROOT


def files(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): sha256(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
    }


def test_the_same_inputs_give_the_same_bytes(repository: Path, artifacts: Path, tmp_path: Path) -> None:
    assert files(compose("ensemble_all", tmp_path / "again", artifacts=artifacts)) == files(repository)


def test_the_manifest_lists_every_file(repository: Path) -> None:
    manifest = read_manifest(repository)
    present = files(repository)
    del present[MANIFEST]
    assert manifest["files"] == present
    assert (manifest["ensembles"], manifest["placement"], manifest["target"]) == (["ensemble_all"], "cpu", "embedded")
    assert "MiniLM" in read_config(repository / "bert-large").spec.parameters["content"]
    assert read_manifest(repository / "cuml") == {}


def test_only_needed_modules_are_copied_into_a_model(repository: Path) -> None:
    copy = repository / "preprocess" / "1" / "shoal"
    floors, rooms = ({p.name for p in folder.iterdir()} - {"__pycache__"} for folder in (copy, copy / "kit"))
    assert floors == {"__init__.py", "errors.py", "kit", "readability", "system"}
    assert rooms == {"__init__.py", "blocks.py", "component", "text"}
    assert {p.name for p in (copy / "system").glob("*.py")} == {"__init__.py", "files.py"}
    assert not (repository / "bert-large" / "train.py").exists()
    assert (repository / "ensemble_all" / "1" / ".gitkeep").exists()


BATCHES = {"base", "context", "files", "ledger", "parameters", "spec", "tensors", "triton"}
STREAMS = {"answer_socket", "stream", "streaming"}


@pytest.mark.parametrize(
    ("model", "packages", "modules"),
    [
        ("postprocess/softmax", {"component"}, BATCHES),
        ("postprocess/readability", {"component", "readability", "text"}, BATCHES),
        ("models/llm-onnx", {"component", "generation", "engines", "text"}, BATCHES | STREAMS),
        ("models/llm_bls", {"component", "generation", "text"}, BATCHES | STREAMS | {"callees"}),
    ],
)
def test_a_model_gets_the_modules_that_it_needs(model: str, packages: set[str], modules: set[str]) -> None:
    """A component that answers once and calls no model has no socket."""
    calling = [CALLING] if read_config(ROOT / model).calls else []
    carried = find_carried([ROOT / model / "1" / "model.py"], *calling)
    assert {path.parent.name for path in carried} == {"shoal", "kit", "system", *packages}
    assert {path.stem for path in carried if path.parent.name == "component"} == {"__init__", *modules}


@pytest.mark.parametrize(
    "code",
    [
        "from shoal import Component\nclass Mine(Component): ...",
        "import shoal\nclass Mine(shoal.Component): ...",
        "import shoal as sh, sys\nclass Mine(sh.Component): ...",
    ],
)
def test_names_of_shoal_are_carried_however_they_are_imported(code: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(code, encoding="utf-8")
    assert "base.py" in {path.name for path in find_carried([tmp_path / "model.py"])}


def test_an_interrupted_compose_leaves_the_old_repository_whole(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = compose("ensemble_all", tmp_path / "repository", artifacts=artifacts)
    before = files(target)
    steps = ((composing, "check_artifacts"), (writing, "_write_files"), (writing, "_write_manifest"))
    for module, step in (*steps, (composing, "exchange")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                compose("ensemble_all", target, artifacts=artifacts, plan=Plan(target="26.06"))
        assert files(target) == before
        assert [p.name for p in tmp_path.iterdir()] == ["repository"]
    compose("ensemble_all", target, artifacts=artifacts, plan=Plan(target="26.06"))
    assert read_manifest(target)["target"] == "26.06"
    assert [p.name for p in tmp_path.iterdir()] == ["repository"]


def test_folders_not_made_by_shoal_are_not_replaced(artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(InputError, match="shoal did not make it"):
            compose("ensemble_all", target, artifacts=artifacts)
    assert (tmp_path / "mine" / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_files_added_to_a_repository_are_not_lost(artifacts: Path, tmp_path: Path) -> None:
    target = compose("ensemble_all", tmp_path / "repository", artifacts=artifacts)
    (target / "mine" / "1").mkdir(parents=True)
    (target / "mine" / "1" / "model.py").touch()
    with pytest.raises(InputError, match=r"holds mine/1/model\.py, which shoal did not put there"):
        compose("ensemble_all", target, artifacts=artifacts)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MANIFEST).write_text('{"name": "a web app"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"it holds no manifest\.json of shoal's"):
        compose("ensemble_all", tmp_path / "app", artifacts=artifacts)


def test_a_leaf_may_hold_its_artifact_and_no_version_folder(artifacts: Path, tmp_path: Path) -> None:
    leaves = tmp_path / "leaves"
    for leaf in ("models/cuml", "ensembles/ensemble_all"):
        shutil.copytree(ROOT / leaf, leaves / leaf)
        shutil.rmtree(leaves / leaf / "1")
    (leaves / "models" / "cuml" / "1").mkdir()
    some = tmp_path / "some"
    shutil.copytree(artifacts, some)
    shutil.move(some / "checkpoint.tl", leaves / "models" / "cuml" / "1")
    made = compose("ensemble_all", tmp_path / "repository", artifacts=some, projects=[leaves])
    assert (made / "ensemble_all" / "1").is_dir()
    assert (made / "cuml" / "1" / "checkpoint.tl").is_file()


def test_missing_artifacts_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError,
        match=r"missing: checkpoint\.tl of cuml, model\.pt of bert-large, preprocess\.json of preprocess, ",
    ):
        compose("ensemble_all", tmp_path / "repository", artifacts=tmp_path)
    assert not (tmp_path / "repository").exists()


def test_artifacts_that_nothing_takes(artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere, given for artifacts, is not a folder\. Name the folder that holds"):
        compose("ensemble_all", tmp_path / "repository", artifacts=tmp_path / "nowhere")
    for given, said in (
        (["--artifacts", str(artifacts)], f"No model takes files from {artifacts}: none has"),
        ([], ""),
    ):
        result = CliRunner().invoke(app, ["compose", "softmax", str(tmp_path / "repository"), *given])
        assert result.exit_code == 0
        assert result.stderr.startswith(said)
        assert ("No model takes" in result.stderr) == bool(said)


def test_a_forest_of_another_bundle_is_refused(artifacts: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(artifacts, mixed)
    bundle = json.loads((mixed / "preprocess.json").read_text(encoding="utf-8"))
    bundle["mean"][0] += 1
    (mixed / "preprocess.json").write_text(json.dumps(bundle), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"checkpoint\.tl was made with another preprocess\.json"):
        compose("ensemble_all", tmp_path / "repository", artifacts=mixed)


@pytest.mark.parametrize("name", ["with blank", "semi;colon", "dollar$", "quote'", "café"])
def test_paths_that_triton_does_not_support(artifacts: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="Triton does not support the path"):
        compose("ensemble_all", tmp_path / name, artifacts=artifacts)


def test_exchange_without_the_kernels_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    made.mkdir()
    target.mkdir()
    (made / "new").touch()
    (target / "old").touch()
    monkeypatch.setattr(paths, "_RENAME_EXCHANGE", 1 << 20)  # a flag that no kernel knows
    paths.exchange(made, target)
    assert (target / "new").exists()
    assert (made / "old").exists()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    return mount_disk("120m")


def test_a_full_or_locked_disk_leaves_what_was_there(artifacts: Path, small_disk: Path) -> None:
    target = compose("ensemble_all", small_disk / "repository", artifacts=artifacts)
    before = files(target)
    with pytest.raises(SetupError, match=r"repository cannot be written: No space left on device\. What was there"):
        compose("ensemble_all", target, artifacts=artifacts)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(SetupError, match=r"repository cannot be written: Read-only file system\. What was there"):
        compose("ensemble_all", target, artifacts=artifacts)
    with pytest.raises(SetupError, match=r"other/one cannot be written: Read-only file system \(.*/other\)\. What"):
        compose("ensemble_all", small_disk / "other" / "one", artifacts=artifacts)
    assert files(target) == before
    assert [path.name for path in small_disk.iterdir()] == ["repository"]


def test_targets_that_cannot_be_written(artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for target in (tmp_path / "file" / "repository", tmp_path / "file" / "deep" / "repository"):
        with pytest.raises(SetupError, match=rf"{target} cannot be written: (File exists|Not a directory) \(.*/file"):
            compose("ensemble_all", target, artifacts=artifacts)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere and reads everything")
def test_files_that_are_not_ours_to_write_or_read(artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(SetupError, match=r"repository cannot be written: Permission denied\."):
        compose("ensemble_all", tmp_path / "locked" / "repository", artifacts=artifacts)
    some = tmp_path / "some"
    shutil.copytree(artifacts, some)
    for name in ("preprocess.json", "vocab.txt", "model.pt", "checkpoint.tl", "postprocess.json"):
        (some / name).chmod(0)
        with pytest.raises(ArtifactError, match=rf"{name} is not a .*: it cannot be read: Permission denied\. Make"):
            compose("ensemble_all", tmp_path / "repository", artifacts=some)
        (some / name).chmod(0o600)
    assert {path.name for path in tmp_path.iterdir()} == {"locked", "some"}


def test_bf16_is_chosen_once_and_written_down(
    artifacts: Path, tmp_path: Path, pipeline: Pipeline, passages: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor that computes in it; the scores stay within 0.02 of fp32's."""
    monkeypatch.setattr("shoal.authoring.repository.precision.computes_bf16", lambda: True)
    repository = compose("ensemble_all", tmp_path / "repository", artifacts=artifacts)
    manifest = read_manifest(repository)
    assert manifest["dtype"] == manifest["precision"]["bert-large"]["dtype"] == "bf16"
    assert manifest["precision"]["bert-large"]["reason"].startswith("this processor computes in BF16")
    assert read_config(repository / "bert-large").message.parameters["dtype"].string_value == "bf16"
    texts = list(passages.texts[:3])
    faster = load(repository / "ensemble_all")(excerpt=texts)["SCORE"]
    np.testing.assert_allclose(faster, pipeline(excerpt=texts)["SCORE"], rtol=0, atol=0.02)
    assert not np.array_equal(faster, pipeline(excerpt=texts)["SCORE"])


def test_several_ensembles_share_their_members(artifacts: Path, tmp_path: Path) -> None:
    repository = compose(["ensemble_all", "forest"], tmp_path / "two", artifacts=artifacts, projects=[MODEL_FOLDERS])
    one = compose("ensemble_all", tmp_path / "one", artifacts=artifacts)
    assert {path.name for path in repository.iterdir()} == {path.name for path in one.iterdir()} | {"forest"}
    assert read_manifest(repository)["ensembles"] == ["ensemble_all", "forest"]
    texts = ["The cat sat.", "Epistemology interrogates."]
    both = load(repository / "ensemble_all")(excerpt=texts), load(repository / "forest")(excerpt=texts)
    assert np.array_equal(both[0]["FOREST_SCORE"], both[1]["SCORE"])
    with pytest.raises(
        InputError, match=r"has 2 ensembles that no other ensemble calls: ensemble_all, forest\. Name one"
    ):
        load(repository)
