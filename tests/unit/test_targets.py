"""Table of the releases, and what it decides: images, backends, environments, GPU libraries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.environment.building import find_file
from shoal.authoring.environment.targets import (
    IMAGES,
    NEWEST,
    TABLE,
    explain_backend,
    find_target,
    parse_release,
    show_release,
)
from shoal.authoring.repository.plan import Plan
from shoal.cli import app
from shoal.cli.doctor import FAULT, examine
from shoal.errors import ArtifactError, InputError
from tests.support.once import ROOT
from tests.support.planted import Plant, config
from tests.support.planted_environments import GOOD
from tests.support.planted_targets import OURS

MONTHS = [(year, month) for year in range(22, 27) for month in range(1, 13)]
RELEASES = [show_release(month) for month in MONTHS if (22, 11) <= month <= NEWEST]


@pytest.mark.parametrize("name", RELEASES)
def test_every_release_has_one_image_of_each_kind(name: str) -> None:
    target = find_target(name)
    there = [image.suffix for image in IMAGES if image.first <= target.release <= image.last]
    assert len(there) == len(set(there))
    assert "py3" in there
    assert ("vllm-python-py3" in there) == (target.release >= (23, 10))
    assert ("trtllm-python-py3" in there) == ((23, 10) <= target.release <= (26, 7))
    image = target.find_image({"python"})
    assert image is not None
    assert image.suffix == "py3"
    assert image.row(target.release).python == target.python


@pytest.mark.parametrize(
    ("name", "python", "cuda", "has_numpy_2", "onnx"),
    [
        ("22.11", "3.8", 11, False, (17, 8)),
        ("23.08", "3.10", 12, False, (19, 9)),
        ("24.10", "3.10", 12, False, (21, 10)),
        ("24.11", "3.12", 12, True, (21, 10)),
        ("25.07", "3.12", 12, True, (22, 10)),
        ("25.08", "3.12", 13, True, (23, 11)),
        ("26.11", "3.12", 13, True, (26, 13)),
        ("31.01", "3.12", 13, True, (26, 13)),
    ],
)
def test_what_a_release_has(name: str, python: str, cuda: int, has_numpy_2: bool, onnx: tuple[int, int]) -> None:
    target = find_target(name)
    assert (target.python, target.supports_numpy_2, target.row.opset, target.row.ir) == (python, has_numpy_2, *onnx)
    image = target.find_image({"python", "fil"})
    assert image is not None
    assert image.row(target.release).cuda == cuda


def test_an_image_may_be_behind_its_release() -> None:
    for name, python, cuda in (("24.11", "3.10", 12), ("25.10", "3.12", 12), ("25.11", "3.12", 13)):
        image = find_target(name).find_image({"tensorrtllm"})
        assert image is not None
        row = image.row(parse_release(name))
        assert (row.python, row.cuda) == (python, cuda)


def test_the_page_has_the_table() -> None:
    rows = re.findall(
        r"^\| (2\d\.\d\d) \| (.*) \|$", (ROOT / "docs" / "targets.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == len(TABLE)
    for (first, text), (release, row) in zip(rows, TABLE.items(), strict=True):
        treelite = "2.4, 3" if row.treelite[1][0] == (3, 0) else "3.9, 4"
        has = (row.ubuntu, row.python, row.cuda, "yes" if row.numpy_2 else "no", treelite, row.opset, row.ir)
        assert (first, text) == (show_release(release), " | ".join(map(str, has)))


def test_when_a_backend_is_in_the_images() -> None:
    assert (
        explain_backend("tensorrtllm") == "tensorrtllm is in the images RELEASE-trtllm-python-py3 from 23.10 to 26.07."
    )
    assert explain_backend("tensorflow") == "tensorflow is in the images RELEASE-py3 from 22.11 to 25.02."
    assert explain_backend("fil") == "fil is in the images RELEASE-py3 from 22.11 on."
    assert explain_backend("fastertransformer") == "No image of NVIDIA's Triton has fastertransformer."
    assert show_release(NEWEST) == "26.11"


def test_gpu_components_on_the_embedded_server(artifacts: Path, tmp_path: Path) -> None:
    ways = r"\(--target 26\.11\); or install CuPy here, and name a stub compiled for NumPy 2 \(SHOAL_STUB\)"
    for placement in ("gpu", "hybrid"):
        with pytest.raises(ArtifactError, match=rf"needs CuPy on a GPU, which is not installed here.*{ways}"):
            compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=Plan(placement=placement))
    said = CliRunner().invoke(app, ["plan", "ensemble_all", "--placement", "gpu"], env={"COLUMNS": "300"})
    assert "warning: preprocess needs CuPy on a GPU, which is not installed here" in said.stderr
    assert CliRunner().invoke(app, ["plan", "ensemble_all", "--placement", "gpu", "--target", "26.06"]).stderr == ""


def test_the_doctor_finds_what_check_does(tmp_path: Path) -> None:
    Plant("", "", "", "", {"first/config.pbtxt": ('backend: "python"', 'backend: "vllm"')}).write(tmp_path, is_bad=True)
    name = f"{tmp_path.name}: check"
    faults = [each.found for each in examine(tmp_path) if each.check == name and each.level == FAULT]
    assert any("first/config.pbtxt:2: unable to find backend library for backend 'vllm'" in each for each in faults)


def test_an_environment_for_a_gpu_has_its_libraries(tmp_path: Path) -> None:
    """The environment has NumPy alone, and the component computes with CuPy."""
    edits = {"first/1/model.py": OURS, "first/config.pbtxt": ("KIND_CPU", "KIND_GPU")}
    repository = Plant("", "", "", "", edits, GOOD).write(tmp_path / "r", is_bad=True)
    whats = {each.what for each in check(repository) if each.rule.id == "import-not-in-environment"}
    assert "No module named 'cupy', with which first computes on a GPU: custom_env.tar.gz does not contain it." in whats


def test_a_backend_that_a_model_brings(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(config("m").replace("python", "vllm"), encoding="utf-8")
    rules = [each.rule.id for each in check(tmp_path, target="22.11")]
    assert "backend-not-in-target" in rules
    (tmp_path / "m" / "libtriton_vllm.so").touch()
    assert "backend-not-in-target" not in [each.rule.id for each in check(tmp_path, target="22.11")]


def test_models_of_one_project_may_need_several_images() -> None:
    found = check(ROOT, target="26.06")
    assert [each for each in found if each.rule.id == "backend-not-in-target"] == []


def test_shoals_own_gpu_environment_is_for_cuda_13() -> None:
    with pytest.raises(InputError, match=r"RAPIDS for CUDA 13, and the images of 25\.07 have CUDA 12\. Name a release"):
        find_file("25.07", "rattler", is_for_gpu=True)
    assert find_file("25.08", "rattler", is_for_gpu=True).name == "environment-gpu.yml"
