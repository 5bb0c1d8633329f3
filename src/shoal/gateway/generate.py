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
import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from aiohttp import web
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from shoal.client.calls import Call, Method
from shoal.client.grpc_transport import to_grpc
from shoal.client.http_transport import restore_shape
from shoal.component.spec import STRING, ModelSpec, TensorSpec
from shoal.component.tensors import Array
from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.refusals import (
    HEADERS,
    LostError,
    RefusedError,
    Why,
    clean,
    is_cut,
    is_dead,
    kept,
    log_failure,
)
from shoal.gateway.screening import Rules, parse, screen_message
from shoal.gateway.streams import END, METHOD, Streamed, Streaming
from shoal.gateway.upstream import Stream, Upstream

_EVENTS = "text/event-stream; charset=utf-8"
_LOOK_SECONDS = 0.05  # between two checks whether a stream's client has disconnected
# Triton's words.
_UNKNOWN = "Request for unknown model"
_NOT_ONE = "generate expects model to produce exactly 1 response, use generate stream for models that produce more."
_RAW = "utf-8", "surrogateescape"  # strings of bytes that are not UTF-8 go through unchanged
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
_KINDS = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "O": (str,)}  # by NumPy's kind of dtype
_WANTED = {"b": "true or false", "i": "whole numbers", "u": "whole numbers from 0", "f": "numbers", "O": "strings"}


# --- the relay of answers --------------------------------------------------------------------------------------------


class Generate:
    """Handler of the generate extension: relays requests to Triton over gRPC, and the answers to the client."""

    def __init__(self, dispatcher: Dispatcher, rules: Mapping[str, Rules], streaming: Streaming) -> None:
        self._dispatcher, self._rules, self._streaming = dispatcher, rules, streaming

    async def answer(
        self, request: web.Request, model: str, version: str, address: str, body: bytes, *, is_whole: bool
    ) -> web.StreamResponse:
        """Send each answer to the client when it arrives or, if ``is_whole``, the only answer as one JSON document.

        A request is never resent. If it is lost after the first answer was sent, the stream ends with an error.

        Raises:
            RefusedError: the request was refused, or it was lost before the first answer was sent.
        """
        message, given_id = to_message(body, self._rules[model].spec, version)
        screen_message(message, self._rules)
        streamed = self._streaming.begin(model, given_id)
        content = streamed.mark(message.SerializeToString())
        answer = _Answer(request, streamed, is_whole=is_whole)
        try:
            with self._dispatcher.place(address):
                self._dispatcher.enter(model, len(body), address)
                try:
                    with self._dispatcher.stream(model, address) as (upstream, stream):
                        await self._relay(upstream, stream, content, answer)
                finally:
                    self._dispatcher.leave(model, len(body), address, is_done=answer.is_done)
            return await answer.finish()
        except LostError:
            self._dispatcher.suspected.set()
            refused = self._dispatcher.lost(model)
            log_failure(model, given_id, refused.message)
            if answer.response is None:
                raise refused from None
            return await answer.fail(refused)

    async def _relay(self, upstream: Upstream, stream: Stream, content: bytes, answer: _Answer) -> None:
        call = upstream.channel.stream_stream(METHOD)(iter([content]), metadata=kept(answer.metadata))
        stream.end, stream.leave = call.cancel, answer.drop
        stream.note_request()
        leaving = asyncio.create_task(self._wait_left(upstream, answer))
        is_last = False
        try:
            async for part in call:
                if is_last:
                    continue
                parsed = parse("ModelStreamInferResponse", part)
                self._dispatcher.answered = time.monotonic()
                is_last = self._streaming.count(answer.streamed, parsed, stream)
                with stream.write(len(part)):
                    await answer.take(parsed, is_last=is_last)
            answer.is_done = True
        except grpc.aio.AioRpcError as error:
            answer.is_done = True
            if is_cut(error.code(), error.details() or ""):
                raise LostError(error.details() or "") from None
            raise RefusedError(Why.WRONG, clean(error.details() or "")) from None
        except asyncio.CancelledError:
            if not call.cancelled():  # if it was, ``stream.end`` did it
                raise
            raise LostError from None
        finally:
            leaving.cancel()
            if not call.done():
                call.cancel()

    async def _wait_left(self, upstream: Upstream, answer: _Answer) -> None:
        """Wait until the client has disconnected, then ask the model to stop the request."""
        while not answer.has_left:
            await asyncio.sleep(_LOOK_SECONDS)
        await self._streaming.stop(upstream, answer.streamed, lambda: answer.is_done)


class _Answer:
    """HTTP response to a client: answers as server-sent events or, if ``is_whole``, one answer as a JSON document."""

    def __init__(self, request: web.Request, streamed: Streamed, *, is_whole: bool) -> None:
        self.streamed = streamed
        self.response: web.StreamResponse | None = None
        self.is_done = False
        self._request, self._is_whole = request, is_whole
        self._num_events, self._status, self._first = 0, 200, b""

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """Tracing headers and request id of the HTTP request, as metadata for a gRPC call."""
        return [(name.lower(), value) for name in HEADERS if (value := self._request.headers.get(name))]

    def drop(self) -> None:
        """Close the connection of a client that reads too slowly."""
        if self._request.transport is not None:
            self._request.transport.abort()

    @property
    def has_left(self) -> bool:
        """Whether the client has closed its connection."""
        return self._request.transport is None or self._request.transport.is_closing()

    async def take(self, message: Any, *, is_last: bool) -> None:
        """Send an answer from Triton to the client; if the client gets a single document, keep the first answer for it.

        An answer without outputs that only marks the end of the stream is dropped.

        Raises:
            LostError: the answer is the error that the model's process has died.
        """
        document = self._read(message)
        if is_last and not message.error_message and not message.infer_response.outputs:
            return
        self._num_events += 1
        if self._is_whole or self._status >= 400:
            self._first = self._first or document
        else:
            await self._write(document)

    def _read(self, message: Any) -> bytes:
        if not message.error_message:
            return to_json(message.infer_response, self.streamed.request_id)
        if is_dead(message.error_message):
            raise LostError(message.error_message)
        text = clean(self.streamed.restore_id(message.error_message))
        if not self._num_events:
            self._status = 404 if text.startswith(_UNKNOWN) else 400
        return json.dumps({"error": text}).encode()

    async def _write(self, document: bytes) -> None:
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": _EVENTS})
            await self.response.prepare(self._request)
        # Triton 24.10 can crash when a stream is abandoned: the rest of it is read and discarded
        if not self.has_left:
            with contextlib.suppress(ConnectionError):
                await self.response.write(b"data: " + document + b"\n\n")

    async def finish(self) -> web.StreamResponse:
        """Complete the response and return it.

        Raises:
            RefusedError: the client asked for exactly one answer, and Triton gave none or several.
        """
        if self._is_whole and self._num_events != 1:
            raise RefusedError(Why.WRONG, f"{_NOT_ONE} {self.streamed.model} gave {self._num_events} answers.")
        if self._is_whole or self._status >= 400:
            return web.Response(status=self._status, body=self._first, content_type="application/json")
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": _EVENTS})
            await self.response.prepare(self._request)
        if not self.has_left:
            await self.response.write_eof()
        return self.response

    async def fail(self, refused: RefusedError) -> web.StreamResponse:
        """Send an error as the last event of a response that has already begun."""
        await self._write(json.dumps({"error": refused.words}).encode())
        assert self.response is not None
        await self.response.write_eof()
        return self.response


# --- requests from JSON ----------------------------------------------------------------------------------------------


def to_message(body: bytes, spec: ModelSpec, version: str) -> tuple[Any, str]:
    """Convert a request's JSON to a ``ModelInferRequest``; return the message and the client's request id.

    Each input gets the shape that Triton would give it. The input's last dimension of -1 becomes the number of values,
    divided by the product of the fixed dimensions. Other dimensions of -1, and the number of rows, become 1. For an
    input without a dimension of -1, each group of values that fills the fixed dimensions is a row.

    Raises:
        RefusedError: a value does not fit its input.
    """
    document = json.loads(body.decode(*_RAW))
    given_id = document.pop("id", "")
    nested = document.pop("parameters", {})
    if not isinstance(given_id, str) or not isinstance(nested, dict):
        raise RefusedError(Why.WRONG, "The request's id must be a string, and its parameters an object.")
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    arrays, parameters = dict[str, Array](), dict[str, Any]()
    for name, value in _members(document, nested):
        if name in inputs:
            arrays[name] = _to_array(inputs[name], value, is_batched=spec.is_batched)
        else:
            parameters[name] = value
    message = to_grpc(Call(Method.INFER, spec.name, arrays)).message
    message.model_version = version
    for name, value in parameters.items():
        _add_parameter(message, name, value)
    return message, given_id


def _members(document: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the members of the request's JSON and of its object ``parameters``, whose members may be inputs too."""
    if twice := sorted(document.keys() & nested.keys()):
        raise RefusedError(Why.WRONG, f"{twice[0]!r} is given twice, by itself and among the parameters. Give it once.")
    yield from document.items()
    yield from nested.items()


def _to_array(tensor: TensorSpec, value: Any, *, is_batched: bool) -> Array:
    values = value if isinstance(value, list) else [value]
    if tensor.dtype in ("TYPE_FP16", "TYPE_BF16"):
        raise RefusedError(
            Why.WRONG, f"Input {tensor.name!r} is {tensor.dtype[5:]}, which JSON cannot represent. Use infer."
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
            return np.array([each.encode(*_RAW) for each in values], np.object_).reshape(shape)
        if dtype.kind in "iu" and not all(np.iinfo(dtype).min <= each <= np.iinfo(dtype).max for each in values):
            raise OverflowError
        return np.array(values, dtype).reshape(shape)
    except (OverflowError, UnicodeEncodeError):
        raise RefusedError(Why.WRONG, f"Input {tensor.name!r} has a value that {tensor.kind} cannot hold.") from None


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


# --- answers to JSON -------------------------------------------------------------------------------------------------


def to_json(answer: Any, given_id: str) -> bytes:
    """Convert a ``ModelInferResponse`` to the generate extension's JSON, with members sorted by name as Triton does."""
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
