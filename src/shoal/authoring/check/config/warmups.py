"""Rules of Triton's core, with its error messages, for warm-up requests. If one fails, the model does not load."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, enum_name, is_file
from shoal.kit.component.spec import DTYPES, STRING, TensorSpec
from shoal.system.files import read_bytes

DATA = Rule("warm-up-data", Severity.ERROR, is_core=True)
INPUT = Rule("warm-up-input", Severity.ERROR, is_core=True)
BATCH = Rule("warm-up-batch-size", Severity.ERROR)
MISMATCH = Rule("warm-up-mismatch", Severity.ERROR)
SKIPPED = Rule("warm-up-skipped", Severity.WARNING)

FOLDER = "warmup"  # subfolder of a model's folder that contains the input_data_file
MAX_BYTES = 64 * 2**20  # largest file of texts that is read, in bytes


def find(model: Model, _: Repository) -> Findings:
    """Find warm-up requests that do not fit their model."""
    if model.message is None or model.is_ensemble:
        return
    for index, sample in enumerate(model.message.model_warmup):
        if sample.batch_size:
            yield from _batch_size(model, index, sample)
            yield from _inputs(model, index, sample)
        else:
            yield SKIPPED.at(
                model.at("model_warmup", index),
                f"Triton skips the warm-up request '{sample.name}' of {model.name}: its batch_size is 0.",
                "Write batch_size: 1.",
            )


def _batch_size(model: Model, index: int, sample: Any) -> Findings:
    most = model.message.max_batch_size
    if sample.batch_size > max(1, most) and (most or not model.is_completed):
        yield BATCH.at(
            model.at("model_warmup", index, "batch_size"),
            f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for '{model.name}', max"
            f" allowed is {most}.",
            f"Write batch_size: {max(1, most)}, or raise max_batch_size.",
        )


def _inputs(model: Model, index: int, sample: Any) -> Findings:
    declared = {spec.name: spec for spec in model.inputs}
    sequences = model.message.sequence_batching
    ours = {entry.name for entry in sequences.control_input} | {state.input_name for state in sequences.state}
    ours |= {name for entry in model.message.batch_input for name in entry.target_name}
    for key, data in sorted(sample.inputs.items()):
        place = partial(_place, model, index, key)
        yield from _source(model, key, data, place)
        spec = declared.get(key)
        if spec is not None:
            yield from _fit(model, spec, data, place, sample.batch_size)
        elif key not in ours and not model.is_completed:
            what = f"The warm-up request '{sample.name}' has the input {key}, and {model.name} does not."
            yield MISMATCH.at(place(""), what, f"Its inputs are: {', '.join(sorted(declared)) or 'none'}.")
    missing = [name for name, spec in declared.items() if name not in sample.inputs and not spec.is_optional]
    if missing:
        yield INPUT.at(
            model.at("model_warmup", index),
            f"expected {len(declared)} inputs but got {len(declared.keys() & sample.inputs)} inputs for model"
            f" '{model.name}': the warm-up request '{sample.name}' lacks {', '.join(missing)}.",
            f'Add inputs {{ key: "{missing[0]}" value: {{ ... }} }}.',
        )


def _place(model: Model, index: int, key: str, field: str) -> Place:
    """Return the place of input ``key`` of a warm-up request, or of the input's ``field`` unless that is empty."""
    within = ("value", 0, field) if field else ()
    return model.at_entry("model_warmup", index, "inputs", key=key, within=within)


def _source(model: Model, key: str, data: Any, place: Callable[[str], Place]) -> Findings:
    kind = data.WhichOneof("input_data_type")
    if -1 in data.dims:
        what = f"warmup setting expects all variable-size dimensions are specified for input '{key}'; its dims are"
        yield DATA.at(place("dims"), f"{what} {list(data.dims)}.", "Write a size in place of each -1.")
    if kind is None:
        what = f"warmup setting expects input '{key}' to have input_data_type set."
        yield DATA.at(place(""), what, f"Add zero_data: true, or input_data_file with a file's name in {FOLDER}/.")
    elif kind == "input_data_file" and not is_file(model.folder / FOLDER / data.input_data_file):
        yield DATA.at(
            place("input_data_file"),
            f"failed to open text file for read: {model.name}/{FOLDER}/{data.input_data_file} does not exist.",
            "Put it there, or write zero_data: true in place of input_data_file.",
        )


def _fit(model: Model, spec: TensorSpec, data: Any, place: Callable[[str], Place], rows: int) -> Findings:
    from tritonclient.grpc import model_config_pb2

    dtype = enum_name(model_config_pb2.DataType, data.data_type)
    wanted, given = spec.dims, tuple(data.dims)
    if spec.dtype not in (dtype, "TYPE_INVALID"):
        yield INPUT.at(
            place("data_type"),
            f"inference input '{spec.name}' data-type is '{dtype}', but model '{model.name}' expects '{spec.dtype}'.",
            f"Write data_type: {spec.dtype}",
        )
    elif -1 in given:
        return
    elif wanted and (len(wanted) != len(given) or any(w not in (-1, g) for w, g in zip(wanted, given, strict=True))):
        batch = "; they do not contain the batch" if model.message.max_batch_size else ""
        yield INPUT.at(
            place("dims"),
            f"unexpected shape for input '{spec.name}' for model '{model.name}'. Expected {list(wanted)}, got"
            f" {list(given)}{batch}.",
            f"Write dims: {list(wanted)}{', with a size in place of -1' if -1 in wanted else ''}.",
        )
    elif data.input_data_file:
        yield from _file(model, spec, data, place, rows)


def _file(model: Model, spec: TensorSpec, data: Any, place: Callable[[str], Place], rows: int) -> Findings:
    """Compare a data file with one row's size: Triton sends ``rows`` requests of one row, all with the same data."""
    path, count, source = model.folder / FOLDER / data.input_data_file, math.prod(data.dims), place("input_data_file")
    try:
        size = path.stat().st_size
        content = read_bytes(path, MAX_BYTES) if spec.dtype == STRING and size <= MAX_BYTES else None
    except (OSError, ValueError):  # reported as missing
        return
    if content is not None:
        number = _count_strings(content)
        if number is None:
            what = f"incomplete string data for inference input '{spec.name}': {FOLDER}/{path.name} cannot be split"
            yield MISMATCH.at(
                source,
                f"{what} into texts.",
                "Write each text as its length, four bytes with the lowest first, and its bytes.",
            )
        elif number != count:
            what = f"expected {count} string elements for inference input '{spec.name}' for model '{model.name}', got"
            yield DATA.at(source, f"{what} {number} in {FOLDER}/{path.name}.", f"Write {count} into it.")
    elif spec.dtype in DTYPES and spec.dtype != STRING:
        expected = count * spec.numpy_dtype.itemsize
        about = f"{FOLDER}/{path.name} has {size:,} bytes, and {spec.dtype} {list(data.dims)} takes {expected:,}"
        if size < expected:
            what = f"warmup setting expects {expected} bytes, but the data provided from {path.name} only has {size}"
            yield DATA.at(source, f"{what} bytes: {about}.", "Write as many bytes, or correct data_type and dims.")
        elif size not in (expected, rows * expected):
            yield MISMATCH.at(source, f"{about}: Triton ignores the rest.", "Write as many, or correct dims.")


def _count_strings(content: bytes) -> int | None:
    """Count the texts in ``content``, each preceded by its length in four bytes; None if the last text is cut off."""
    position = number = 0
    while position < len(content):
        position += 4 + int.from_bytes(content[position : position + 4], "little")
        number += 1
    return number if position == len(content) else None
