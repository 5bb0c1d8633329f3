"""Versions of models: the server, this process, a client and a composed repository take the same one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.manifest import MANIFEST
from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.client.failures import UnknownModelError
from shoal.clients.local import load
from shoal.errors import ArtifactError, InputError
from shoal.serving.server.launch import Server, serve
from tests.support.planted_forest import NUM_FEATURES
from tests.support.ways import WAYS, connect, url_of

# Version policy: the versions that Triton loads of 1, 2 and 3.
POLICIES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "default": ("", (3,)),
    "latest": ("version_policy { latest { num_versions: 2 } }", (2, 3)),
    "all": ("version_policy { all { } }", (1, 2, 3)),
    "one": ("version_policy { specific { versions: [ 1 ] } }", (1,)),
    "some": ("version_policy { specific { versions: [ 2, 1 ] } }", (1, 2)),
}
VERSIONS = (1, 2, 3)
SCALE = """import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component


class Scale(Component):
    def run(self, batch: Arrays) -> Arrays:
        return {{"Y": batch["X"] * batch["X"].dtype.type({factor})}}


TritonPythonModel = Scale.for_triton()
"""
FOREST = """name: "{name}"
backend: "fil"
max_batch_size: 64
input [ {{ name: "input__0" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters {{ key: "model_type" value {{ string_value: "treelite_checkpoint" }} }}
parameters {{ key: "output_class" value {{ string_value: "false" }} }}
parameters {{ key: "artifacts" value {{ string_value: "checkpoint.tl" }} }}
{policy}
"""
PYTHON = """name: "{name}"
backend: "python"
max_batch_size: 64
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {width} ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}
{policy}
"""
ENSEMBLE = """name: "{name}"
platform: "ensemble"
max_batch_size: 64
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] }} ]
ensemble_scheduling {{
  step [
    {{ model_name: "scale_{policy}" model_version: {version}
       input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "scaled" }} }},
    {{ model_name: "forest_{policy}" model_version: {version}
       input_map {{ key: "input__0" value: "scaled" }} output_map {{ key: "output__0" value: "SCORE" }} }}
  ]
}}
"""
ROWS = np.random.default_rng(1).random((5, NUM_FEATURES), np.float32)


def steps() -> list[tuple[str, int, int]]:
    """Policy, a step's model_version, and the version that answers."""
    made = []
    for policy, (_, served) in POLICIES.items():
        made += [(policy, -1, served[-1]), *((policy, version, version) for version in served)]
    return made


def name_of(policy: str, version: int) -> str:
    return f"{policy}_{version if version > 0 else 'any'}"


def grow(path: Path, seed: int) -> None:
    import treelite
    from sklearn.ensemble import RandomForestRegressor

    rows = np.random.default_rng(seed).random((60, NUM_FEATURES))
    grown = RandomForestRegressor(n_estimators=5, random_state=seed).fit(rows, rows[:, 0] * seed)
    treelite.sklearn.import_model(grown).serialize(str(path))


def write(folder: Path, text: str, versions: tuple[int, ...] = VERSIONS) -> Path:
    for version in versions:
        (folder / str(version)).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for policy, (text, _) in POLICIES.items():
        forest = write(
            root / "models" / f"forest_{policy}",
            FOREST.format(name=f"forest_{policy}", width=NUM_FEATURES, policy=text),
        )
        scale = write(
            root / "preprocess" / f"scale_{policy}",
            PYTHON.format(name=f"scale_{policy}", width=NUM_FEATURES, policy=text),
        )
        for version in VERSIONS:
            grow(forest / str(version) / "checkpoint.tl", version)
            (scale / str(version) / "model.py").write_text(SCALE.format(factor=1 / version), encoding="utf-8")
    for policy, version, _ in steps():
        name = name_of(policy, version)
        text = ENSEMBLE.format(name=name, width=NUM_FEATURES, policy=policy, version=version)
        write(root / "ensembles" / name, text, (1,))
        (root / "ensembles" / name / "1" / ".gitkeep").touch()
    return root


@pytest.fixture(scope="module")
def composed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [name_of(policy, version) for policy, version, _ in steps()]
    return compose(names, tmp_path_factory.mktemp("composed") / "repository", projects=[project])


@pytest.fixture(scope="module")
def running(composed: Path) -> Iterator[Server]:
    with serve(composed) as server:
        yield server


@pytest.fixture(scope="module")
def expected(project: Path) -> dict[int, Any]:
    """The score of each version of both models, by Treelite itself."""
    import treelite

    found = {}
    for version in VERSIONS:
        model = treelite.Model.deserialize(str(project / "models" / "forest_all" / str(version) / "checkpoint.tl"))
        rows = ROWS * np.float32(1 / version)
        found[version] = np.asarray(treelite.gtil.predict(model, rows), np.float32).reshape(-1, 1)
    assert len({answer.tobytes() for answer in found.values()}) == len(VERSIONS)
    return found


def test_every_version_folder_is_equipped(project: Path, composed: Path) -> None:
    for policy in POLICIES:
        for version in VERSIONS:
            assert (composed / f"scale_{policy}" / str(version) / "shoal" / "kit" / "component").is_dir()
            assert (composed / f"forest_{policy}" / str(version) / "checkpoint.tl").is_file()
    assert [finding.what for finding in check(composed) if finding.severity == "error"] == []
    assert [finding.what for finding in check(project) if finding.severity == "error"] == []


@pytest.mark.parametrize(("policy", "version", "answering"), steps())
def test_four_hosts_take_the_same_version(
    policy: str, version: int, answering: int, composed: Path, running: Server, expected: dict[int, Any]
) -> None:
    """To the bit: the server, this process, the client's placement, and the model asked by its version."""
    name, wanted = name_of(policy, version), expected[answering]
    with Client(running.grpc_url) as client, load(composed / name) as here:
        assert np.array_equal(client.infer(name, X=ROWS)["SCORE"], wanted)
        assert np.array_equal(here(X=ROWS)["SCORE"], wanted)
        with load(composed / name, remote=client) as there:
            assert np.array_equal(there(X=ROWS)["SCORE"], wanted)
    for way in WAYS:
        with connect(way, url_of(running, way)) as client:
            scaled = client.infer(f"scale_{policy}", X=ROWS, version=answering)
            assert scaled.version == str(answering)
            answer = client.infer(f"forest_{policy}", input__0=scaled["Y"], version=None if version < 0 else version)
            assert (answer.version, answer["output__0"].tobytes()) == (str(answering), wanted.tobytes())


def test_a_version_that_is_not_loaded_is_named(composed: Path, running: Server, tmp_path: Path) -> None:
    for way in WAYS:
        with connect(way, url_of(running, way)) as client, pytest.raises(UnknownModelError) as refused:
            client.infer("forest_one", input__0=ROWS, version=2)
        assert str(refused.value).startswith(f"The server at {url_of(running, way)} has not loaded version 2 of")
    hand = shutil.copytree(composed, tmp_path / "r")
    (hand / MANIFEST).unlink()
    for version, loaded in ((2, [1]), (7, [1])):
        config = hand / "one_1" / "config.pbtxt"
        text = config.read_text(encoding="utf-8")
        config.write_text(text.replace("model_version: 1", f"model_version: {version}"), encoding="utf-8")
        found = {finding.rule.id for finding in check(hand / "one_1")}
        assert "member-version" in found
        with pytest.raises(ArtifactError, match=rf"has no version {version} to load: .* loads \{loaded}"):
            load(hand / "one_1")
        config.write_text(text, encoding="utf-8")


def test_a_step_of_a_version_that_a_project_lacks(project: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(project, tmp_path / "mine")
    write(mine / "ensembles" / "odd", ENSEMBLE.format(name="odd", width=NUM_FEATURES, policy="one", version=3), (1,))
    found = [finding for finding in check(mine / "ensembles" / "odd") if finding.rule.id == "member-version"]
    assert "required version 3 is not loaded" in found[0].what
    with pytest.raises(ArtifactError, match="required version 3 is not loaded"):
        compose("odd", tmp_path / "r", projects=[mine])


def test_the_commands_take_the_step_s_version(composed: Path, running: Server, expected: dict[int, Any]) -> None:
    row = f"X={ROWS[0].tolist()}"
    ways = (["--local"], ["--placement", "client", "--url", running.grpc_url], ["--url", running.grpc_url])
    said = set()
    for way in ways:
        options = [*way, "--repository", str(composed)] if way[0] != "--url" else way
        result = CliRunner().invoke(app, ["infer", row, "--model", "some_1", "--json", *options])
        assert result.exit_code == 0, result.output
        said.add(result.stdout)
    (answer,) = said
    assert f'"score": {float(expected[1][0, 0])}'[:16] in answer.replace('"score":', '"score": ').replace("  ", " ")


# --- a server that has only the models ------------------------------------------------------------------------------


def test_only_the_models_on_the_server(project: Path, composed: Path, expected: dict[int, Any], tmp_path: Path) -> None:
    """Everything that is Python code runs here; the server has neither the ensemble nor the components."""
    native = compose(["forest_all", "forest_one"], tmp_path / "native", projects=[project])
    other = shutil.copytree(project, tmp_path / "other")
    grow(other / "models" / "forest_all" / "1" / "checkpoint.tl", 9)
    changed = compose("all_1", tmp_path / "changed", projects=[other])
    assert "shoal_files" in read_config(native / "forest_all").spec.parameters
    with serve(native) as server, Client(server.grpc_url) as client:
        with load(composed / "all_1", remote=client) as mine:
            assert np.array_equal(mine(X=ROWS)["SCORE"], expected[1])
        with pytest.raises(InputError, match=r"The server has another model forest_all: \w{12}, not \w{12}\."):
            load(changed / "all_1", remote=client)
        with pytest.raises(UnknownModelError, match="has no model forest_some"):
            load(composed / "some_1", remote=client)
        command = ["infer", f"X={ROWS[0].tolist()}", "--model", "all_1", "--placement", "client"]
        result = CliRunner().invoke(app, [*command, "--url", server.grpc_url, "--repository", str(composed)])
        assert result.exit_code == 0, result.output
