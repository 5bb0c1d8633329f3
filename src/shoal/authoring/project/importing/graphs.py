"""Import of ONNX models. Names, dtypes and shapes come from the graph, which ONNX Runtime must be able to load."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.authoring.check.models import is_file
from shoal.authoring.check.onnx_io import TYPES, find_inputs, read_onnx
from shoal.authoring.project.importing.imported import MAX_BATCH_SIZE, Imported, make_config
from shoal.authoring.project.importing.probe_model import Arrays, Trial, TrialError, choose_mask, explain
from shoal.errors import ArtifactError, InputError, SetupError, needs
from shoal.kit.component.spec import DTYPES, STRING, ModelSpec, TensorSpec

FILE = "model.onnx"
_DYNAMIC = -1


@dataclass(frozen=True)
class _Value:
    """An input or output of the graph. Each size is a number, or the name of a symbol; the name may be empty."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def spec(self, *, is_batched: bool) -> TensorSpec:
        sizes = self.shape[1:] if is_batched else self.shape
        return TensorSpec(self.name, self.dtype, tuple(s if isinstance(s, int) else _DYNAMIC for s in sizes))

    def __str__(self) -> str:
        shown = ", ".join(str(size) if size != "" else "?" for size in self.shape)
        return f"{self.name} {self.dtype.removeprefix('TYPE_')} [{shown}]"


def draft_graph(
    source: Path | str, name: str, *, scratch: Path, mask: str | None = None, max_batch_size: int | None = None
) -> Imported:
    """Draft a model folder for Triton's ``onnxruntime`` backend from an ONNX file, or CatBoost's ``.cbm``.

    If the first dimension of every input and output is symbolic, with one symbol for all inputs, it is the batch
    dimension, and the default of ``max_batch_size`` is 512. Otherwise ``max_batch_size`` is 0, and ``config.pbtxt``
    declares whole shapes. ``mask`` names the attention mask, the input that gives the length of each row, so that rows
    of similar length run together. Its default is ``attention_mask`` if the inputs are exactly ``input_ids`` and
    ``attention_mask``. External weight files are copied too. A ZipMap at the end of a classifier is taken out: its
    scores are then a tensor, with a column per class.

    Raises:
        InputError: an option does not fit the graph.
        ArtifactError: the file is damaged, or a weight file is missing; ONNX Runtime refuses the model; a tensor has a
            dtype or a shape that Triton does not support; or the rows of a batch are not independent.
        SetupError: a library that reads the file is not installed.
    """
    path = Path(source)
    if path.suffix.lower() == ".cbm":
        path = _write_catboost(path, scratch)
    with needs("serve"):
        import onnx  # noqa: F401
    try:
        model = read_onnx(path)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArtifactError(f"{path} is not an ONNX model: {reason}.", "Export or copy it again.") from error
    weights = dict(_find_weights(model, path))
    zipped = [] if weights else _take_out_zipmaps(model)
    if zipped:
        path = scratch / f"tensors-{path.name}"
        path.write_bytes(model.SerializeToString())
    inputs, outputs = _read_values(model, path)
    session = _start(path)
    symbol, why = _find_rows(inputs, outputs)
    is_batched = symbol is not None if max_batch_size is None else max_batch_size > 0
    if is_batched and symbol is None:
        raise InputError(
            f"{path} takes no batches: {why}.", "Export it with a dynamic first dimension, or leave max_batch_size out."
        )
    size = (MAX_BATCH_SIZE if max_batch_size is None else max_batch_size) if is_batched else 0
    takes, gives = ([value.spec(is_batched=is_batched) for value in some] for some in (inputs, outputs))
    spec = ModelSpec(name, tuple(takes), tuple(gives), size)
    trial = Trial(path, takes, lambda arrays: _call(session, spec, arrays), is_batched=is_batched)
    reason = ""
    try:
        trial.observe()
    except TrialError as error:  # generated rows may be invalid for the model, so this proves nothing
        reason = str(error)
    parameters, more = choose_mask(spec, mask, None if reason else trial)
    message = make_config(name, "onnxruntime", takes, gives, artifact=FILE, max_batch_size=size, parameters=parameters)
    opsets = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import)
    batches = f"{symbol or 'the first dimension'} counts rows" if is_batched else f"no batches, max_batch_size 0: {why}"
    if not is_batched and symbol is not None:
        batches = "no batches, max_batch_size 0, as given"
    said = [f"ONNX, from {Path(source).name}: opsets {opsets}"]
    said += [f"{kind}: {', '.join(map(str, some))}" for kind, some in (("inputs", inputs), ("outputs", outputs))]
    said += [batches, *([f"it was not tried on generated rows: {reason}"] if reason else []), *more]
    said += [f"without the node ZipMap, so that they are tensors: {', '.join(zipped)}"] if zipped else []
    said += [f"weights beside it: {', '.join(weights)}"] if weights else []
    return Imported(message, {f"1/{FILE}": path, **{f"1/{at}": file for at, file in weights.items()}}, tuple(said))


def _start(path: Path) -> Any:
    with needs("serve"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # fatal ones alone: the errors are raised, too
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no other common class
        reason = explain(error).rpartition(" failed:")[2]  # the text before it repeats the path
        locale = re.search(r"construct locale with name:([\w.-]+)", reason)
        raise ArtifactError(
            f"ONNX Runtime {onnxruntime.__version__} refuses {path}: {reason}.",
            f"This machine lacks the locale {locale[1]}; the server may, too. Install it: locale-gen {locale[1]}"
            if locale
            else "Export it for operators and opsets that ONNX Runtime has.",
        ) from error


# --- weights in other files --------------------------------------------------------------------------------------


def _find_weights(model: Any, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield each external weight file of the model as its path relative to the model's folder, and its full path."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    external = filter(uses_external_data, _tensors(model.graph))
    try:
        locations = sorted({ExternalDataInfo(tensor).location for tensor in external})
    except ValueError as error:  # an offset or a length that is no number
        raise ArtifactError(f"{path} is damaged: {error}.", "Export or copy it again.") from error
    for location in locations:
        place = PurePosixPath(location)
        if place.is_absolute() or ".." in place.parts:
            raise ArtifactError(
                f"{path} takes weights from {location}, which is not beside it.", "Save both in one folder."
            )
        if not is_file(path.parent / place):
            raise ArtifactError(
                f"{path} takes weights from {location}, which is not there.", f"Copy it to {path.parent / place}."
            )
        yield str(place), path.parent / place


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield the constant tensors of a graph and its subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _write_catboost(path: Path, scratch: Path) -> Path:
    """Have CatBoost write its model as ONNX: Treelite, which makes forests for FIL, does not read its files."""
    made = scratch / f"{path.stem}.onnx"
    try:
        catboost: Any = importlib.import_module("catboost")  # not among shoal's own extras
    except ImportError as error:
        fix = 'Type: pip install catboost. Or save it as ONNX: model.save_model("model.onnx", format="onnx")'
        raise SetupError(f"CatBoost, which reads {path}, cannot be imported: {error}.", fix) from None
    try:
        catboost.CatBoost().load_model(str(path)).save_model(str(made), format="onnx")
    except catboost.CatBoostError as error:
        fix = "Train it without categories and texts, which CatBoost does not write as ONNX; or copy the file again."
        raise ArtifactError(f"CatBoost cannot write {path} as ONNX: {explain(error)}.", fix) from None
    return made


def _take_out_zipmaps(model: Any) -> list[str]:
    """Replace each ZipMap whose answer the model returns by what it reads; return the names of these outputs.

    CatBoost and skl2onnx end classifiers with this node: it makes a dictionary of each row of scores, and Triton has
    only tensors.
    """
    from onnx import TensorProto, helper

    zipped = []
    returned = {value.name: value for value in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "ZipMap" and node.output[0] in returned:
            classes = max(len(each.ints) or len(each.strings) for each in node.attribute)
            rows = next(iter(model.graph.input[0].type.tensor_type.shape.dim), None)
            first = rows.dim_param or rows.dim_value if rows is not None else ""
            name = node.output[0]
            returned[name].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, [first or None, classes]))
            node.CopyFrom(helper.make_node("Identity", node.input, node.output))
            zipped.append(name)
    if zipped and all(entry.domain for entry in model.opset_import):  # CatBoost's files have ai.onnx.ml alone
        model.opset_import.add(domain="", version=13)
    return zipped


# --- what it takes and gives -------------------------------------------------------------------------------------


def _read_values(model: Any, path: Path) -> tuple[list[_Value], list[_Value]]:
    inputs = [_describe(value, "Input", path) for value in find_inputs(model.graph)]
    if not inputs:
        raise ArtifactError(f"{path} is an ONNX model without inputs.", "Export it with its inputs.")
    return inputs, [_describe(value, "Output", path) for value in model.graph.output]


def _describe(value: Any, kind: str, path: Path) -> _Value:
    from onnx import TensorProto

    who = f"{kind} {value.name} of {path}"
    if not value.type.HasField("tensor_type"):
        raise ArtifactError(
            f"{who} is a {value.type.WhichOneof('value') or 'value of no type'}, not a tensor.",
            "Export it as a tensor: with skl2onnx, options={'zipmap': False}; with onnxmltools, zipmap=False; else take"
            " the node ZipMap out of the graph, and make its input the output.",
        )
    tensor = value.type.tensor_type
    dtype = TYPES.get(tensor.elem_type)
    if dtype not in DTYPES:
        named = TensorProto.DataType.Name(tensor.elem_type)
        raise ArtifactError(
            f"{who} is {named}, which clients cannot take.", "Cast it in the graph: to FLOAT, or INT64."
        )
    if not tensor.HasField("shape"):
        raise ArtifactError(
            f"{who} has no known number of dimensions.",
            "Export it with its shapes, or write them into it: onnx.shape_inference, onnx.tools.update_model_dims.",
        )
    if not tensor.shape.dim:
        raise ArtifactError(f"{who} is a scalar, and Triton's tensors have a dimension.", "Reshape it in the graph.")
    sizes = [dim.dim_value if dim.HasField("dim_value") else str(dim.dim_param) for dim in tensor.shape.dim]
    return _Value(value.name, dtype, tuple(sizes))


def _find_rows(inputs: Sequence[_Value], outputs: Sequence[_Value]) -> tuple[str | None, str]:
    """Return the name of the batch dimension's symbol, which may be empty; if there is no batch, None and the reason.

    Outputs may have another symbol, because exporters invent a name for each output's first dimension. Trial runs show
    whether the size of this dimension is the number of rows.
    """
    for value in (*inputs, *outputs):
        if isinstance(value.shape[0], int):
            return None, f"the first dimension of {value.name} is fixed at {value.shape[0]}"
    for value in inputs:
        if len(value.shape) == 1:
            return None, f"{value.name} has only one dimension"
    symbols = {str(value.shape[0]): value.name for value in inputs if value.shape[0] != ""}
    if len(symbols) > 1:
        (one, first), (other, second) = list(symbols.items())[:2]
        return None, f"the first dimension of {first} is {one}, and that of {second} is {other}"
    return next(iter(symbols), ""), ""


def _call(session: Any, spec: ModelSpec, arrays: Arrays) -> list[NDArray[Any]]:
    given = {
        tensor.name: np.full(array.shape, "a", np.object_) if tensor.dtype == STRING else array
        for tensor, array in zip(spec.inputs, arrays, strict=True)
    }
    return [np.asarray(out) for out in session.run([tensor.name for tensor in spec.outputs], given)]
