"""gRPC: messages of KServe's inference protocol v2, channels, and the transports of Client and AsyncClient."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from shoal.clients.client.calls import (
    IS_FINAL,
    WITH_FINAL,
    Answer,
    Call,
    Description,
    Method,
    ServedModel,
    datatype,
    decode,
    encode,
    make_answer,
)
from shoal.clients.client.failures import CallError, Kind, grpc_failure, stream_failure
from shoal.clients.client.sources import AsyncSource, WatchedSource
from shoal.clients.client.tls import Tls

CUT_SHORT = "the stream ended before its last answer"
# If a client cancels a stream between its last message and its status, Triton 24.10 keeps the stream for ever: its
# shutdown then takes the whole exit time-out, or ends with a failed assertion. So the status is read before the last
# answer is returned and before an error is raised.
_REST_SECONDS = 1.0  # longest wait for the status after an error


# --- messages -------------------------------------------------------------------------------------------------------


class GrpcRequest(NamedTuple):
    """A gRPC request: a procedure of GRPCInferenceService, and its message."""

    procedure: str
    message: Any


def to_grpc(call: Call) -> GrpcRequest:
    """Serialise ``call`` as a gRPC request."""
    from tritonclient.grpc import service_pb2 as pb

    if call.method is Method.METADATA:
        return GrpcRequest("ModelMetadata", pb.ModelMetadataRequest(name=call.model))
    if call.method is Method.CONFIG:
        return GrpcRequest("ModelConfig", pb.ModelConfigRequest(name=call.model))
    if call.method is Method.READY:
        return GrpcRequest("ModelReady", pb.ModelReadyRequest(name=call.model))
    if call.method is Method.INDEX:
        return GrpcRequest("RepositoryIndex", pb.RepositoryIndexRequest())
    message = pb.ModelInferRequest(model_name=call.model, model_version=str(call.version or ""), id=call.request_id)
    for name, array in call.arrays.items():
        message.inputs.add(name=name, datatype=datatype(array), shape=list(array.shape))
        message.raw_input_contents.append(encode(array))
    for name in call.outputs:
        message.outputs.add(name=name)
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in call.parameters.items():
        setattr(message.parameters[name], kinds[type(value)], value)
    if call.method is Method.STREAM:
        message.parameters[WITH_FINAL].bool_param = True
        return GrpcRequest("ModelStreamInfer", message)
    return GrpcRequest("ModelInfer", message)


def from_grpc(call: Call, reply: Any) -> Any:
    """Parse the message ``reply``, with the same results as ``from_http``.

    Raises:
        CallError: ``reply`` is not an answer of Triton.
    """
    if call.method is Method.READY:
        return bool(reply.ready)
    if call.method is Method.INDEX:
        return [ServedModel(each.name, each.version, each.state, each.reason) for each in reply.models]
    if call.method is Method.CONFIG:
        return Description.from_config(_to_json(reply.config))
    if call.method is Method.METADATA:
        return Description.from_metadata(_to_json(reply))
    return _grpc_answer(call, reply)


def from_grpc_stream(call: Call, reply: Any) -> tuple[Answer | None, bool]:
    """Parse one message of a stream: return its answer, or None if it has none, and whether it is the last message.

    Raises:
        CallError: the message is an error, or is not an answer of Triton.
    """
    if reply.error_message:
        raise stream_failure(reply.error_message)
    is_last = reply.infer_response.parameters[IS_FINAL].bool_param
    is_empty = is_last and not reply.infer_response.outputs
    return None if is_empty else _grpc_answer(call, reply.infer_response), is_last


def _grpc_answer(call: Call, reply: Any) -> Answer:
    raws = list(reply.raw_output_contents)
    try:
        arrays = {
            output.name: decode(output.datatype, list(output.shape), memoryview(raw))
            for output, raw in zip(reply.outputs, raws, strict=True)
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CallError(Kind.NOT_TRITON, f"unreadable answer: {error}") from None
    choices = {name: (value, value.WhichOneof("parameter_choice")) for name, value in reply.parameters.items()}
    parameters = {name: getattr(value, choice) for name, (value, choice) in choices.items() if choice}
    return make_answer(call, arrays, reply.model_version, parameters)


def _to_json(message: Any) -> dict[str, Any]:
    """Convert the message to the JSON form that Triton's HTTP port sends."""
    from google.protobuf import json_format

    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))


# --- channels -------------------------------------------------------------------------------------------------------
# There is one gRPC channel at a time. It is replaced as soon as its connection breaks: gRPC reconnects by itself, but
# not at once, and a request sent right after the break would go into the dead connection and fail as if it had run.


def channel_options(url: str) -> list[tuple[str, int]]:
    """Return channel options: unlimited message sizes, no proxy on loopback, short reconnect back-off."""
    is_here = url.startswith(("127.", "localhost", "[::1]"))
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # otherwise the back-off of another client would delay this client
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    return [*options, ("grpc.enable_http_proxy", 0)] if is_here else options


class Channel:
    """A gRPC channel, ``raw``, and the number of requests in flight on it."""

    def __init__(self, channel: Any) -> None:
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        self.raw = channel
        self.stub = GRPCInferenceServiceStub(channel)
        self.users = 0


class ChannelPool:
    """Hands out the current channel; threads may share the pool.

    The owner of the pool closes the channels, because closing an asynchronous channel has to be awaited.
    """

    def __init__(self, url: str, open_channel: Callable[..., Any]) -> None:
        self._url, self._open_channel = url, open_channel
        self._lock = threading.Lock()
        self._current = self._open()
        self._replaced: set[Channel] = set()
        self._is_closed = False

    def _open(self) -> Channel:
        return Channel(self._open_channel(self._url, options=channel_options(self._url)))

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        """Yield the channel for one request. After a broken connection, the next request gets a new channel.

        Raises:
            CallError: gRPC raised an error in the ``with`` block.
        """
        import grpc  # type: ignore[import-untyped]

        with self._lock:
            channel = self._current
            channel.users += 1
        is_broken = False
        try:
            yield channel
        except grpc.RpcError as error:
            said = error.code().name, error.details() or ""
            is_broken = grpc_failure(*said).kind is Kind.CONNECTION_LOST
            raise grpc_failure(*said) from None
        finally:
            with self._lock:
                channel.users -= 1
                if is_broken and channel is self._current and not self._is_closed:
                    self._replaced.add(channel)
                    self._current = self._open()

    def unused(self) -> list[Any]:
        """Return replaced gRPC channels without requests in flight, for the pool's owner to close; each only once."""
        if not self._replaced:
            return []
        with self._lock:
            unused = {channel for channel in self._replaced if not channel.users}
            self._replaced -= unused
            return [channel.raw for channel in unused]

    def close(self) -> list[Any]:
        """Stop opening channels and return all remaining channels, for the pool's owner to close."""
        with self._lock:
            self._is_closed = True
            return [channel.raw for channel in (self._current, *self._replaced)]


# --- transports -----------------------------------------------------------------------------------------------------


def _read_rest(replies: Any) -> None:
    """Read the rest of a stream after an error, up to its status.

    This takes at most ``_REST_SECONDS``, because the model may go on answering.
    """
    import grpc

    late = threading.Timer(_REST_SECONDS, replies.cancel)
    late.daemon = True
    late.start()
    with suppress(grpc.RpcError):
        for _ in replies:
            pass
    late.cancel()


async def _read_rest_async(replies: Any) -> None:
    """Read a stream after an error, as ``_read_rest`` does, in an event loop."""
    import grpc

    with suppress(grpc.RpcError, TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            async for _ in replies:
                pass


def _opener(library: Any, tls: Tls | None) -> Callable[..., Any]:
    """Return what opens a channel with an address and options."""
    return partial(library.secure_channel, credentials=tls.credentials()) if tls else library.insecure_channel


def _authorise(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class Grpc:
    """Blocking transport over gRPC; threads may share it."""

    def __init__(self, url: str, api_key: str = "", tls: Tls | None = None) -> None:
        import grpc

        self._metadata = _authorise(api_key)
        self._channels = ChannelPool(url, _opener(grpc, tls))

    def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            channel.close()
        with self._channels.channel() as channel:
            reply = getattr(channel.stub, request.procedure)(request.message, timeout=seconds, metadata=self._metadata)
        return from_grpc(call, reply)

    def stream(self, call: Call) -> WatchedSource:
        return WatchedSource(lambda source: self._receive(call, source))

    def _receive(self, call: Call, source: WatchedSource) -> Generator[Answer, None, None]:
        for channel in self._channels.unused():
            channel.close()
        with self._channels.channel() as channel:
            replies = channel.stub.ModelStreamInfer(iter([to_grpc(call).message]), metadata=self._metadata)
            with source.watch(replies.cancel):
                for reply in replies:
                    try:
                        answer, is_last = from_grpc_stream(call, reply)
                    except CallError:
                        _read_rest(replies)
                        raise
                    if is_last:
                        for _ in replies:  # up to the status
                            pass
                    if answer is not None:
                        yield answer
                    if is_last:
                        return
        raise CallError(Kind.CONNECTION_LOST, CUT_SHORT)

    def close(self) -> None:
        for channel in self._channels.close():
            channel.close()


class AsyncGrpc:
    """Asynchronous transport over gRPC, bound to one event loop."""

    def __init__(self, url: str, api_key: str = "", tls: Tls | None = None) -> None:
        import grpc

        self._metadata = _authorise(api_key)
        self._channels = ChannelPool(url, _opener(grpc.aio, tls))

    async def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            await channel.close()
        with self._channels.channel() as channel:
            reply = await getattr(channel.stub, request.procedure)(
                request.message, timeout=seconds, metadata=self._metadata
            )
        return from_grpc(call, reply)

    def stream(self, call: Call) -> AsyncSource:
        return AsyncSource(self._receive(call))

    async def _receive(self, call: Call) -> AsyncGenerator[Answer, None]:
        for channel in self._channels.unused():
            await channel.close()
        with self._channels.channel() as channel:
            replies = channel.stub.ModelStreamInfer(iter([to_grpc(call).message]), metadata=self._metadata)
            try:
                async for reply in replies:
                    try:
                        answer, is_last = from_grpc_stream(call, reply)
                    except CallError:
                        await _read_rest_async(replies)
                        raise
                    if is_last:
                        async for _ in replies:  # up to the status
                            pass
                    if answer is not None:
                        yield answer
                    if is_last:
                        return
            finally:
                replies.cancel()
        raise CallError(Kind.CONNECTION_LOST, CUT_SHORT)

    async def close(self) -> None:
        for channel in self._channels.close():
            await channel.close()
