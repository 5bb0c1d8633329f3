"""Triton's generate extension: requests of flat lists over HTTP, answered by server-sent events.

It carries neither dtypes nor shapes: both come from the model's description.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.client.calls import Answer, Call, Description
from shoal.client.failures import CallError, Kind, stream_failure
from shoal.component.spec import TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError

ANY_BYTES = "surrogateescape"  # bytes that are not UTF-8 reach the other side unchanged
_USE_GRPC = "Use gRPC: protocol='grpc', on the command line --protocol grpc"


class Events:
    """Data of server-sent events, cut from a body as it comes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add bytes of the body; return the data of the events that they complete."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        return [event.removeprefix(b"data:").strip() for event in events]


def to_generate(call: Call) -> bytes:
    """Serialise the call of a stream as the JSON of ``generate_stream``.

    Raises:
        InputError: it has several rows, or an input whose shape Triton could not restore.
    """
    described = _described(call)
    document: dict[str, Any] = {"parameters": dict(call.parameters)}
    if call.request_id:
        document["id"] = call.request_id
    for spec in described.inputs:
        if spec.name in call.arrays:
            array = call.arrays[spec.name]
            if described.is_batched and len(array) != 1:
                raise InputError(f"The request has {len(array)} rows; a stream over HTTP takes one.", _USE_GRPC)
            if restore_shape(_declared(spec, described), array.size) != array.shape:
                raise InputError(
                    f"{spec.name} has shape {list(array.shape)}, and HTTP streams carry flat lists without shapes.",
                    _USE_GRPC,
                )
            document[spec.name] = [_as_json(value) for value in array.ravel().tolist()]
    return json.dumps(document, ensure_ascii=False).encode("utf-8", ANY_BYTES)


def restore_shape(declared: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the shape that Triton gives a flat list of ``size`` values for the ``declared`` dimensions.

    The last dimension of -1 takes all values that the fixed dimensions leave; the other dimensions of -1 are 1.
    """
    left = size // max(1, math.prod(dim for dim in declared if dim != -1))
    shape: list[int] = []
    for dim in reversed(declared):
        shape.insert(0, left if dim == -1 else dim)
        left = 1 if dim == -1 else left
    return tuple(shape)


def from_generate(call: Call, data: bytes) -> Answer:
    """Parse the data of one event.

    Raises:
        CallError: it is an error, or not an answer of Triton's.
        InputError: an output has a shape that a flat list does not tell.
    """
    described = _described(call)
    try:
        document = json.loads(data.decode("utf-8", ANY_BYTES))
        if "model_name" not in document:
            raise stream_failure(document["error"])
        wanted = [spec for spec in described.outputs if spec.name in (call.outputs or document)]
        arrays = {spec.name: _to_array(spec, described, document[spec.name]) for spec in wanted}
        return Answer(
            {name: arrays[name] for name in call.outputs or arrays},
            model=call.model,
            version=document.get("model_version", ""),
            request_id=call.request_id,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CallError(Kind.NOT_TRITON, f"unreadable answer: {error}") from None


def _to_array(spec: TensorSpec, described: Description, value: Any) -> Array:
    values = value if isinstance(value, list) else [value]
    if spec.dims.count(-1) > 1 and len(values) != 1:
        raise InputError(
            f"Output {spec.name} is {spec.kind}, and HTTP streams carry flat lists without shapes.",
            f"{_USE_GRPC}; or ask for others: outputs=[...]",
        )
    array = np.array([_from_json(each) for each in values], spec.numpy_dtype)
    return array.reshape(restore_shape(_declared(spec, described), len(values)))


def _declared(spec: TensorSpec, described: Description) -> Sequence[int]:
    return (-1, *spec.dims) if described.is_batched else spec.dims


def _described(call: Call) -> Description:
    assert call.described is not None
    return call.described


def _as_json(value: Any) -> Any:
    return value.decode("utf-8", ANY_BYTES) if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return value.encode("utf-8", ANY_BYTES) if isinstance(value, str) else value
