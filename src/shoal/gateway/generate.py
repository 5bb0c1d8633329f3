"""Triton's generate extension, answered over gRPC: its JSON as a request, and answers as JSON.

Triton 24.10 loses answers over HTTP: each of its HTTP threads queues them in a pipe that holds 278, and ignores when
that is full. With 64 fast streams every fiftieth lost an answer, its beginning or its end. So the service asks over
gRPC, and does the extension's conversion itself: a value or a flat list per input, other members as parameters, and
each answer's outputs as a value or a flat list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from shoal.client.http_transport import restore_shape
from shoal.component.spec import STRING, ModelSpec, TensorSpec
from shoal.gateway.grpc_messages import END
from shoal.gateway.refusals import RefusedError, Why

_RAW = "utf-8", "surrogateescape"  # strings of bytes that are not UTF-8 go through unchanged
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
_KINDS = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}  # by NumPy's kind of dtype
_WANTED = {"b": "true or false", "i": "whole numbers", "u": "whole numbers from 0", "f": "numbers", "O": "strings"}


def to_message(body: bytes, spec: ModelSpec, version: str) -> tuple[Any, str]:
    """Convert a request's JSON to a ``ModelInferRequest``; return it and the client's id.

    Each input gets the shape that Triton would give it: the last dimension of -1 takes all values that the fixed
    dimensions leave, and the other dimensions of -1, as well as the number of rows, are 1. If the model declares no
    dimension of -1 for an input, each value, or each group of values that fills the fixed dimensions, is a row.

    Raises:
        RefusedError: a value does not fit its input.
    """
    document = json.loads(body.decode(*_RAW))
    given_id = document.pop("id", "")
    nested = document.pop("parameters", {})
    if not isinstance(given_id, str) or not isinstance(nested, dict):
        raise RefusedError(Why.WRONG, "The request's id must be a string, and its parameters an object.")
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    message = service_pb2.ModelInferRequest(model_name=spec.name, model_version=version)
    for name, value in _members(document, nested):
        if name in inputs:
            _add_input(message, inputs[name], value, is_batched=spec.is_batched)
        else:
            _add_parameter(message, name, value)
    return message, given_id


def _members(document: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the request's members, and those of ``parameters``, which may be inputs too."""
    if twice := sorted(document.keys() & nested.keys()):
        raise RefusedError(Why.WRONG, f"{twice[0]!r} is given twice, by itself and among the parameters. Give it once.")
    yield from document.items()
    yield from nested.items()


def _add_input(message: Any, tensor: TensorSpec, value: Any, *, is_batched: bool) -> None:
    values = value if isinstance(value, list) else [value]
    if tensor.dtype in ("TYPE_FP16", "TYPE_BF16"):
        raise RefusedError(
            Why.WRONG, f"Input {tensor.name!r} is {tensor.dtype[5:]}, which JSON cannot carry. Use infer."
        )
    dtype = tensor.numpy_dtype
    if wrong := [each for each in values if type(each) not in _KINDS[dtype.kind]]:
        raise RefusedError(
            Why.WRONG,
            f"Input {tensor.name!r} ({tensor.kind}) takes {_WANTED[dtype.kind]}, as one value or a flat list;"
            f" not {json.dumps(wrong[0])[:60]}.",
        )
    shape = _shape(tensor, len(values), is_batched=is_batched)
    try:
        if tensor.dtype == STRING:
            texts = np.array([each.encode(*_RAW) for each in values], np.object_)
            raw = serialize_byte_tensor(texts).item() if values else b""
        else:
            if dtype.kind in "iu" and not all(np.iinfo(dtype).min <= each <= np.iinfo(dtype).max for each in values):
                raise OverflowError
            raw = np.array(values, dtype).tobytes()
    except (OverflowError, UnicodeEncodeError):
        raise RefusedError(Why.WRONG, f"Input {tensor.name!r} has a value that {tensor.kind} cannot hold.") from None
    kind = "BYTES" if tensor.dtype == STRING else tensor.dtype.removeprefix("TYPE_")
    message.inputs.add(name=tensor.name, datatype=kind, shape=shape)
    message.raw_input_contents.append(raw)


def _shape(tensor: TensorSpec, count: int, *, is_batched: bool) -> tuple[int, ...]:
    """Return the shape of an input with ``count`` values."""
    shape = restore_shape((-1, *tensor.dims) if is_batched else tensor.dims, count)
    if math.prod(shape) != count:
        raise RefusedError(
            Why.WRONG, f"Input {tensor.name!r} has {count} values, which do not fit its shape {list(tensor.dims)}."
        )
    return shape


def _add_parameter(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message.parameters[name], _PARAMETERS[type(value)], value)
    except (KeyError, ValueError, TypeError):
        inputs = "It is not an input of the model; a parameter"
        raise RefusedError(
            Why.WRONG, f"{name!r} is {json.dumps(value)[:60]}. {inputs} is a string, a number, true or false."
        ) from None


def to_json(answer: Any, given_id: str) -> bytes:
    """Convert a ``ModelInferResponse`` to the extension's JSON; members in alphabetical order, as Triton sends them."""
    document: dict[str, Any] = {"model_name": answer.model_name, "model_version": answer.model_version}
    if given_id:
        document["id"] = given_id
    for name, parameter in answer.parameters.items():
        if name != END and (choice := parameter.WhichOneof("parameter_choice")):
            document[name] = getattr(parameter, choice)
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        values = _read(output.datatype, raw)
        document[output.name] = values[0] if len(values) == 1 else values
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode(*_RAW)


def _read(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return [text.decode(*_RAW) for text in deserialize_bytes_tensor(raw)] if raw else []
    if datatype == "BF16":  # the upper half of FP32
        return list((np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).tolist())
    return list(np.frombuffer(raw, triton_to_np_dtype(datatype)).tolist())
