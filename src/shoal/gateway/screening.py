"""Screening of requests: requests that would crash Triton are refused.

Triton 24.10 multiplies a request's dimensions without an overflow check. A shape such as [1, 2**61] then fits into an
empty body and kills the model's process. In addition, Triton's JSON parser recurses for each bracket until the stack
overflows. Triton must read exactly what was screened. Of two equal keys, Triton takes the first one and most parsers
the last one, so a JSON request is parsed and encoded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from shoal.component.spec import ModelSpec
from shoal.gateway.models import find_below
from shoal.gateway.refusals import RefusedError, Why
from shoal.gateway.wire import Budget, count_values, read_fields, split
from shoal.repository.config import ModelConfig

MOST_NESTED = 64  # brackets of JSON within each other
MOST_BYTES = 2**31  # of one tensor, as Triton computes them
MOST_ID_BYTES = 2**10  # of a request's id, which is in each of its answers
_ITEM_BYTES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
_LENGTH_BYTES = 4  # before each element of a BYTES tensor
_OPENING, _NO_BRACKETS = b"[{", bytes(set(range(256)) - set(b"[]{}"))
LARGE = 2**20  # bytes; larger requests are screened outside the event loop
WITH_END = "triton_enable_empty_final_response"  # parameter of a request: mark its last answer
_SMALL_MESSAGE = 2**14  # bytes; larger messages are screened outside the event loop, and not parsed as a whole
_ID, _INPUTS, _RAW = 3, 5, 7  # numbers of fields of a ModelInferRequest
_ONCE = {1: "model_name", 2: "model_version", _ID: "id"}
_CONTENTS = 5  # and of an InferInputTensor
_ONCE_BY_INPUT = {1: "name", 2: "datatype", _CONTENTS: "contents"}
_SLOW_BYTES = 2**20  # of JSON with NaN, which only the slow parser reads


class Rules(NamedTuple):
    """Facts about a model that decide what a request to it may ask for.

    ``has_sequences`` says whether the model, or a model that it calls, has sequence batching; ``num_priorities`` is the
    greatest number of priority levels among these models.
    """

    spec: ModelSpec
    has_sequences: bool = False
    num_priorities: int = 0


def read_rules(configs: Mapping[str, ModelConfig]) -> dict[str, Rules]:
    """Return the rules for requests to each model of a repository."""
    below, rules = find_below(configs), dict[str, Rules]()
    for name, config in configs.items():
        messages = [configs[each].message for each in (name, *below[name]) if each in configs]
        rules[name] = Rules(
            config.spec,
            any(message.HasField("sequence_batching") for message in messages),
            max(message.dynamic_batching.priority_levels for message in messages),
        )
    return rules


class _Input(msgspec.Struct, omit_defaults=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Request(msgspec.Struct, omit_defaults=True):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[dict[str, Any]] = []


_DECODER = msgspec.json.Decoder(_Request)


def screen_json(head: bytes, num_binary: int) -> tuple[bytes, str]:
    """Check the JSON of an inference request; return the JSON for Triton, encoded again, and the request's id.

    ``num_binary`` is the number of bytes of binary tensors that follow the JSON.

    Raises:
        RefusedError: the JSON is not an inference request, or would crash Triton.
    """
    screen_nesting(head)
    request = _decode(head)
    num_claimed = 0
    for tensor in request.inputs:
        claimed = tensor.parameters.get("binary_data_size")
        if claimed is None:
            # a value takes at least a character and a comma
            _screen(tensor.name, tensor.shape, tensor.datatype, len(bytes(tensor.data)) // 2 + 1)
            continue
        if not isinstance(claimed, int) or claimed < 0:
            raise RefusedError(
                Why.WRONG, f"Input {tensor.name!r} has binary_data_size {claimed!r}. Give the number of its bytes."
            )
        _screen(tensor.name, tensor.shape, tensor.datatype, claimed, is_binary=True)
        num_claimed += claimed
    if num_claimed != num_binary:
        raise RefusedError(Why.WRONG, f"{num_binary} bytes follow the JSON; its inputs declare {num_claimed}.")
    return msgspec.json.encode(request), request.id


class Screened(NamedTuple):
    """Facts about a gRPC inference request that was screened.

    ``is_end_wanted`` says whether the request asks Triton to mark its last answer.
    """

    model: str
    request_id: str
    is_end_wanted: bool


async def screen_grpc(request: bytes, rules: Mapping[str, Rules]) -> Screened:
    """Check a serialised ``ModelInferRequest``.

    Raises:
        RefusedError: ``request`` is not a ``ModelInferRequest``, or would crash Triton; with the request's id.
    """
    try:
        if len(request) > _SMALL_MESSAGE:
            return await asyncio.to_thread(_screen_grpc, request, rules)
        return _screen_grpc(request, rules)
    except RefusedError as refused:
        refused.request_id = _find_id(request)
        raise


def _screen_grpc(request: bytes, rules: Mapping[str, Rules]) -> Screened:
    message, sizes = parse("ModelInferRequest", request) if len(request) <= _SMALL_MESSAGE else None, None
    if message is None or message.SerializeToString() != request:  # it is large, or may have a field twice
        message, sizes = _reduce(request)
    screen_message(message, rules, sizes)
    return Screened(message.model_name, message.id, bool(message.parameters[WITH_END].bool_param))


def _reduce(request: bytes) -> tuple[Any, list[tuple[int, bool]]]:
    """Parse a ``ModelInferRequest`` without the contents of its inputs.

    For each input, return the number of bytes of its raw contents and true, or of its typed values and false.
    """
    budget = Budget()
    head, large = split(request, 0, len(request), budget, apart=(_INPUTS, _RAW), once=_ONCE)
    message = parse("ModelInferRequest", head)
    inputs = [field for field in large if field.number == _INPUTS]
    sizes = [(field.end - field.value, True) for field in large if field.number == _RAW]
    if sizes and len(sizes) != len(inputs):
        raise RefusedError(Why.WRONG, f"The request has {len(inputs)} inputs and {len(sizes)} raw contents.")
    is_raw = bool(sizes)
    for field in inputs:
        described, contents = split(request, field.value, field.end, budget, apart=(_CONTENTS,), once=_ONCE_BY_INPUT)
        message.inputs.append(parse("ModelInferRequest.InferInputTensor", described))
        if not is_raw:
            sizes.append((sum(count_values(request, each.value, each.end) for each in contents), False))
    return message, sizes


def _find_id(request: bytes) -> str:
    """Return the id of a request that was refused; empty if it cannot be read, or is too long."""
    with contextlib.suppress(RefusedError):
        for field in read_fields(request, 0, len(request), Budget()):
            if field.number == _ID and field.end - field.value <= MOST_ID_BYTES:
                return request[field.value : field.end].decode("utf-8", "replace")
    return ""


def parse(kind: str, content: bytes) -> Any:
    """Parse a protobuf message of Triton's gRPC service; ``kind`` is the name of its type.

    Raises:
        RefusedError: ``content`` is not a message of this type.
    """
    try:
        return attrgetter(kind)(service_pb2).FromString(content)
    except DecodeError:
        raise RefusedError(Why.WRONG, f"The message is not a {kind.partition('.')[0]}.") from None


def screen_message(message: Any, rules: Mapping[str, Rules], sizes: Sequence[tuple[int, bool]] | None = None) -> None:
    """Check a parsed ``ModelInferRequest`` by the rules of its model, if the model is known.

    ``sizes`` are given for a message without contents, as ``_reduce`` returns them.

    Raises:
        RefusedError: the request would crash Triton.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RefusedError(Why.WRONG, f"The request has {len(message.inputs)} inputs and {len(raw)} raw contents.")
    for index, tensor in enumerate(message.inputs):
        if sizes is not None:
            size, is_binary = sizes[index]
        elif raw:
            size, is_binary = len(raw[index]), True
        else:
            size, is_binary = max((len(value) for _, value in tensor.contents.ListFields()), default=0), False
        _screen(tensor.name, tensor.shape, tensor.datatype, size, is_binary=is_binary)


def screen_nesting(content: bytes) -> None:
    """Raise ``RefusedError`` if brackets are nested too deeply, whether or not ``content`` is valid JSON."""
    if content.count(b"[") + content.count(b"{") <= MOST_NESTED:
        return
    # depth is a running sum of +1 per opening and -1 per closing bracket outside strings; once escapes are removed,
    # every second piece between quotes is a string
    outside = b"".join(content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = np.frombuffer(outside.translate(None, _NO_BRACKETS), np.uint8)
    if len(brackets):
        depths = np.cumsum(np.where((brackets == _OPENING[0]) | (brackets == _OPENING[1]), 1, -1))
        if (deepest := int(depths.max())) > MOST_NESTED:
            raise RefusedError(Why.WRONG, f"The JSON is nested {deepest} deep; at most {MOST_NESTED} are read.")


def check_json(content: bytes) -> None:
    """Raise ``RefusedError``, with the position, if ``content`` is not a JSON object."""
    try:
        msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        if not _has_nan(content):
            raise RefusedError(Why.WRONG, f"The request cannot be read: {error}.") from None


def _screen(name: str, shape: Any, datatype: str, size: int, *, is_binary: bool = False) -> None:
    """Check that a tensor's shape fits its data.

    ``size`` is the number of bytes of the data if ``is_binary``, else the most values that the data can have.
    """
    num = prod(shape)
    if min(shape, default=0) < 0:
        raise RefusedError(Why.WRONG, f"Input {name!r} has shape {list(shape)}. Give dimensions of 0 or more.")
    # with a dimension of 0, Triton may still multiply the others
    if (num or prod(filter(None, shape))) * _ITEM_BYTES.get(datatype, _LENGTH_BYTES) > MOST_BYTES:
        raise RefusedError(Why.WRONG, f"Input {name!r} has shape {list(shape)}, more than {MOST_BYTES} bytes.")
    if is_binary and datatype in _ITEM_BYTES:
        fits = num * _ITEM_BYTES[datatype] == size
    else:
        fits = num * (_LENGTH_BYTES if is_binary else 1) <= size
    if not fits:
        what = f"{size} bytes" if is_binary else "fewer values"
        raise RefusedError(Why.WRONG, f"Input {name!r} has shape {list(shape)} of {datatype}, and {what}.")


def _decode(head: bytes) -> _Request:
    try:
        return _DECODER.decode(head)
    except RecursionError:
        raise RefusedError(
            Why.WRONG, f"The JSON is nested too deeply; at most {MOST_NESTED} brackets are read."
        ) from None
    except msgspec.DecodeError as error:
        if not _has_nan(head):
            raise RefusedError(Why.WRONG, f"The request cannot be read: {error}.") from None
    if len(head) > _SLOW_BYTES:
        raise RefusedError(
            Why.WRONG, f"More than {_SLOW_BYTES} bytes of JSON with NaN or Infinity in it. Send binary tensors."
        )
    try:  # Triton takes NaN and Infinity, as Python does
        document = json.loads(head)
        for tensor in document["inputs"]:
            if "data" in tensor:
                tensor["data"] = msgspec.Raw(json.dumps(tensor["data"]).encode())
        return msgspec.convert(document, _Request)
    except (ValueError, LookupError, TypeError) as error:
        raise RefusedError(Why.WRONG, f"The request cannot be read: {error}.") from None


def _has_nan(content: bytes) -> bool:
    return b"NaN" in content or b"Infinity" in content
