"""Rules of Triton's core, with its error messages, for the tensors that a model declares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository, enum_name
from shoal.kit.component.spec import TensorSpec

NAME = Rule("tensor-name", Severity.ERROR, is_core=True)
DTYPE = Rule("tensor-dtype", Severity.ERROR, is_core=True)
DIMS = Rule("tensor-dims", Severity.ERROR, is_core=True)
RESHAPE = Rule("reshape-size", Severity.ERROR, is_core=True)
FORMAT = Rule("image-format", Severity.ERROR, is_core=True)
TENSORRT_ONLY = Rule("tensorrt-only", Severity.ERROR, is_core=True)
TWICE = Rule("tensor-twice", Severity.WARNING)
INPUT_TWICE = Rule("input-twice", Severity.ERROR)
BATCH_TENSOR = Rule("batch-tensor", Severity.ERROR, is_core=True)


def find(model: Model, _: Repository) -> Findings:
    """Find tensor declarations that Triton's core refuses."""
    if model.message is None:
        return
    for kind in ("input", "output"):
        seen: dict[str, int] = {}
        for index, tensor in enumerate(getattr(model.message, kind)):
            yield from _one(model, kind, index, tensor, (model.inputs if kind == "input" else model.outputs)[index])
            if tensor.name and tensor.name in seen:
                first = model.at(kind, seen[tensor.name]).line
                what = f"{model.name} declares the {kind} {tensor.name} twice: here and in line {first}"
                # A request must have as many inputs as are required, and cannot have one of them twice.
                is_refused = kind == "input" and not (tensor.optional or model.inputs[seen[tensor.name]].is_optional)
                rule, what = (INPUT_TWICE, f"{what}. Triton refuses every request") if is_refused else (TWICE, what)
                yield rule.at(model.at(kind, index, "name"), f"{what}.", "Remove one, or rename it.")
            seen.setdefault(tensor.name, index)
    yield from _batch_tensors(model)
    sequences = model.message.sequence_batching
    for name in {t.name for t in sequences.control_input} | {s.input_name for s in sequences.state}:
        if any(name == tensor.name for tensor in model.inputs):
            what = f"{name} of {model.name} is an input, and a control or a state of its sequences, which replaces it."
            yield INPUT_TWICE.at(model.at("sequence_batching"), what, "Rename one of the two.")


def _one(model: Model, kind: str, index: int, tensor: Any, spec: TensorSpec) -> Findings:
    place = model.at(kind, index)
    who = f"model {kind} '{tensor.name}'"
    if not tensor.name:
        yield NAME.at(place, f"model {kind} must specify 'name' for {model.name}.", 'Add name: "...".')
    if str(spec.dtype).lstrip("-").isdecimal():
        what = f"{who} has data type {tensor.data_type} for {model.name}, which does not exist."
        yield DTYPE.at(model.at(kind, index, "data_type"), what, "Write TYPE_FP32, or another by its name.")
    if not tensor.data_type and not _is_read_from_file(model):
        yield DTYPE.at(place, f"{who} must specify 'data_type' for {model.name}.", "Add data_type: TYPE_...")
    if not tensor.dims and not _is_read_from_file(model):
        one = "[ 1 ] for one value per row" if model.message.max_batch_size else "[ 1 ] for one value"
        yield DIMS.at(place, f"{who} must specify 'dims' for {model.name}.", f"Add dims: {one}.")
    for position, size in enumerate(tensor.dims):
        if size < 1 and size != -1:
            yield DIMS.at(
                model.at(kind, index, "dims", position),
                f"{who} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for"
                f" {model.name}; it is {size}.",
                "Write -1 for any size.",
            )
            break
    if tensor.HasField("reshape") and (tensor.dims or not _is_read_from_file(model)):
        yield from _reshape(model, kind, index, tensor)
    yield from _special(model, kind, index, tensor)


def _is_read_from_file(model: Model) -> bool:
    """Whether the backend reads a missing ``data_type`` or ``dims`` from the model's file."""
    return not model.is_ensemble and model.is_completed


def _reshape(model: Model, kind: str, index: int, tensor: Any) -> Findings:
    shape = list(tensor.reshape.shape)
    place, who = model.at(kind, index, "reshape"), f"model {kind} '{tensor.name}'"
    if not shape and model.message.max_batch_size == 0:
        yield RESHAPE.at(
            place,
            f"{who} cannot have empty reshape for non-batching model as scalar tensors are not supported for"
            f" {model.name}.",
            "Write shape: [ 1 ].",
        )
    elif any(size < 1 and size != -1 for size in shape):
        yield RESHAPE.at(
            place,
            f"{who} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for"
            f" {model.name}; they are {shape}.",
            "Write -1 for any size.",
        )
    elif _chunks(tensor.dims) != _chunks(shape) and not (not shape and _chunks(tensor.dims) == [1]):
        differs = "has different size"
        if -1 in tensor.dims and -1 in shape and list(tensor.dims).count(-1) != shape.count(-1):
            differs = "has different number of variable-size dimensions"
        yield RESHAPE.at(
            place,
            f"{who} {differs} for dims and reshape for {model.name}: {list(tensor.dims)} and {shape}.",
            "Give both the same number of elements between variable-size dimensions.",
        )


def _chunks(dims: Sequence[int]) -> list[int]:
    """Return the number of elements before, between and after the dimensions of -1: 8 and 6 for [2, 4, -1, 6]."""
    counts = [1]
    for size in dims:
        if size == -1:
            counts.append(1)
        else:
            counts[-1] *= size
    return counts


def _special(model: Model, kind: str, index: int, tensor: Any) -> Findings:
    image = kind == "input" and tensor.format != tensor.FORMAT_NONE
    if image and len(tensor.dims) != 3:
        yield FORMAT.at(
            model.at(kind, index, "format"),
            f"model input NHWC/NCHW require 3 dims for {model.name}; {tensor.name} has {len(tensor.dims)}.",
            "Declare three dims, or remove the format.",
        )
    if model.message.platform == "tensorrt_plan" or model.backend == "tensorrt":
        return
    for field, what in (
        ("is_shape_tensor", "shape tensors are only supported for TensorRT platform"),
        ("is_non_linear_format_io", "Non-linear IO format is only supported for the TensorRT platform"),
    ):
        if getattr(tensor, field, False):
            place = model.at(kind, index, field)
            yield TENSORRT_ONLY.at(place, f"{what} for {model.name}.", f"Remove {field}.")


def _batch_tensors(model: Model) -> Findings:
    inputs = {tensor.name for tensor in model.message.input}
    outputs = {tensor.name for tensor in model.message.output}
    entries = chain(
        (("batch_input", i, entry) for i, entry in enumerate(model.message.batch_input)),
        (("batch_output", i, entry) for i, entry in enumerate(model.message.batch_output)),
    )
    for field, index, entry in entries:
        place, kind = model.at(field, index), f"{field.replace('_', ' ')} kind '{enum_name(entry.Kind, entry.kind)}'"
        if len(entry.source_input) != 1:
            yield BATCH_TENSOR.at(
                place,
                f"{kind} expects 1 source input, got {len(entry.source_input)} for {model.name}.",
                "Name one input of the model as source_input.",
            )
        for name in entry.source_input:
            if name not in inputs:
                what = f"unknown source input name '{name}' for {model.name}."
                yield BATCH_TENSOR.at(place, what, f"Its inputs are: {', '.join(sorted(inputs))}.")
        if field == "batch_input" and entry.data_type not in (8, 11):  # TYPE_INT32, TYPE_FP32
            what = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {model.name}."
            yield BATCH_TENSOR.at(place, what, "Write one of the two.")
        targets = list(entry.target_name) if field == "batch_output" else []
        for name in sorted({name for name in targets if targets.count(name) > 1}):
            what = f"target output name '{name}' can only be specified once for {model.name}."
            yield BATCH_TENSOR.at(place, what, "Name it once.")
        for name in targets:
            if name not in outputs:
                what = f"unknown target output name '{name}' for {model.name}."
                yield BATCH_TENSOR.at(place, what, f"Its outputs are: {', '.join(sorted(outputs))}.")
