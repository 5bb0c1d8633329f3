"""Rules for ONNX models: names, dtypes and shapes in the configuration must fit the graph.

The rules are checked only if the package ``onnx`` is installed. ``shoal add-model`` also uses this module's reader.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.authoring.check.config.folders import FILE as MODEL_FILE
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, is_file
from shoal.authoring.environment.targets import NEWEST, Target
from shoal.kit.component.files import describe_bytes
from shoal.system.files import MAX_BINARY, read_bytes

BACKEND = "onnxruntime"
FILE = "model.onnx"
_MAX_BYTES = 256 * 2**20  # of the graph; weights may be in separate files, which are not read

TENSORS = Rule("onnx-tensors", Severity.ERROR)
UNREADABLE = Rule("onnx-unreadable", Severity.ERROR)
VERSION = Rule("onnx-version", Severity.ERROR)

# onnx.TensorProto.DataType by its numbers, as onnxruntime_utils.cc turns them into Triton's.
_FROM_1 = "FP32 UINT8 INT8 UINT16 INT16 INT32 INT64 STRING BOOL FP16 FP64 UINT32 UINT64"
_DOMAINS = ("ai.onnx", "com.microsoft", "com.ms.", "org.pytorch.aten")  # of ONNX Runtime, or the beginning of one
_NO_TENSOR = "no tensor"
TYPES = {number: f"TYPE_{kind}" for number, kind in enumerate(_FROM_1.split(), 1)} | {16: "TYPE_BF16"}


@dataclass(frozen=True)
class _Tensor:
    dtype: str  # empty if Triton has no such data type
    shape: tuple[int, ...] | None  # -1 for a dynamic dimension; None if the graph does not give a shape


def find(model: Model, repository: Repository) -> Findings:
    """Find differences between an ONNX graph and the model's configuration."""
    if model.message is None or model.backend != BACKEND or model.is_model_folder:
        return
    if importlib.util.find_spec("onnx") is None:
        return
    for version in model.served_versions:
        path = model.folder / str(version) / (model.message.default_model_filename or FILE)
        path = path / FILE if path.is_dir() else path
        try:
            if not path.is_file() or path.stat().st_size > _MAX_BYTES:
                continue
            read = read_onnx(path)
        except OSError as error:
            yield UNREADABLE.at(Place(path), f"It cannot be read: {error.strerror}.", "Let the server's user read it.")
        except ValueError as error:
            yield UNREADABLE.at(Place(path), f"It is not an ONNX model: {error}.", "Export or copy it again.")
        else:
            yield from _compare(model, read.graph)
            yield from _find_version(path, read, repository.target)
            if not model.message.model_operations.op_library_filename:
                yield from _find_custom(path, read)
            yield from _find_weights(path, read.graph)


def _find_version(path: Path, model: Any, target: Target | None) -> Findings:
    if target is None:
        return
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    most, where = (target.row.opset, target.row.ir), f"ONNX Runtime in the image of Triton {target.version} has"
    if target.is_embedded:  # with the ONNX Runtime that is installed here, whose versions `onnx` does not tell
        onnx: Any = importlib.import_module("onnx")
        most, where = (onnx.defs.onnx_opset_version(), onnx.IR_VERSION), f"onnx {onnx.__version__} defines"
    for name, version, limit in zip(("opset", "IR version"), (opset, model.ir_version), most, strict=True):
        if version > limit and target.release <= NEWEST:
            what = f"Its {name} is {version}; {where} {limit}."
            yield VERSION.at(Place(path), what, f"Export it with at most {name} {limit}, or use a newer release.")


def _find_custom(path: Path, model: Any) -> Findings:
    """Find operators of a domain that ONNX Runtime does not have, and that are no functions of the file itself."""
    own = {function.domain for function in model.functions}
    domains = {node.domain for node in model.graph.node} - own
    for domain in sorted(each for each in domains if not each.startswith(_DOMAINS) and each):
        what = f"It has operators of {domain}, which ONNX Runtime does not have."
        fix = 'Name the file that has them: model_operations { op_library_filename: "PATH" }'
        yield VERSION.at(Place(path), what, fix)


def _find_weights(path: Path, graph: Any) -> Findings:
    external = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
    for name in sorted({entry.get("location", "") for entry in external} - {""}):
        if not is_file(path.parent / name):
            what = f"{path.parent.name}/ does not contain {name}, in which {path.name} has its weights."
            yield MODEL_FILE.at(Place(path), what, "Put it there, under this name.")


def read_onnx(path: Path) -> Any:
    """Read an ONNX model, without weights that are in other files.

    Raises:
        ValueError: the file is not an ONNX model; the message says what it is instead.
        OSError: the file cannot be read.
    """
    from google.protobuf.message import DecodeError

    onnx: Any = importlib.import_module("onnx")  # not among shoal's own extras
    content = read_bytes(path, MAX_BINARY)
    try:
        message = onnx.load_model_from_string(content)
    except (DecodeError, ValueError, RecursionError):
        message = None
    if message is not None and message.graph.output:
        return message
    raise ValueError(
        describe_bytes(content[:32]) or ("it is cut off, or another kind of file" if content else "it is empty")
    )


def find_inputs(graph: Any) -> list[Any]:
    """Find the graph's inputs that are not weights: a request must contain them."""
    weights = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [tensor for tensor in graph.input if tensor.name not in weights]


def _compare(model: Model, graph: Any) -> Findings:
    inputs = {tensor.name: _describe(tensor) for tensor in graph.input}
    needed = [tensor.name for tensor in find_inputs(graph)]
    outputs = {tensor.name: _describe(tensor) for tensor in graph.output}
    if model.inputs and not model.num_server_inputs:
        declared = {tensor.name for tensor in model.inputs}
        missing = [name for name in needed if name not in declared]
        if missing:
            what = f"It does not declare {', '.join(missing)}, which the graph requires."
            yield TENSORS.at(model.at("input"), what, f"Declare all of {', '.join(needed)}.")
    yield from _compare_all(model, "input", inputs, needed)
    yield from _compare_all(model, "output", outputs, list(outputs))


def _compare_all(model: Model, kind: str, tensors: dict[str, _Tensor], names: Sequence[str]) -> Findings:
    for index, entry in enumerate(model.inputs if kind == "input" else model.outputs):
        tensor = tensors.get(entry.name)
        if tensor is None:
            what = f"The graph has no {kind} {entry.name}."
            yield TENSORS.at(model.at(kind, index, "name"), what, f"Its {kind}s: {', '.join(names)}.")
            continue
        if tensor.dtype == _NO_TENSOR:
            what = f"{entry.name} is no tensor in the graph, but a sequence or a map."
            yield TENSORS.at(model.at(kind, index, "name"), what, "Export a classifier with options={'zipmap': False}.")
            continue
        if tensor.dtype and entry.dtype != tensor.dtype:
            what = f"{entry.name} is declared {entry.dtype}; the graph's is {tensor.dtype}."
            yield TENSORS.at(model.at(kind, index, "data_type"), what, f"Declare it {tensor.dtype}.")
        message = getattr(model.message, kind)[index]
        dims = tuple(message.reshape.shape) if message.HasField("reshape") else entry.dims
        why = _misfit(tensor.shape, dims, is_batched=model.message.max_batch_size > 0, is_ragged=entry.is_ragged)
        if why:
            yield TENSORS.at(model.at(kind, index, "dims"), f"{entry.name}: {why[0]}.", why[1])


def _misfit(
    shape: tuple[int, ...] | None, dims: tuple[int, ...], *, is_batched: bool, is_ragged: bool
) -> tuple[str, str] | None:
    """Return why ONNX Runtime's backend refuses ``dims`` for a graph tensor of ``shape``, and what to do; else None."""
    if not shape or is_ragged:  # a scalar, or of no known shape
        return None
    shown = list(shape)
    if is_batched and shape[0] != -1:
        what = f"the graph's shape {shown} has no dynamic first dimension, and max_batch_size is above 0"
        return what, "Export it with a dynamic batch, or set max_batch_size: 0 and declare the whole shape."
    full = (-1, *dims) if is_batched else dims
    if len(shape) == len(full) and all(there in (-1, said) for there, said in zip(shape, full, strict=True)):
        return None
    behind = ", after the batch dimension of max_batch_size," if is_batched else ""
    return (
        f"dims {list(dims)}{behind} do not fit the graph's {shown}",
        f"Write dims: {shown[1:] if is_batched else shown}.",
    )


def _describe(value: Any) -> _Tensor:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return _Tensor(_NO_TENSOR if value.type.WhichOneof("value") in ("sequence_type", "map_type") else "", None)
    if not kind.HasField("shape"):
        return _Tensor(TYPES.get(kind.elem_type, ""), None)
    shape = tuple(int(dim.dim_value) if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    return _Tensor(TYPES.get(kind.elem_type, ""), shape)
