"""Environments on the real server: packed, unpacked and as a venv, of several Pythons at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.environment.archive import unpack
from shoal.authoring.environment.building import Built, build
from shoal.authoring.environment.engines import find_python
from shoal.authoring.environment.spec import BuildRequest
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.plan import Plan
from shoal.clients.client.client import Client
from shoal.clients.local import Pipeline
from shoal.errors import ArtifactError, InputError, ServerError
from shoal.serving.server.launch import serve
from tests.conftest import Scale
from tests.support.channel import build_channel
from tests.support.environments import NUMPY_2, WHEELS, Venvs, find_stub, skip_without
from tests.support.once import ROOT

TEXTS = ["The cat sat.", "It is nonetheless imperative that epistemology be considered.", "", "漢字 🐟 שלום"]


@pytest.fixture(scope="module")
def unpacked(packed: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(packed.environment, tmp_path_factory.mktemp("unpacked") / "env")


def score(repository: Path) -> Any:
    with serve(repository) as server, Client(server.grpc_url) as client:
        return client.infer("ensemble_all", excerpt=TEXTS)["SCORE"]


def compose_with(artifacts: Path, folder: Path, environments: Mapping[str, Path], **more: Any) -> Path:
    return compose("ensemble_all", folder / "repository", artifacts=artifacts, environments=environments, **more)


def test_packed_and_unpacked(
    packed: Built, unpacked: Path, artifacts: Path, pipeline: Pipeline, tmp_path: Path, scale: Scale
) -> None:
    """The archive in one model, the folder in the other; with ``--verify``, then the other way round."""
    archive, folder = packed.environment.parent, unpacked
    for name, pre, post in (("a", archive, folder), ("b", folder, archive))[: scale(1, full=2)]:
        stubs = {"": packed.stub} if packed.stub else {}
        repository = compose_with(artifacts, tmp_path / name, {"preprocess": pre, "postprocess": post}, stubs=stubs)
        np.testing.assert_allclose(score(repository), pipeline(excerpt=TEXTS)["SCORE"], atol=1e-6)
    shared = [path.stat().st_nlink for path in (tmp_path / "a").rglob("custom_env.tar.gz")]
    assert shared == [1]


def test_an_archive_for_all_is_kept_once(packed: Built, artifacts: Path, tmp_path: Path) -> None:
    repository = compose_with(artifacts, tmp_path, {"": packed.environment.parent})
    copies = sorted(repository.rglob("custom_env.tar.gz"))
    assert [path.parent.name for path in copies] == ["postprocess", "preprocess"]
    assert copies[0].samefile(copies[1])
    parameters = read_config(repository / "preprocess").spec.parameters
    assert parameters["EXECUTION_ENV_PATH"] == "$$TRITON_MODEL_DIRECTORY/custom_env.tar.gz"
    assert (repository / "preprocess" / "triton_python_backend_stub").stat().st_mode & 0o111


def test_venvs_of_two_pythons_in_one_server(venvs: Venvs, artifacts: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    """NumPy below 2 and the wheel's stubs: Python 3.12 in one model, 3.11 in the other."""
    places = {"preprocess": venvs("3.12").environment.parent, "postprocess": venvs("3.11").environment.parent}
    repository = compose_with(artifacts, tmp_path, places)
    np.testing.assert_allclose(score(repository), pipeline(excerpt=TEXTS)["SCORE"], atol=1e-6)


def test_shoals_own_file_packed_for_another_python(
    artifacts: Path, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Scale
) -> None:
    """env/environment-embedded.yml: Python 3.12 from a conda channel, the rest by pip."""
    if not scale.is_full:
        pytest.skip("in make verify")
    skip_without("3.12")
    monkeypatch.setenv("PIP_FIND_LINKS", str(WHEELS))
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))  # the other channel's pip has the same name
    url = build_channel(tmp_path / "channel", find_python("3.12").parents[1], ["pip"], tmp_path / "work")
    source = ROOT / "env" / "environment-embedded.yml"
    built = build(BuildRequest(source, tmp_path / "env", python="3.12", channels=(url,)))
    repository = compose_with(artifacts, tmp_path, {"": built.environment.parent})
    np.testing.assert_allclose(score(repository), pipeline(excerpt=TEXTS)["SCORE"], atol=1e-6)


@pytest.mark.parametrize(("pre", "post"), [("3.12", "3.13"), ("3.13", "3.12")])
def test_numpy_2_with_a_stub_built_for_it(
    venvs: Venvs, artifacts: Path, pipeline: Pipeline, tmp_path: Path, pre: str, post: str
) -> None:
    """Two Pythons, NumPy 2 in the components and NumPy 1 in the models, all in one server."""
    places = {
        model: venvs(python, NUMPY_2, find_stub(python)).environment.parent
        for model, python in (("preprocess", pre), ("postprocess", post))
    }
    repository = compose_with(artifacts, tmp_path, places)
    np.testing.assert_allclose(score(repository), pipeline(excerpt=TEXTS)["SCORE"], atol=1e-6)


def test_numpy_2_with_the_stock_stub_is_refused_at_compose_and_at_start(
    venvs: Venvs, artifacts: Path, tmp_path: Path
) -> None:
    fitting = venvs("3.12")
    numpy_2 = venvs("3.12", NUMPY_2, str(broken_stub(fitting, tmp_path)))
    with pytest.raises(ArtifactError, match=r"It has NumPy 2\.[\d.]+, and this stub silently corrupts tensors"):
        compose_with(artifacts, tmp_path, {"": numpy_2.environment}, stubs={"": fitting.stub})
    repository = compose_with(artifacts, tmp_path, {"": fitting.environment.parent})
    for model in ("preprocess", "postprocess"):  # edits of a configuration by hand are reported at the start
        config = repository / model / "config.pbtxt"
        text = config.read_text(encoding="utf-8").replace(str(fitting.environment), str(numpy_2.environment))
        config.write_text(text, encoding="utf-8")
    with pytest.raises(ServerError, match=r"This stub corrupts TYPE_\w+ tensors under NumPy 2\.[\d.]+\. Use numpy<2"):
        serve(repository)


def broken_stub(built: Built, folder: Path) -> Path:
    """The stock stub, made to look as if its pybind11 knew NumPy 2: what lies beyond what can be read off a binary."""
    assert built.stub
    content = built.stub.read_bytes()
    path = folder / "stub"
    path.write_bytes(content + b"numpy._core")
    return path


def test_wrong_names_are_refused(packed: Built, artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no Python model 'cuml'\. Known: preprocess, postprocess\."):
        compose_with(artifacts, tmp_path, {"cuml": packed.environment})
    with pytest.raises(InputError, match="A stub was given without an environment"):
        compose_with(artifacts, tmp_path, {}, stubs={"": packed.stub})
    with pytest.raises(ArtifactError, match=r"does not fit target 26\.06: "):
        compose_with(artifacts, tmp_path, {"": packed.environment.parent}, plan=Plan(target="26.06"))
    assert not (tmp_path / "repository").exists()
