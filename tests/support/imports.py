"""Helpers for tests of imported models: a project, its models in this process, and a repository for a server."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Tuple  # noqa: UP035  # torch.jit.script reads it

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from shoal.authoring.check.families import check
from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.repository.config import read_config, write_config
from shoal.authoring.repository.placement import place
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import load

NUM_ROWS = 1000
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def add(project: Path, source: Any, name: str, **options: Any) -> tuple[Any, list[str]]:
    """The configuration that was written, after `shoal check` found nothing in it, and what was said."""
    said: list[str] = []
    paths = add_model(source, name, project=project, tell=said.append, **options)
    assert all(path.is_file() for path in paths)
    leaf = project / "models" / name
    assert set(paths) >= {leaf / "config.pbtxt"}
    text = (leaf / "config.pbtxt").read_text(encoding="utf-8")
    assert [line.removeprefix("# ") for line in text.splitlines()[: len(said)]] == said
    assert check(leaf) == []
    return read_config(leaf), said


def declared(config: Any) -> list[str]:
    spec = config.spec
    return [
        f"{tensor.name} {tensor.dtype.removeprefix('TYPE_')} {list(tensor.dims)}{' column' * (tensor.inner == ())}"
        for tensor in (*spec.inputs, *spec.outputs)
    ]


def here(project: Path, name: str, **inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return a model's answers in this process, with max_batch_size rows per call."""
    loaded = load(project / "models" / name)
    most = read_config(project / "models" / name).spec.max_batch_size or NUM_ROWS
    starts = range(0, len(next(iter(inputs.values()))), most)
    try:
        parts = [loaded(**{key: array[start : start + most] for key, array in inputs.items()}) for start in starts]
    finally:
        loaded.close()
    return {key: np.concatenate([np.asarray(part[key]) for part in parts]) for key in parts[0]}


def make_repository(project: Path, names: Iterable[str], repository: Path) -> Path:
    """The leaves of a project as `compose` places them, side by side."""
    for name in names:
        shutil.copytree(project / "models" / name, repository / name)
        config = read_config(repository / name)
        write_config(place(config, Plan(dtype="fp32")), repository / name / "config.pbtxt", comment="")
    assert check(repository, target="embedded") == []
    return repository


def script(module: torch.nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        saved: Any = torch.jit.script(module.eval())
        torch.jit.save(saved, str(path))
    return path


def load_script(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(path))


# --- ONNX graphs -------------------------------------------------------------------------------------------------


def save_graph(
    path: Path,
    nodes: list[Any],
    inputs: dict[str, tuple[int, Any]],
    outputs: dict[str, tuple[int, Any]],
    weights: dict[str, NDArray[Any]] | None = None,
    *,
    opset: int = 17,
    **options: Any,
) -> Path:
    """A graph whose tensors are ``name: (dtype, shape)``."""
    takes, gives = (
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in some.items()]
        for some in (inputs, outputs)
    )
    constants = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", takes, gives, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, str(path), **options)
    return path


def save_net(path: Path, rows: str | int = "rows", num_features: int = 5, num_outputs: int = 3, **options: Any) -> Path:
    """A layer of 16 units and a linear one: x -> y."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((num_features, 16)).astype(np.float32),
        "w2": rng.standard_normal((16, num_outputs)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "w2"], ["y"]),
    ]
    return save_graph(
        path, nodes, {"x": (FLOAT, [rows, num_features])}, {"y": (FLOAT, [rows, num_outputs])}, weights, **options
    )


def save_tokens(
    path: Path, *, names: tuple[str, str] = ("input_ids", "attention_mask"), is_masked: bool = True
) -> Path:
    """Return the sum of the ids without padding, or of all of them."""
    ids, mask = names
    nodes = [
        helper.make_node("Mul", [ids, mask if is_masked else ids], ["kept"]),
        helper.make_node("Add", ["kept", mask], ["both"]),
        helper.make_node("ReduceSum", ["both" if is_masked else "kept", "axis"], ["sum"], keepdims=1),
        helper.make_node("Cast", ["sum"], ["score"], to=FLOAT),
    ]
    shape = ["rows", "width"]
    return save_graph(
        path, nodes, {ids: (INT64, shape), mask: (INT64, shape)}, {"score": (FLOAT, ["rows", 1])},
        {"axis": np.array([1])},
    )  # fmt: skip


def save_texts(path: Path) -> Path:
    """Texts that are the same in both, and the text that was given."""
    nodes = [helper.make_node("Equal", ["a", "b"], ["same"]), helper.make_node("Identity", ["a"], ["back"])]
    shape = ["rows", 1]
    return save_graph(
        path, nodes, {"a": (TensorProto.STRING, shape), "b": (TensorProto.STRING, shape)},
        {"same": (TensorProto.BOOL, shape), "back": (TensorProto.STRING, shape)}, opset=19,
    )  # fmt: skip


def save_column(path: Path) -> Path:
    nodes = [helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=0)]
    return save_graph(path, nodes, {"x": (FLOAT, ["n", 5])}, {"y": (FLOAT, ["n"])}, {"axis": np.array([1])})


# --- modules -----------------------------------------------------------------------------------------------------


def save_classifier(path: Path) -> Path:
    """A linear classifier of two columns and three classes, with a dictionary of scores per row, as CatBoost writes."""
    names = ["billing", "other", "technical"]
    tensors = [helper.make_tensor_value_info("x", FLOAT, ["N", 2])]
    given: dict[str, Any] = {"classlabels_strings": names, "post_transform": "SOFTMAX", "domain": "ai.onnx.ml"}
    weights: dict[str, Any] = {"coefficients": [1.0, 0.0, -1.0, 2.0, 0.5, 0.5], "intercepts": [0.0, 0.1, 0.2]}
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["label", "tensor"], **given, **weights),
        helper.make_node("ZipMap", ["tensor"], ["scores"], classlabels_strings=names, domain="ai.onnx.ml"),
    ]
    row = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(FLOAT, []))
    scores = helper.make_value_info("scores", helper.make_sequence_type_proto(row))
    outputs = [helper.make_tensor_value_info("label", TensorProto.STRING, ["N"]), scores]
    graph = helper.make_graph(nodes, "topics", tensors, outputs)
    opset = [helper.make_opsetid("ai.onnx.ml", 2)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))
    return path


class Tagger(nn.Module):
    """Embeddings pooled by a mask, and a score for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        hidden = self.table(ids) * mask.unsqueeze(-1).to(torch.float32)
        return self.out(hidden.sum(1) / mask.sum(1, keepdim=True)).softmax(-1), hidden.sum(-1)


class Pooled(Tagger):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.table(ids) * mask.unsqueeze(-1).to(torch.float32)
        score: Tensor = self.out(hidden.sum(1))
        return score


class Column(nn.Module):
    """One number a row, without a dimension of its own; and which column is the greatest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        y = self.layer(x)
        return y.sum(-1), y.argmax(-1, keepdim=True)
