"""The front door for gRPC: Triton's methods, as bytes; refusals as RESOURCE_EXHAUSTED and UNAVAILABLE."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]

from shoal.serving.channels import channel_options
from shoal.serving.failures import Kind, grpc_failure
from shoal.serving.server import Server
from shoal.serving.supervisor.fronts import clean, is_dead, tell_failure, words
from shoal.serving.supervisor.gate import Gate, LostError, RefusedError, Stream, Why, lost

_SERVICE = "/inference.GRPCInferenceService/"
_STATUS = {Why.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED, Why.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE}
_OUR_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
_NAME = 0x0A  # the first field of a request for inference, a string: the model's name
_LIVE, _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x01", b"\x08\x02"  # messages of one field
_NO_SERVER = (Kind.ABSENT, Kind.ALIEN, Kind.CUT)
MOST_CALLS = 2048  # at a time, refused ones among them


class GrpcFront(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handles every method, by asking the server of the day."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._channels: dict[str, Any] = {}

    def service(self, details: Any) -> Any:
        """The handler of a method, as grpc asks for it."""
        own: dict[str, Callable[[Any, Any], Any]] = {
            f"{_SERVICE}ServerLive": self._live,
            f"{_SERVICE}ServerReady": self._ready,
            "/grpc.health.v1.Health/Check": self._check,
            f"{_SERVICE}ModelInfer": self._infer,
        }
        if details.method == f"{_SERVICE}ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if details.method in own:
            return grpc.unary_unary_rpc_method_handler(own[details.method])
        return grpc.unary_unary_rpc_method_handler(self._other(details.method))

    async def _live(self, _: bytes, __: Any) -> bytes:
        return _LIVE

    async def _ready(self, _: bytes, __: Any) -> bytes:
        return b"" if self._gate.trouble() else _LIVE

    async def _check(self, _: bytes, __: Any) -> bytes:
        return _NOT_SERVING if self._gate.trouble() else _SERVING

    async def _infer(self, request: bytes, context: Any) -> bytes:
        return await self._send(f"{_SERVICE}ModelInfer", read_name(request), request, context)

    def _other(self, method: str) -> Callable[[bytes, Any], Any]:
        async def ask(request: bytes, context: Any) -> bytes:
            model = read_name(request) if method == f"{_SERVICE}ModelReady" else ""
            if model and self._gate.trouble(model):
                return b""  # not ready
            return await self._send(method, model, request, context)

        return ask

    async def _send(self, method: str, model: str, request: bytes, context: Any) -> bytes:
        async def call(server: Server) -> Any:
            metadata = _kept(context.invocation_metadata())
            try:
                return await self._channel(server).unary_unary(method)(
                    request, timeout=context.time_remaining(), metadata=metadata
                )
            except grpc.aio.AioRpcError as error:
                if _is_lost(error):
                    raise LostError from None
                return error

        try:
            with self._gate.room(len(request)):
                answer = await self._gate.send(model, len(request), call, lambda answer: not isinstance(answer, bytes))
        except RefusedError as refused:
            if refused.is_lost:
                tell_failure(model, read_id(request), refused.message)
            await _refuse(context, refused)
        if not isinstance(answer, bytes):
            details = answer.details() or ""
            if answer.code() in _OUR_FAULTS and grpc_failure(answer.code().name, details).kind is not Kind.RESTRICTED:
                tell_failure(model, read_id(request), details)
            await context.abort(answer.code(), clean(details))
        return bytes(answer)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Answers as they come; a stream that has begun cannot be asked for again."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        model = read_name(first)
        calls: list[Any] = []

        def end() -> None:
            for call in calls:
                call.cancel()

        try:
            async with self._gate.stream(model, end) as (server, stream):
                calls += [
                    self._channel(server).stream_stream(f"{_SERVICE}ModelStreamInfer")(
                        self._let_in(first, requests, stream, end),
                        timeout=context.time_remaining(),
                        metadata=_kept(context.invocation_metadata()),
                    )
                ]
                async for answer in calls[0]:
                    stream.note(is_answer=True)
                    yield _clean_answer(answer)
                code, details = await calls[0].code(), await calls[0].details() or ""
        except RefusedError as refused:
            await _refuse(context, refused)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not calls or not calls[0].cancelled():  # by the client
                raise
            code, details = grpc.StatusCode.CANCELLED, ""
        if code == grpc.StatusCode.CANCELLED or (code != grpc.StatusCode.OK and is_cut(code, details)):
            self._gate.suspected.set()
            tell_failure(model, read_id(first), lost(model).message)
            await _refuse(context, lost(model))
        if code != grpc.StatusCode.OK:
            await context.abort(code, clean(details))

    async def _let_in(
        self, first: bytes, others: AsyncIterator[bytes], stream: Stream, end: Callable[[], None]
    ) -> AsyncIterator[bytes]:
        stream.note(is_answer=False)
        yield first
        async for request in others:
            if self._gate.trouble(stream.model):
                end()
                return
            stream.note(is_answer=False)
            yield request

    def _channel(self, server: Server) -> Any:
        if server.grpc_url not in self._channels:
            self._channels[server.grpc_url] = grpc.aio.insecure_channel(
                server.grpc_url, options=channel_options(server.grpc_url)
            )
        return self._channels[server.grpc_url]

    async def forget(self, server: Server) -> None:
        """Close the connection to a server that is no more."""
        channel = self._channels.pop(server.grpc_url, None)
        if channel is not None:
            await channel.close()


def make_server(front: GrpcFront, address: str, *, most_bytes: int) -> Any:
    """A server at ``address`` that takes messages of up to ``most_bytes``; it is not started yet."""
    options = [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second one at the same port is an error
    ]
    server = grpc.aio.server(handlers=[front], options=options, maximum_concurrent_rpcs=MOST_CALLS)
    server.add_insecure_port(address)
    return server


def read_name(request: bytes) -> str:
    """The model that a request is for, without the copy of its tensors that parsing it would make."""
    if len(request) > 2 and request[0] == _NAME and request[1] < 0x80:
        return request[2 : 2 + request[1]].decode("utf-8", "replace")
    return str(_parse(request).model_name)


def read_id(request: bytes) -> str:
    """The name that its client gave a request."""
    return str(_parse(request).id)


def _parse(request: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2

    try:
        return service_pb2.ModelInferRequest.FromString(request)
    except DecodeError:  # Triton says what it thinks of it
        return service_pb2.ModelInferRequest()


def _is_lost(error: Any) -> bool:
    """Whether the server, or the model's process, has died."""
    return is_cut(error.code(), error.details() or "")


def is_cut(code: Any, details: str) -> bool:
    """Whether a status says that the server, or the model's process, has died."""
    is_unavailable = code == grpc.StatusCode.UNAVAILABLE
    return is_dead(details) or (is_unavailable and grpc_failure(code.name, details).kind in _NO_SERVER)


def _clean_answer(answer: bytes) -> bytes:
    """An answer of a stream; what is an error, without its traceback."""
    if b"At:\n" not in answer:
        return answer
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2

    try:
        message = service_pb2.ModelStreamInferResponse.FromString(answer)
    except DecodeError:
        return answer
    message.error_message = clean(message.error_message)
    return bytes(message.SerializeToString())


async def _refuse(context: Any, refused: RefusedError) -> NoReturn:
    context.set_trailing_metadata((("retry-after", str(max(1, round(refused.retry_after)))),))
    await context.abort(_STATUS[refused.why], words(refused))
    raise refused  # which abort has raised in its own way


def _kept(metadata: Any) -> Any:
    """What a client sent along, but for what belongs to the connection."""
    return tuple((key, value) for key, value in metadata or () if key not in ("user-agent",))
