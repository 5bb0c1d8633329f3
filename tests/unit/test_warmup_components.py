"""Warm-ups of components of one's own: what fails costs its warm-up alone, and it is said why."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.warmup import WarmUps, derive, write
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import MANIFEST, read_manifest
from shoal.authoring.repository.warmup_request import FOLDER
from shoal.cli import app
from shoal.kit.component.files import sha256

MODEL = """import numpy as np

from shoal.kit.component.base import Component
from shoal.errors import ArtifactError, InputError


class Own(Component):
    def run(self, batch):
        {body}
        return {{"Y": batch["X"] + 1}}


TritonPythonModel = Own.for_triton()
"""
REFUSES_ZEROS = 'if not batch["X"].any():\n            raise InputError("X is 0.", "Send more.\\nPlease.")'
REFUSES_ALL = 'raise ArtifactError(f"{self.context.folder}/table.bin is damaged.")'


def tensor(kind: str, name: str, dtype: str = "TYPE_FP32") -> str:
    return f'{kind} {{ name: "{name}" data_type: {dtype} dims: 1 }}\n'


def leaf(root: Path, name: str, body: str = "", more: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(MODEL.format(body=body), encoding="utf-8")
    config = f'name: "{name}" backend: "python" max_batch_size: 8\n{tensor("input", "X")}{tensor("output", "Y")}{more}'
    (root / name / "config.pbtxt").write_text(config, encoding="utf-8")


def ensemble(root: Path, name: str, *steps: tuple[str, str, str]) -> None:
    """Write an ensemble with input A and output Z; a step is a model, its inputs and its outputs."""
    (root / name / "1").mkdir(parents=True)
    wired = "".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "{"A" if model == "inner" else "X"}"'
        f' value: "{read}" }} output_map {{ key: "{"Z" if model == "inner" else "Y"}" value: "{written}" }} }}\n'
        for model, read, written in steps
    )
    config = f'name: "{name}" platform: "ensemble" max_batch_size: 8\n{tensor("input", "A")}{tensor("output", "Z")}'
    (root / name / "config.pbtxt").write_text(f"{config}ensemble_scheduling {{ {wired} }}", encoding="utf-8")


def derived(root: Path, name: str) -> WarmUps:
    members = {path.parent.name: read_config(path.parent) for path in root.glob("*/config.pbtxt")}
    return derive([Graph.build(members[name], members)], root)


def test_a_last_step_that_fails_is_not_asked_by_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leaf(tmp_path, "last", REFUSES_ZEROS)
    ensemble(tmp_path, "all", ("last", "A", "Z"))
    with caplog.at_level(logging.DEBUG, "shoal"):
        found = derived(tmp_path, "all")
    assert found == WarmUps({}, {"last": "it does not run here: InputError: X is 0. Send more.\\nPlease."})
    leaf(tmp_path, "none", "return")
    why = 'run of model none returned None. It has to return a dict of outputs: {"Y": array}'
    ensemble(tmp_path, "some", ("none", "A", "Z"))
    assert derived(tmp_path, "some").reasons == {"none": f"it does not run here: {why}"}
    assert caplog.text == ""


def test_reasons_name_no_place_that_is_gone(tmp_path: Path) -> None:
    leaf(tmp_path / "leaves" / "models", "own", REFUSES_ALL)
    made = [compose("own", tmp_path / n, artifacts=tmp_path, projects=[tmp_path / "leaves"]) for n in ("one", "two")]
    reason = "it does not run here: ArtifactError: own/1/table.bin is damaged."
    assert read_manifest(made[0])["not_warmed_up"] == {"own": reason}
    assert sha256(made[0] / MANIFEST) == sha256(made[1] / MANIFEST)


def test_composing_says_what_does_not_run(tmp_path: Path) -> None:
    leaf(tmp_path / "leaves" / "models", "own", "return")
    options = ["own", tmp_path / "out", "--project", tmp_path / "leaves", "--placement", "cpu"]
    said = CliRunner().invoke(app, ["compose", *map(str, options)]).stderr
    why = 'run of model own returned None. It has to return a dict of outputs: {"Y": array}'
    assert f"Model own does not run here, and is not warmed up: {why}\n" in said


def test_members_of_an_ensemble_within_get_what_reaches_them(tmp_path: Path) -> None:
    for name in ("first", "second", "third", "fourth"):
        leaf(tmp_path, name, REFUSES_ALL if name == "fourth" else "")
    ensemble(tmp_path, "inner", ("second", "A", "B"), ("fourth", "B", "Unread"), ("third", "B", "Z"))
    ensemble(tmp_path, "all", ("first", "A", "B"), ("inner", "B", "C"), ("fourth", "C", "Z"))
    found = derived(tmp_path, "all")
    reached = {name: float(inputs["X"].item()) for name, inputs in found.requests.items()}
    assert reached == {"first": 0, "second": 1, "third": 2}
    assert found.reasons.keys() == {"fourth"}


@pytest.mark.parametrize("order", [("A", "B"), ("B", "A")])
def test_one_step_of_a_model_that_fails_takes_nothing_from_another(order: tuple[str, str], tmp_path: Path) -> None:
    """It is asked for zeros in one of its steps, which it refuses, and for ones in the other."""
    leaf(tmp_path, "one")
    leaf(tmp_path, "twice", REFUSES_ZEROS)
    steps = [("twice", read, f"Z{read}") for read in order]
    ensemble(tmp_path, "all", ("one", "A", "B"), *steps, ("one", "ZB", "Z"))
    found = derived(tmp_path, "all")
    assert found.reasons == {}
    assert found.requests["twice"]["X"].item() == 1
    assert found.requests["one"]["X"].item() == 0  # its first step's


def test_a_leafs_own_warm_up_is_left_alone(tmp_path: Path) -> None:
    own = 'model_warmup { name: "mine" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: 1'
    leaf(tmp_path / "leaves" / "models", "own", more=own + ' input_data_file: "x" } } }')
    (tmp_path / "leaves" / "models" / "own" / FOLDER).mkdir()
    (tmp_path / "leaves" / "models" / "own" / FOLDER / "x").write_bytes(np.float32(7).tobytes())
    made = compose("own", tmp_path / "made", artifacts=tmp_path, projects=[tmp_path / "leaves"])
    assert [entry.name for entry in read_config(made / "own").message.model_warmup] == ["mine"]
    assert (made / "own" / FOLDER / "x").read_bytes() == np.float32(7).tobytes()
    assert f"own/{FOLDER}/x" in json.loads((made / MANIFEST).read_text(encoding="utf-8"))["files"]


def test_texts_are_bytes_whatever_a_component_made_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(
        f'name: "m" backend: "python" max_batch_size: 8\n{tensor("input", "X", "TYPE_STRING")}', encoding="utf-8"
    )
    for number, (value, expected) in enumerate({"naïve": "naïve".encode(), b"\xff": b"\xff", 207: b"207"}.items()):
        message = read_config(tmp_path).message
        (tmp_path / str(number)).mkdir()
        write(message, tmp_path / str(number), {"X": np.array([[value]], object)})
        written = (tmp_path / str(number) / FOLDER / "X").read_bytes()
        assert written == len(expected).to_bytes(4, "little") + expected
