"""Screening of requests: requests that would crash Triton, or stop the event loop, are refused.

Triton 24.10 multiplies a request's dimensions without an overflow check. A shape such as [1, 2**61] then fits into an
empty body and kills the model's process. Its JSON parser recurses for each bracket until the stack overflows. Its
classification extension divides by the size of an element, which is 0 for texts. Triton must read exactly what was
screened. Of two equal keys, Triton takes the first one and most parsers the last one, so a JSON request is parsed and
encoded again.

Python code and most parsers hold the interpreter's lock, so that in a thread, too, they stop the event loop. Only work
whose size is limited may therefore be a single call. The data of large JSON requests is not parsed: ``scan`` finds
where it begins and ends, piece by piece, and it is passed on as it is.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from shoal.clients.client.calls import WITH_FINAL
from shoal.kit.component.spec import TensorSpec
from shoal.serving.gateway.http.bodies import CHUNK, SMALL
from shoal.serving.gateway.http.json_scanning import say_kinds, scan, screen_nesting
from shoal.serving.gateway.refusals import RefusalReason, RefusedError, closed, wrong
from shoal.serving.gateway.v2.rules import Rules
from shoal.serving.gateway.v2.wire import Budget, count_values, find_text, make_value_budget, split

MOST_BYTES = 2**31  # of one tensor, as Triton computes them
MOST_DIMS = 64
MOST_PARAMETERS = 128  # of a request, and of each of its inputs and outputs
MOST_ID_BYTES = 2**10  # of a request's id, which is in each of its answers
MOST_BESIDE = 2**16  # bytes of an infer request's JSON without its data
_ITEM_BYTES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
_NOT_CLASSIFIED = ("TYPE_STRING", "TYPE_BOOL", "TYPE_FP16", "TYPE_BF16")
_LENGTH_BYTES = 4  # before each element of a BYTES tensor
_ID, _INPUTS, _RAW = 3, 5, 7  # numbers of fields of a ModelInferRequest
_ONCE = {1: "model_name", 2: "model_version", _ID: "id"}
_CONTENTS = 5  # and of an InferInputTensor
_ONCE_BY_INPUT = {1: "name", 2: "datatype", _CONTENTS: "contents"}
_LONG = 2**10  # bytes of a list
_DATA_LEVEL = 4  # of the brackets around an input's data


class _Input(msgspec.Struct, omit_defaults=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct, omit_defaults=True):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct, omit_defaults=True):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


_DECODER = msgspec.json.Decoder(_Request)


# --- JSON ------------------------------------------------------------------------------------------------------------


def screen_json(head: bytes, num_binary: int, rules: Rules) -> tuple[bytes, str]:
    """Check the JSON of an inference request; return the JSON for Triton, encoded again, and the request's id.

    ``num_binary`` is the number of bytes of binary tensors that follow the JSON.

    Raises:
        RefusedError: the JSON is not an inference request, or would crash Triton.
    """
    if len(head) > SMALL:
        return _screen_in_parts(head, num_binary, rules)
    screen_nesting(head)
    try:
        request = _DECODER.decode(head)
    except (msgspec.DecodeError, RecursionError) as error:
        if _has_nan(head):
            return _screen_in_parts(head, num_binary, rules)
        raise wrong(f"The request cannot be read: {say_kinds(error)}.{_show_input(rules, str(error))}") from None
    _screen_request(request, num_binary, rules, {})
    return msgspec.json.encode(request), request.id


def _screen_in_parts(head: bytes, num_binary: int, rules: Rules) -> tuple[bytes, str]:
    """Screen JSON without parsing the inputs' data, if that is long or has NaN in it.

    A placeholder that clients cannot guess takes its place while the rest is parsed and encoded.
    """
    lists, _ = scan(head, _DATA_LEVEL)
    spans = [each for each in lists if each.end - each.start >= _LONG or _has_nan(head[each.start : each.end])]
    if (beside := len(head) - sum(each.end - each.start for each in spans)) > MOST_BESIDE:
        raise RefusedError(
            RefusalReason.LARGE,
            f"The JSON has {beside} bytes besides its inputs' data; at most {MOST_BESIDE} are read.",
        )
    token, parts, last = secrets.token_hex(16), list[bytes](), 0
    for number, span in enumerate(spans):
        parts += head[last : span.start], f'"{token}{number}"'.encode()
        last = span.end
    try:
        request = _DECODER.decode(b"".join([*parts, head[last:]]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(f"The request cannot be read: {say_kinds(error)}.") from None
    counts = {f'"{token}{number}"'.encode(): span.num_values for number, span in enumerate(spans)}
    _screen_request(request, num_binary, rules, counts)
    encoded = re.split(rf'"{token}(\d+)"'.encode(), msgspec.json.encode(request))
    for index in range(1, len(encoded), 2):
        start, end, _ = spans[int(encoded[index])]
        encoded[index : index + 1] = [b"".join(head[at : min(at + CHUNK, end)] for at in range(start, end, CHUNK))]
    return b"".join(encoded), request.id


def _screen_request(request: _Request, num_binary: int, rules: Rules, counts: Mapping[bytes, int]) -> None:
    """Check a parsed request; ``counts`` are the numbers of values that placeholders for data stand for."""
    outputs = [(output.name, output.parameters) for output in request.outputs]
    _judge(rules, request.id, [each.name for each in request.inputs], request.parameters, outputs, is_json=True)
    is_classified = any("classification" in wishes for _, wishes in outputs)
    if is_classified and any(0 in tensor.shape for tensor in request.inputs):
        raise wrong("An input is empty, and outputs without elements cannot be classified.")
    num_claimed = 0
    for tensor in request.inputs:
        _judge_tensor("Input", tensor.name, tensor.parameters)
        claimed = tensor.parameters.get("binary_data_size")
        if claimed is None:
            data = bytes(tensor.data)
            # a value takes at least a character and a comma
            count = counts.get(data, len(data) // 2 + 1)
            _screen(tensor.name, tensor.shape, tensor.datatype, count)
            if data in counts and count > max(1, prod(tensor.shape)):  # Triton would read all of them
                raise wrong(f"Input {tensor.name!r:.60} has shape {tensor.shape!s:.200}, and {count} values.")
            continue
        if type(claimed) is not int or not 0 <= claimed <= MOST_BYTES:
            raise wrong(f"Input {tensor.name!r} has binary_data_size {_show(claimed)}. Give the number of its bytes.")
        _screen(tensor.name, tensor.shape, tensor.datatype, claimed, is_binary=True)
        num_claimed += claimed
    if num_claimed != num_binary:
        raise wrong(f"{num_binary} bytes follow the JSON; its inputs declare {num_claimed}.")


def _show_kind(tensor: TensorSpec, rules: Rules) -> str:
    """Return datatype and shape as requests have them."""
    shape = [*([-1] if rules.spec.is_batched else []), *tensor.dims]
    return f"{tensor.dtype.removeprefix('TYPE_').replace('STRING', 'BYTES')} {shape}"


def _show_input(rules: Rules, error: str) -> str:
    """Return, for an error about a request's inputs, how the model's first input is sent."""
    if "inputs" not in error or not rules.spec.inputs:
        return ""
    tensor = rules.spec.inputs[0]
    datatype, _, shape = _show_kind(tensor, rules).replace("-1", "1").partition(" ")
    example = f'{{"name": "{tensor.name}", "datatype": "{datatype}", "shape": {shape}, "data": [...]}}'
    return f" An input is an object: {example}. Rows alone go to /v1/models/{rules.spec.name}:predict."


def _has_nan(content: bytes) -> bool:
    """Whether JSON has numbers that Triton reads and msgspec does not."""
    return b"NaN" in content or b"Infinity" in content


# --- protobuf --------------------------------------------------------------------------------------------------------


class Screened(NamedTuple):
    """Facts about a gRPC inference request that was screened.

    ``is_end_wanted`` says whether the request asks Triton to mark its last answer.
    """

    model: str
    version: str
    request_id: str
    is_end_wanted: bool


async def screen_grpc(request: bytes, rules: Mapping[str, Rules]) -> Screened:
    """Check a serialised ``ModelInferRequest``.

    Raises:
        RefusedError: ``request`` is not a ``ModelInferRequest``, or would crash Triton; with the request's id.
    """
    try:
        if len(request) > SMALL:
            return await asyncio.to_thread(_screen_grpc, request, rules)
        return _screen_grpc(request, rules)
    except RefusedError as refused:
        refused.request_id = find_text(request, _ID, MOST_ID_BYTES)
        raise


def _screen_grpc(request: bytes, rules: Mapping[str, Rules]) -> Screened:
    message, sizes = parse("ModelInferRequest", request) if len(request) <= SMALL else None, None
    if message is None or message.SerializeToString() != request:  # it is large, or may have a field twice
        message, sizes = _reduce(request, rules)
    screen_message(message, rules, sizes)
    is_end_wanted = bool(message.parameters[WITH_FINAL].bool_param)
    return Screened(message.model_name, message.model_version, message.id, is_end_wanted)


def _reduce(request: bytes, rules: Mapping[str, Rules]) -> tuple[Any, list[tuple[int, bool]]]:
    """Parse a ``ModelInferRequest`` without the contents of its inputs; without inputs, if its model is not known.

    For each input, return the number of bytes of its raw contents and true, or of its typed values and false.
    """
    budget, values = Budget(), make_value_budget()
    head, large = split(request, 0, len(request), budget, apart=(_INPUTS, _RAW), once=_ONCE)
    message = parse("ModelInferRequest", head)
    known = rules.get(message.model_name)
    if known is None:
        return message, []
    inputs = [field for field in large if field.number == _INPUTS]
    if len(inputs) > (most := len(known.spec.inputs)):
        raise _too_many("inputs", len(inputs), most)
    sizes = [(field.end - field.value, True) for field in large if field.number == _RAW]
    if sizes and len(sizes) != len(inputs):
        raise wrong(f"The request has {len(inputs)} inputs and {len(sizes)} raw contents.")
    is_raw = bool(sizes)
    for field in inputs:
        described, contents = split(request, field.value, field.end, budget, apart=(_CONTENTS,), once=_ONCE_BY_INPUT)
        message.inputs.append(parse("ModelInferRequest.InferInputTensor", described))
        if not is_raw:
            sizes.append((sum(count_values(request, each.value, each.end, values) for each in contents), False))
    return message, sizes


def parse(kind: str, content: bytes) -> Any:
    """Parse a protobuf message of Triton's gRPC service; ``kind`` is the name of its type.

    Raises:
        RefusedError: ``content`` is not a message of this type.
    """
    try:
        return attrgetter(kind)(service_pb2).FromString(content)
    except DecodeError:
        raise wrong(f"The message is not a {kind.partition('.')[0]}.") from None


def screen_message(message: Any, rules: Mapping[str, Rules], sizes: Sequence[tuple[int, bool]] | None = None) -> None:
    """Check a parsed ``ModelInferRequest`` by the rules of its model, if the model is known.

    ``sizes`` are given for a message without contents, as ``_reduce`` returns them.

    Raises:
        RefusedError: the request would crash Triton.
    """
    if known := rules.get(message.model_name):
        if len(message.outputs) > (most := len(known.spec.outputs)):
            raise _too_many("outputs", len(message.outputs), most)
        outputs = [(output.name, _values(output.parameters)) for output in message.outputs]
        names = [tensor.name for tensor in message.inputs]
        _judge(known, message.id, names, _values(message.parameters), outputs, is_json=False)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise wrong(f"The request has {len(message.inputs)} inputs and {len(raw)} raw contents.")
    for index, tensor in enumerate(message.inputs):
        _judge_tensor("Input", tensor.name, _values(tensor.parameters))
        if sizes is not None:
            size, is_binary = sizes[index]
        elif raw:
            size, is_binary = len(raw[index]), True
        else:
            size, is_binary = max((len(value) for _, value in tensor.contents.ListFields()), default=0), False
        _screen(tensor.name, tensor.shape, tensor.datatype, size, is_binary=is_binary)


def _values(parameters: Any) -> dict[str, Any]:
    """Return the values of a protobuf map of parameters; those without a value are None."""
    if not parameters:
        return {}
    if len(parameters) > MOST_PARAMETERS:
        raise _too_many("parameters", len(parameters), MOST_PARAMETERS)
    choices = ((name, value, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(value, choice) if choice else None for name, value, choice in choices}


# --- judgements ------------------------------------------------------------------------------------------------------


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_sequence(value: Any) -> bool:
    return _is_unsigned(value) or (type(value) is str and len(value) <= 128)


def _is_scalar(value: Any) -> bool:
    return type(value) in (bool, str, float) or (type(value) is int and -(2**63) <= value < 2**64)


# Parameters of a request that Triton itself reads: a check, and what it wants.
READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sequence_id": (_is_sequence, "a whole number from 0, or a text of at most 128 characters"),
    "sequence_start": (_is_flag, "true or false"),
    "sequence_end": (_is_flag, "true or false"),
    "priority": (_is_unsigned, "a whole number from 0"),
    "timeout": (_is_unsigned, "microseconds, a whole number from 0"),
    "binary_data_output": (_is_flag, "true or false"),
    WITH_FINAL: (_is_flag, "true or false"),
}
_ANY = _is_scalar, "a text, a number of at most 64 bits, true or false"


def _judge(
    rules: Rules,
    request_id: str,
    inputs: Sequence[str],
    parameters: Mapping[str, Any],
    outputs: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    is_json: bool,
) -> None:
    """Check what a request asks for besides its tensors' shapes; ``is_json`` says whether Triton gets it as JSON."""
    if len(request_id) > MOST_ID_BYTES // 4 and len(request_id.encode("utf-8", "replace")) > MOST_ID_BYTES:
        raise wrong(f"The request's id is longer than {MOST_ID_BYTES} bytes. Give a shorter one.")
    if len(inputs) > len(rules.spec.inputs):
        raise _too_many("inputs", len(inputs), len(rules.spec.inputs))
    known = {tensor.name for tensor in rules.spec.inputs}
    if unknown := next((name for name in inputs if name not in known), None):
        shown = ", ".join(f"{each.name} ({_show_kind(each, rules)})" for each in rules.spec.inputs)
        raise wrong(f"{rules.spec.name} has no input {unknown!r:.60}. Its inputs: {shown:.2000}.")
    if len(parameters) > MOST_PARAMETERS:
        raise _too_many("parameters", len(parameters), MOST_PARAMETERS)
    for name, value in parameters.items():
        is_right, wanted = READ.get(name, _ANY)
        if name.startswith("triton_") and name not in READ:
            raise wrong(f"Parameter {name!r:.60}: names that begin with triton_ are Triton's own.")
        if not is_right(value):
            raise wrong(f"Parameter {name!r:.60} is {_show(value)}. Give {wanted}.")
        if name == "priority" and value > rules.num_priorities:
            raise wrong(f"Parameter 'priority' is {value}; {rules.spec.name} has {rules.num_priorities} levels.")
    if not outputs:
        return
    declared, seen = {tensor.name: tensor for tensor in rules.spec.outputs}, set[str]()
    for name, wishes in outputs:
        if name not in declared:
            raise wrong(f"{rules.spec.name} has no output {name!r:.60}. Its outputs: {', '.join(declared)}.")
        if name in seen:
            raise wrong(f"Output {name!r} is listed twice. List it once.")
        seen.add(name)
        _judge_tensor("Output", name, wishes)
        if "classification" in wishes:
            _judge_classes(declared[name], wishes["classification"], is_json=is_json)


def _judge_tensor(what: str, name: str, parameters: Mapping[str, Any]) -> None:
    """Check the parameters of an input or an output."""
    if not parameters:
        return
    if len(parameters) > MOST_PARAMETERS:
        raise _too_many("parameters", len(parameters), MOST_PARAMETERS)
    if any(each.startswith("shared_memory_") for each in parameters):
        raise closed("Shared memory")
    if not _is_flag(flag := parameters.get("binary_data", False)):
        raise wrong(f"{what} {name!r:.60} has binary_data {_show(flag)}. Give true or false.")


def _judge_classes(tensor: TensorSpec, number: Any, *, is_json: bool) -> None:
    """Check a request to get the indices of an output's greatest values instead of the output.

    Triton divides by the number of elements when it writes JSON, and by the size of an element always.
    """
    words = f"Output {tensor.name!r} ({tensor.kind}) cannot be classified"
    if type(number) is not int or not 0 < number < 2**31:
        raise wrong(f"Output {tensor.name!r} has classification {_show(number)}. Give the number of classes, from 1.")
    if tensor.dtype in _NOT_CLASSIFIED:
        raise wrong(f"{words}: its elements are not integers, FP32 or FP64. Ask for it as it is.")
    if is_json and any(dim < 1 for dim in tensor.dims):
        raise wrong(f"{words} over HTTP, because it can be empty. Ask for it as it is, or by gRPC.")


def _show(value: Any) -> str:
    """Return the beginning of a client's value, for a message."""
    return f"{value[:60] if isinstance(value, str) else value!r:.60}"


def _too_many(what: str, number: int, most: int) -> RefusedError:
    return wrong(f"The request has {number} {what}; at most {most} are read.")


def _screen(name: str, shape: Any, datatype: str, size: int, *, is_binary: bool = False) -> None:
    """Check that a tensor's shape fits its data.

    ``size`` is the number of bytes of the data if ``is_binary``, else the most values that the data can have.
    """
    if len(shape) > MOST_DIMS:
        raise _too_many(f"dimensions of input {name!r:.60}", len(shape), MOST_DIMS)
    num, item = prod(shape), _ITEM_BYTES.get(datatype, _LENGTH_BYTES)
    if datatype not in _ITEM_BYTES and datatype != "BYTES":
        raise wrong(f"Input {name!r:.60} has the datatype {datatype!r:.60}. Known: BYTES, {', '.join(_ITEM_BYTES)}.")
    if min(shape, default=0) < 0:
        problem = ". Give dimensions of 0 or more."
    # with a dimension of 0, Triton may still multiply the others
    elif (num or prod(filter(None, shape))) * item > MOST_BYTES:
        problem = f", more than {MOST_BYTES} bytes."
    elif is_binary and (num * item > size or (datatype in _ITEM_BYTES and num * item < size)):
        problem = f" of {datatype:.60}, and {size} bytes."
    elif not is_binary and num > size:
        problem = f" of {datatype:.60}, and fewer values."
    else:
        return
    raise wrong(f"Input {name!r:.60} has shape {list(shape)!s:.200}{problem}")
