"""Transports over gRPC and HTTP, blocking and asynchronous: send one call, return its result."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from shoal.client.calls import Call
from shoal.client.channels import ChannelPool
from shoal.client.failures import CallError, Kind, connection_failure
from shoal.client.wire import HEADER_LENGTH, HttpReply, HttpRequest, from_grpc, from_http, to_grpc, to_http

T = TypeVar("T")


class Transport(Protocol):
    """Sends one call and returns its result."""

    def send(self, call: Call, seconds: float) -> Any:
        """Return the result within ``seconds``, or raise ``CallError``."""

    def close(self) -> None:
        """Close every connection."""


class AsyncTransport(Protocol):
    """Sends one call and returns its result."""

    async def send(self, call: Call, seconds: float) -> Any:
        """Return the result within ``seconds``, or raise ``CallError``."""

    async def close(self) -> None:
        """Close every connection."""


# --- gRPC --------------------------------------------------------------------------------------------------------


class Grpc:
    """One channel, which threads may share."""

    def __init__(self, url: str) -> None:
        import grpc  # type: ignore[import-untyped]

        self._channels = ChannelPool(url, grpc.insecure_channel)

    def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            channel.close()
        with self._channels.channel() as channel:
            reply = getattr(channel.stub, request.procedure)(request.message, timeout=seconds)
        return from_grpc(call, reply)

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
        from yarl import URL

        verb, path, headers, body = request
        options: dict[str, Any] = {"timeout": self._aiohttp.ClientTimeout(total=seconds), "allow_redirects": False}
        try:
            url = URL(self._url + path, encoded=True)
            async with self._session.request(verb, url, data=body or None, headers=headers, **options) as answer:
                return HttpReply(answer.status, answer.headers.get(HEADER_LENGTH), await answer.read())
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
    asyncio.get_running_loop().stop()
