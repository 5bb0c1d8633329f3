"""Transports over gRPC and HTTP, blocking and asynchronous: send one call, return its result."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from shoal.client.calls import Answer, Call
from shoal.client.failures import CallError, Kind, connection_failure, grpc_failure, http_failure
from shoal.client.generate import Events, from_generate
from shoal.client.sources import AsyncSource, LoopSource, Source, WatchedSource
from shoal.client.wire import (
    HEADER_LENGTH,
    HttpReply,
    HttpRequest,
    from_grpc,
    from_grpc_stream,
    from_http,
    to_grpc,
    to_http,
)

T = TypeVar("T")

CUT_SHORT = "the stream ended before its last answer"
# Triton 24.10 keeps a stream for ever that is cancelled between its last message and its status: the server then takes
# all of its exit time-out to stop. It may also end with a failed assertion. So the status is read before the last
# answer is handed on, or an error is raised.
_REST_SECONDS = 1.0  # for the status, after an error


class Transport(Protocol):
    """Sends one call and returns its result."""

    def send(self, call: Call, seconds: float) -> Any:
        """Return the result within ``seconds``, or raise ``CallError``."""

    def stream(self, call: Call) -> Source:
        """Return the answers of a streamed call, which is sent when the first is read."""

    def close(self) -> None:
        """Close every connection."""


class AsyncTransport(Protocol):
    """Sends one call and returns its result."""

    async def send(self, call: Call, seconds: float) -> Any:
        """Return the result within ``seconds``, or raise ``CallError``."""

    def stream(self, call: Call) -> AsyncSource:
        """Return the answers of a streamed call, which is sent when the first is read."""

    async def close(self) -> None:
        """Close every connection."""


# --- gRPC --------------------------------------------------------------------------------------------------------
# One gRPC channel at a time, replaced as soon as its connection breaks: gRPC reconnects by itself, but not at once. A
# request sent immediately after a break still goes into the dead connection, and fails as if it had run.


def channel_options(url: str) -> list[tuple[str, int]]:
    """Return channel options: unlimited message sizes, no proxy on loopback, short reconnect back-off."""
    is_here = url.startswith(("127.", "localhost", "[::1]"))
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # or the back-off of another client would delay this one
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

    The owner closes channels, since an asynchronous one has to be awaited.
    """

    def __init__(self, url: str, open_channel: Callable[..., Any]) -> None:
        self._url, self._open_channel = url, open_channel
        self._lock = threading.Lock()
        self._current = self._open()
        self._replaced: set[Channel] = set()
        self._is_closed = False

    def _open(self) -> Channel:
        return Channel(self._open_channel(self._url, channel_options(self._url)))

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        """Yield the channel for one request.

        Raises:
            CallError: translated from gRPC's error; after a broken connection the next request gets a new channel.
        """
        import grpc  # type: ignore[import-untyped]

        with self._lock:
            channel = self._current
            channel.users += 1
        is_broken = False
        try:
            yield channel
        except grpc.RpcError as error:
            failure = grpc_failure(error.code().name, error.details() or "")
            is_broken = failure.kind is Kind.CONNECTION_LOST
            raise failure from None
        finally:
            with self._lock:
                channel.users -= 1
                if is_broken and channel is self._current and not self._is_closed:
                    self._replaced.add(channel)
                    self._current = self._open()

    def unused(self) -> list[Any]:
        """Return replaced gRPC channels without requests, each exactly once, for the owner to close."""
        if not self._replaced:
            return []
        with self._lock:
            unused = {channel for channel in self._replaced if not channel.users}
            self._replaced -= unused
            return [channel.raw for channel in unused]

    def close(self) -> list[Any]:
        """Stop opening channels and return all that remain, for the owner to close."""
        with self._lock:
            self._is_closed = True
            return [channel.raw for channel in (self._current, *self._replaced)]


def _read_rest(replies: Any) -> None:
    """Read what a stream has after an error, to its status; for a short time, since a model could go on."""
    import grpc

    late = threading.Timer(_REST_SECONDS, replies.cancel)
    late.daemon = True
    late.start()
    with suppress(grpc.RpcError):
        for _ in replies:
            pass
    late.cancel()


async def _read_rest_async(replies: Any) -> None:
    """The same in an event loop."""
    import grpc

    with suppress(grpc.RpcError, TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            async for _ in replies:
                pass


class Grpc:
    """One channel, which threads may share."""

    def __init__(self, url: str) -> None:
        import grpc

        self._channels = ChannelPool(url, grpc.insecure_channel)

    def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            channel.close()
        with self._channels.channel() as channel:
            reply = getattr(channel.stub, request.procedure)(request.message, timeout=seconds)
        return from_grpc(call, reply)

    def stream(self, call: Call) -> Source:
        return WatchedSource(lambda source: self._receive(call, source))

    def _receive(self, call: Call, source: WatchedSource) -> Generator[Answer, None, None]:
        for channel in self._channels.unused():
            channel.close()
        with self._channels.channel() as channel:
            replies = channel.stub.ModelStreamInfer(iter([to_grpc(call).message]))
            with source.watch(replies.cancel):
                for reply in replies:
                    try:
                        answer, is_last = from_grpc_stream(call, reply)
                    except CallError:
                        _read_rest(replies)
                        raise
                    if is_last:
                        for _ in replies:  # to its status
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
    """One channel, bound to one event loop."""

    def __init__(self, url: str) -> None:
        import grpc

        self._channels = ChannelPool(url, grpc.aio.insecure_channel)

    async def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            await channel.close()
        with self._channels.channel() as channel:
            reply = await getattr(channel.stub, request.procedure)(request.message, timeout=seconds)
        return from_grpc(call, reply)

    def stream(self, call: Call) -> AsyncSource:
        return AsyncSource(self._receive(call))

    async def _receive(self, call: Call) -> AsyncGenerator[Answer, None]:
        for channel in self._channels.unused():
            await channel.close()
        with self._channels.channel() as channel:
            replies = channel.stub.ModelStreamInfer(iter([to_grpc(call).message]))
            try:
                async for reply in replies:
                    try:
                        answer, is_last = from_grpc_stream(call, reply)
                    except CallError:
                        await _read_rest_async(replies)
                        raise
                    if is_last:
                        async for _ in replies:  # to its status
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


# --- HTTP --------------------------------------------------------------------------------------------------------


class AsyncHttp:
    """HTTP over aiohttp: a pool of keep-alive connections, bound to one event loop.

    aiohttp uses no proxy unless configured to, and repeats no POST. Unlike the blocking libraries it limits the time of
    a whole request, not only of each read.
    """

    def __init__(self, url: str) -> None:
        import aiohttp

        self._url = f"http://{url}"
        self._aiohttp = aiohttp
        headers = {"Accept-Encoding": "identity"}  # compression by Triton costs more than it saves
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)

    async def send(self, call: Call, seconds: float) -> Any:
        return from_http(call, await self.exchange(to_http(call), seconds))

    async def exchange(self, request: HttpRequest, seconds: float) -> HttpReply:
        """Return the server's reply within ``seconds``, or raise ``CallError``."""
        with self._failures():
            async with self._request(request, seconds) as answer:
                return HttpReply(answer.status, answer.headers.get(HEADER_LENGTH), await answer.read())

    def stream(self, call: Call) -> AsyncSource:
        return AsyncSource(self._receive(call))

    async def _receive(self, call: Call) -> AsyncGenerator[Answer, None]:
        events = Events()
        with self._failures():
            async with self._request(to_http(call), None) as answer:
                if answer.content_type != "text/event-stream":  # an error may have any status, and be an event
                    raise http_failure(answer.status, await answer.read())
                async for chunk in answer.content.iter_any():
                    for data in events.feed(chunk):
                        yield from_generate(call, data)

    def _request(self, request: HttpRequest, seconds: float | None) -> Any:
        from yarl import URL

        verb, path, headers, body = request
        options: dict[str, Any] = {"timeout": self._aiohttp.ClientTimeout(total=seconds), "allow_redirects": False}
        url = URL(self._url + path, encoded=True)
        return self._session.request(verb, url, data=body or None, headers=headers, **options)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Translate aiohttp's errors to ``CallError``."""
        try:
            yield
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while waiting") from None
        except self._aiohttp.ClientConnectorError as error:
            raise connection_failure(error.os_error) from None
        except (self._aiohttp.ClientConnectionError, self._aiohttp.ClientPayloadError):
            raise CallError(Kind.CONNECTION_LOST, "connection closed") from None
        except self._aiohttp.ClientError as error:
            raise CallError(Kind.NOT_TRITON, f"unreadable answer: {str(error)[:40]!r}") from None

    async def close(self) -> None:
        await self._session.close()


class Http:
    """The same for threads: an event loop in a thread of its own carries their requests."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=[self._loop], name="shoal-http", daemon=True)
        self._thread.start()
        self._transport = self._wait(_open(url))
        # Also ends a client that is dropped without close(). It does not wait: it may run in any thread.
        self._end = weakref.finalize(self, asyncio.run_coroutine_threadsafe, _end(self._transport), self._loop)

    def send(self, call: Call, seconds: float) -> Any:
        return from_http(call, self._wait(self._transport.exchange(to_http(call), seconds)))

    def stream(self, call: Call) -> Source:
        return LoopSource(self._transport.stream(call), self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also an interrupt
            future.cancel()
            raise

    def close(self) -> None:
        self._end()
        self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _open(url: str) -> AsyncHttp:
    return AsyncHttp(url)  # within the loop, which aiohttp's session belongs to


async def _end(transport: AsyncHttp) -> None:
    await transport.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)  # cancelled streams end first
    asyncio.get_running_loop().stop()
