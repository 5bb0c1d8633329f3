"""shoal's backend for OpenVINO, with ONNX files of a few nodes; and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shoal.authoring.check.families import check
from shoal.authoring.repository.config import read_config
from shoal.clients.local import load_component
from shoal.errors import ArtifactError
from shoal.kit.component.provenance import METADATA, dump_ties
from shoal.kit.encoders.openvino_core import find_core

CONFIG = """
backend: "openvino"
max_batch_size: 8
default_model_filename: "model.onnx"
input [ { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] }, { name: "MASK" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters { key: "attention_mask" value: { string_value: "MASK" } }
"""


def _write(folder: Path, config: str = CONFIG, ties: dict[str, str] | None = None) -> Path:
    """Write a model that sums the tokens, times a weight with more digits than BF16 has."""
    model = folder / "sum"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config, encoding="utf-8")
    nodes = [
        helper.make_node("Mul", ["IDS", "MASK"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["floats", "axis"], ["sums"], keepdims=1),
        helper.make_node("MatMul", ["sums", "weight"], ["SUM"]),
    ]
    weights: dict[str, np.ndarray[Any, Any]] = {
        "axis": np.array([1], np.int64),
        "weight": np.array([[1.001]], np.float32),
    }
    graph = helper.make_graph(
        nodes, "sum",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "width"]) for name in ("IDS", "MASK")],
        [helper.make_tensor_value_info("SUM", TensorProto.FLOAT, ["rows", 1])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if ties:
        helper.set_model_props(made, {METADATA: dump_ties(ties)})
    onnx.save(made, str(model / "1" / "model.onnx"))
    return model


def _ask(model: Path, rows: list[list[int]], width: int) -> list[float]:
    ids = np.array([row + [7] * (width - len(row)) for row in rows], np.int64)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int64)
    component = load_component(read_config(model))
    (answer,) = component.process([{"IDS": ids, "MASK": mask}])
    assert not isinstance(answer, Exception)
    found: list[float] = answer["SUM"][:, 0].tolist()
    return found


def test_rows_of_every_length_in_their_order(tmp_path: Path) -> None:
    rows = [[i] * (1 + 5 * i % 23) for i in range(8)]
    found = _ask(_write(tmp_path), rows, 30)
    np.testing.assert_allclose(found, [1.001 * sum(row) for row in rows], rtol=1e-6)


def test_bf16_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO takes the precision as a hint: on a processor on which it has no BF16, it computes in FP32."""
    hinted = CONFIG + 'parameters { key: "HINT_BF16" value: { string_value: "YES" } }'
    monkeypatch.setenv("SHOAL_BF16", "1")
    model = _write(tmp_path / "hinted", hinted)
    has_bf16 = "BF16" in find_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    options = load_component(read_config(model)).request.get_compiled_model()  # type: ignore[attr-defined]
    assert options.get_property("INFERENCE_PRECISION_HINT").to_string() == ("bf16" if has_bf16 else "f32")
    monkeypatch.setenv("SHOAL_BF16", "0")
    for other in (model, _write(tmp_path / "plain")):
        options = load_component(read_config(other)).request.get_compiled_model()  # type: ignore[attr-defined]
        assert options.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


@pytest.mark.usefixtures("may_start_processes")
def test_a_signal_after_models_came_and_went(tmp_path: Path) -> None:
    """With a core for each model, this process ended with SIGSEGV."""
    code = """
import signal, sys
from pathlib import Path
from shoal.clients.local import load_component
from shoal.authoring.repository.config import read_config
first = load_component(read_config(Path(sys.argv[1])))
second = load_component(read_config(Path(sys.argv[1])))
del first
del second
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
signal.raise_signal(signal.SIGINT)
"""
    command = [sys.executable, "-c", code, str(_write(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.parametrize(("change", "what"), [("SUM", "has no tensor TOTAL"), ("IDS", "has no tensor TOTAL")])
def test_tensors_that_the_file_lacks(change: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=what):
        load_component(read_config(_write(tmp_path, CONFIG.replace(f'"{change}"', '"TOTAL"'))))


def test_damaged_files_and_other_ties(tmp_path: Path) -> None:
    model = _write(tmp_path / "a")
    (model / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ArtifactError, match="not a model that OpenVINO runs"):
        load_component(read_config(model))
    (model / "1" / "model.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        load_component(read_config(model))
    model = _write(tmp_path / "b", ties={"vocab.txt": "0" * 64})
    (tmp_path / "b" / "other" / "1").mkdir(parents=True)
    (tmp_path / "b" / "other" / "1" / "vocab.txt").write_text("[PAD]\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="made with another vocab"):
        load_component(read_config(model))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("TARGET_DEVICE", "GPU", "not-in-own-backend"), ("RESHAPE_IO_LAYERS", "YES", "not-in-own-backend"),
     ("CPU_EXTENSION_PATH", "/a.so", "not-in-own-backend"), ("NUM_STREAMS", "4", "ignored-by-own-backend")],
)  # fmt: skip
def test_parameters_of_nvidia_that_ours_does_not_obey(name: str, value: str, rule: str, tmp_path: Path) -> None:
    config = f'{CONFIG} parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}'
    _write(tmp_path, config)
    assert [finding.rule.id for finding in check(tmp_path, target="embedded")] == [rule]
    assert not check(tmp_path, target="26.06")
