"""Triton's generate extension, served over gRPC: its JSON becomes a gRPC request, and the answers become JSON.

Triton 24.10 loses answers over HTTP: each of its HTTP threads queues answers in a pipe that holds 278 of them, and does
not notice when the pipe is full. With 64 fast streams at a time, one stream in fifty lost its beginning, an answer, or
its end. So the service asks Triton over gRPC, and does the extension's conversion itself: an input is a value or a flat
list, all other members of the request's JSON are parameters, and an output is a value or a flat list.

Sections: the relay of answers; requests from JSON; answers to JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from aiohttp import web
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from shoal.clients.client.calls import IS_FINAL, Call, Method, restore_shape
from shoal.clients.client.grpc_transport import to_grpc
from shoal.kit.component.spec import REPOSITORY, STRING, Array, ModelSpec, TensorSpec
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.relay import RelayedAnswer
from shoal.serving.gateway.http.bodies import CHUNK, SMALL, cut, work_apart
from shoal.serving.gateway.http.client_stream import has_left, open_for
from shoal.serving.gateway.http.json_scanning import scan, screen_nesting, to_dict
from shoal.serving.gateway.refusals import FailedError, RefusalReason, RefusedError, wrong
from shoal.serving.gateway.v2.rules import Rules
from shoal.serving.gateway.v2.screening import READ, screen_message

MOST_BODY = 2**22  # bytes of JSON, which is parsed by a single call of 20 ms
MOST_VALUES = 2**16  # in the JSON of a request
_VALUES = 2**12  # of an answer, written by one call
_EVENTS = "text/event-stream; charset=utf-8"
# Triton's words.
_UNKNOWN = "Request for unknown model"
_NOT_ONE = "generate expects model to produce exactly 1 response, use generate stream for models that produce more."
_to_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode
_RAW = "utf-8", "surrogateescape"  # strings of bytes that are not UTF-8 go through unchanged
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
_KINDS = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}  # by NumPy's kind of dtype
_WANTED = {"b": "true or false", "i": "whole numbers", "u": "whole numbers from 0", "f": "numbers", "O": "strings"}


# --- the relay of answers --------------------------------------------------------------------------------------------


class Generate:
    """Handler of the generate extension: sends requests to Triton over gRPC, and the answers to the client."""

    def __init__(self, gate: Gate, rules: Mapping[str, Rules]) -> None:
        self._gate, self._rules = gate, rules

    async def convert(self, body: bytes, model: str, version: str) -> tuple[Any, str]:
        """Check a request's JSON and convert it to a ``ModelInferRequest``; return it and the client's request id.

        Raises:
            RefusedError: the body is not such a request, or asks for what the model does not have.
        """

        def work() -> tuple[Any, str]:
            message, given_id = to_message(body, self._rules[model], version)
            screen_message(message, self._rules)
            return message, given_id

        return await work_apart(work, len(body))

    async def answer(
        self, request: web.Request, caller: Caller, message: Any, given_id: str, num_bytes: int, *, is_whole: bool
    ) -> web.StreamResponse:
        """Send each answer to the client when it arrives or, if ``is_whole``, the only answer as one JSON document.

        ``message`` and ``given_id`` are results of ``convert``, and ``num_bytes`` is the size of the body. A request is
        never resent. If it is lost after the first answer was sent, the stream ends with an error.

        Raises:
            RefusedError: the request was refused, or it was lost before the first answer was sent.
        """
        model, output = message.model_name, _Output(request, message.model_name, is_whole=is_whole)
        try:
            with open_for(self._gate, request, caller, model, is_whole=is_whole) as relay:
                await relay.send(model, given_id, message.SerializeToString(), num_bytes=num_bytes)
                await relay.finish()
                async for answer in relay:
                    with relay.write():
                        await output.take(answer, given_id)
            if is_whole and has_left(request):  # perhaps before its request was sent
                raise ConnectionResetError
            return await output.finish()
        except FailedError as error:
            raise wrong(error.message) from None
        except RefusedError as refused:
            if output.response is None:
                raise
            return await output.fail(refused)


class _Output:
    """HTTP response to a client: answers as server-sent events or, if ``is_whole``, one answer as a JSON document."""

    def __init__(self, request: web.Request, model: str, *, is_whole: bool) -> None:
        self.response: web.StreamResponse | None = None
        self._request, self._model, self._is_whole = request, model, is_whole
        self._num_events, self._status, self._first = 0, 200, b""

    async def take(self, answer: RelayedAnswer, given_id: str) -> None:
        """Send an answer from Triton to the client; if the client gets a single document, keep the first answer for it.

        An answer without outputs that only marks the end of the stream is dropped.

        Raises:
            RefusedError: the answer is the error that the model's process has died.
        """
        if answer.lost is not None:
            raise answer.lost
        document = await self._convert(answer.message, given_id)
        if answer.is_last and answer.is_empty:
            return
        self._num_events += 1
        if self._is_whole or self._status >= 400:
            self._first = self._first or document
        else:
            await self._write(document)

    async def _convert(self, message: Any, given_id: str) -> bytes:
        if not message.error_message:
            answer = message.infer_response
            if sum(map(len, answer.raw_output_contents)) > SMALL:
                return await asyncio.to_thread(to_json, answer, given_id)
            return to_json(answer, given_id)
        if not self._num_events:
            self._status = 404 if message.error_message.startswith(_UNKNOWN) else 400
        return json.dumps({"error": message.error_message}).encode()

    async def _write(self, document: bytes) -> None:
        if has_left(self._request):  # the rest is read and discarded
            return
        with contextlib.suppress(ConnectionError):
            if self.response is None:
                self.response = web.StreamResponse(headers={"Content-Type": _EVENTS})
                await self.response.prepare(self._request)
            async for piece in cut(b"data: " + document + b"\n\n"):
                await self.response.write(piece)

    async def finish(self) -> web.StreamResponse:
        """Complete the response and return it.

        Raises:
            RefusedError: the client asked for exactly one answer, and Triton gave none or several.
        """
        if self._is_whole and self._num_events != 1:
            fix = 'Send "stream": false, or ask generate_stream.'
            raise wrong(f"{_NOT_ONE} {self._model} gave {self._num_events} answers. {fix}")
        if self._is_whole or self._status >= 400:
            return web.Response(status=self._status, body=self._first, content_type="application/json")
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": _EVENTS})
            await self.response.prepare(self._request)
        if not has_left(self._request):
            await self.response.write_eof()
        return self.response

    async def fail(self, refused: RefusedError) -> web.StreamResponse:
        """Send an error as the last event of a response that has already begun."""
        await self._write(json.dumps({"error": refused.client_message}).encode())
        assert self.response is not None
        await self.response.write_eof()
        return self.response


# --- requests from JSON ----------------------------------------------------------------------------------------------


def to_message(body: bytes, rules: Rules, version: str) -> tuple[Any, str]:
    """Convert a request's JSON to a ``ModelInferRequest``; return the message and the client's request id.

    Each input gets the shape that Triton would give it. The input's last dimension of -1 becomes the number of values,
    divided by the product of the fixed dimensions. Other dimensions of -1, and the number of rows, become 1. For an
    input without a dimension of -1, each group of values that fills the fixed dimensions is a row.

    Raises:
        RefusedError: a value does not fit its input, or a member is no input; Triton would ignore it.
    """
    spec = rules.spec
    if len(body) > MOST_BODY:
        raise RefusedError(
            RefusalReason.LARGE, f"The JSON has {len(body)} bytes; generate takes {MOST_BODY}. Use infer."
        )
    if len(body) > SMALL:
        if (count := scan(body)[1].commas + 1) > MOST_VALUES:
            raise RefusedError(
                RefusalReason.LARGE, f"The JSON has {count} values; generate takes {MOST_VALUES}. Use infer."
            )
    else:
        screen_nesting(body)
    try:
        document = json.loads(body.decode(*_RAW), object_pairs_hook=to_dict)
        given_id, nested = document.pop("id", ""), document.pop("parameters", {})
        if not isinstance(given_id, str) or not isinstance(nested, dict):
            raise wrong("The request's id must be a string, and its parameters an object.")
        given_id.encode()
    except (ValueError, AttributeError, TypeError) as error:  # also: a list, or an id with half of a character
        reason = error if isinstance(error, json.JSONDecodeError) else "it is not a JSON object of text and numbers"
        raise wrong(f"The request cannot be read: {reason}.") from None
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    arrays, parameters = dict[str, Array](), dict[str, Any]()
    for name, value in _members(document, nested):
        if name in inputs:
            arrays[name] = _to_array(inputs[name], value, spec)
        elif rules.takes_any or name in READ or name == REPOSITORY:
            parameters[name] = value
        else:
            near = get_close_matches(name, inputs, 1)
            fix = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(inputs)}."
            raise wrong(f"Model {spec.name} has no input {name!r:.60}. {fix}")
    if any(np.isinf(array).any() for array in arrays.values() if array.dtype.kind == "f") and b"Infinity" not in body:
        raise wrong("The request has a number that an input of FP32 or FP64 cannot hold.")
    message = to_grpc(Call(Method.INFER, spec.name, arrays, request_id=given_id)).message
    message.model_version = version
    for name, value in parameters.items():
        _add_parameter(message, name, value)
    return message, given_id


def _members(document: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the members of the request's JSON and of its object ``parameters``, whose members may be inputs too."""
    if twice := sorted(document.keys() & nested.keys()):
        raise wrong(f"{twice[0]!r} is given twice, by itself and among the parameters. Give it once.")
    yield from document.items()
    yield from nested.items()


def _to_array(tensor: TensorSpec, value: Any, spec: ModelSpec) -> Array:
    values = value if isinstance(value, list) else [value]
    if tensor.dtype in ("TYPE_FP16", "TYPE_BF16"):
        raise wrong(f"Input {tensor.name!r} is {tensor.dtype[5:]}, which JSON cannot represent. Use infer.")
    dtype, kinds = tensor.numpy_dtype, _KINDS[tensor.numpy_dtype.kind]
    if others := [each for each in values if type(each) not in kinds]:
        raise wrong(
            f"Input {tensor.name!r} ({tensor.kind}) takes {_WANTED[dtype.kind]}, as one value or a flat list;"
            f" not {json.dumps(others[0])[:60]}."
        )
    shape = _shape(tensor, len(values), spec)
    try:
        if tensor.dtype == STRING:
            return np.array([each.encode(*_RAW) for each in values], np.object_).reshape(shape)
        if dtype.kind in "iu" and values:
            known = np.iinfo(dtype)
            if min(values) < known.min or max(values) > known.max:
                raise OverflowError
        with np.errstate(over="ignore"):  # infinities are refused
            return np.array(values, dtype).reshape(shape)
    except (OverflowError, UnicodeEncodeError):
        raise wrong(f"Input {tensor.name!r} has a value that {tensor.kind} cannot hold.") from None


def _shape(tensor: TensorSpec, count: int, spec: ModelSpec) -> tuple[int, ...]:
    """Return the shape of an input with ``count`` values."""
    shape = restore_shape((-1, *tensor.dims) if spec.is_batched else tensor.dims, count)
    if math.prod(shape) != count:
        raise wrong(f"Input {tensor.name!r} has {count} values, which do not fit its shape {list(tensor.dims)}.")
    if spec.is_batched and not 0 < shape[0] <= spec.max_batch_size:
        raise wrong(
            f"Input {tensor.name!r} ({tensor.kind}) has {shape[0]} rows; {spec.name} takes 1 to {spec.max_batch_size}."
        )
    return shape


def _add_parameter(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message.parameters[name], _PARAMETERS[type(value)], value)
    except (KeyError, ValueError, TypeError):
        inputs = "It is not an input of the model; a parameter"
        raise wrong(f"{name!r} is {json.dumps(value)[:60]}. {inputs} is a string, a number, true or false.") from None


# --- answers to JSON -------------------------------------------------------------------------------------------------


def to_json(answer: Any, given_id: str) -> bytes:
    """Convert a ``ModelInferResponse`` to the generate extension's JSON, with members sorted by name as Triton does."""
    document: dict[str, Any] = {"model_name": answer.model_name, "model_version": answer.model_version}
    if given_id:
        document["id"] = given_id
    for name, parameter in answer.parameters.items():
        if name != IS_FINAL and (choice := parameter.WhichOneof("parameter_choice")):
            document[name] = getattr(parameter, choice)
    answers = zip(answer.outputs, answer.raw_output_contents, strict=True)
    outputs = {output.name: _read(output.datatype, raw) for output, raw in answers}
    if sum(map(len, answer.raw_output_contents)) <= SMALL:
        listed = {name: values if isinstance(values, list) else values.tolist() for name, values in outputs.items()}
        document |= {name: values[0] if len(values) == 1 else values for name, values in listed.items()}
        return _to_text(document).encode(*_RAW)
    texts = {name: [json.dumps(value, ensure_ascii=False)] for name, value in document.items()}
    texts |= {name: _write(values) for name, values in outputs.items()}
    parts = [part for name in sorted(texts) for part in (",", json.dumps(name, ensure_ascii=False), ":", *texts[name])]
    return b"".join([b"{", *(part.encode(*_RAW) for part in parts[1:]), b"}"])


def _read(datatype: str, raw: bytes) -> Any:
    """Return the values of a tensor: a list of texts, or an array of numbers."""
    if datatype == "BYTES":
        return [text.decode(*_RAW) for text in deserialize_bytes_tensor(raw)] if raw else []
    if datatype == "BF16":  # the upper half of FP32
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, triton_to_np_dtype(datatype))


def _write(values: Any) -> list[str]:
    """Convert values to parts of JSON, each of which takes few milliseconds."""
    parts = list[str]()
    if isinstance(values, list):
        for text in values:
            cuts = (text[at : at + CHUNK] for at in range(0, len(text), CHUNK))
            parts += ',"', *(json.dumps(cut, ensure_ascii=False)[1:-1] for cut in cuts), '"'
    else:
        for at in range(0, len(values), _VALUES):
            parts += ",", json.dumps(values[at : at + _VALUES].tolist(), separators=(",", ":"))[1:-1]
    parts = [parts[0][1:], *parts[1:]] if parts else parts  # without the first comma
    return parts if len(values) == 1 else ["[", *parts, "]"]
