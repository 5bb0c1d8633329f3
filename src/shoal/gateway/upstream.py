"""A Triton server that is ready, with the clients' requests and streams in flight to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc  # type: ignore[import-untyped]

from shoal.client.grpc_transport import AsyncGrpc, channel_options
from shoal.server.launch import Server

QUIET_SECONDS = 5.0  # after which an answered stream no longer counts as in flight
UNREAD_SECONDS = 5.0  # that a stream's client may let the service wait while others need its place
_READ_SECONDS = 0.1  # that each answer to a stream may take without counting as such a wait
_ADDED_HEADERS = "Accept", "Accept-Encoding", "Content-Type", "User-Agent"  # which aiohttp would add


@dataclass(eq=False)
class Stream:
    """One client's stream: how many requests were sent and answered, and when the last message passed.

    ``end`` is called to stop the stream: if its server or one of its ``models`` fails, if its server is replaced or the
    service stops, or if no request is in flight and another stream needs its place. ``leave`` is called to treat the
    client as disconnected, because it reads too slowly and another stream needs its place.
    """

    models: set[str]
    address: str
    end: Callable[[], Any] = lambda: None
    leave: Callable[[], Any] = lambda: None
    num_sent: int = 0
    num_received: int = 0
    moved: float = field(default_factory=time.monotonic)
    lag: float = 0.0  # seconds that writing the answers took, less those that each may take
    writing: float = 0.0  # since when an answer is being written; 0 if none is

    @contextmanager
    def write(self) -> Iterator[None]:
        """Measure how long the client lets the service wait while an answer is written."""
        self.writing = time.monotonic()
        try:
            yield
        finally:
            self.lag = max(0.0, self._lag_now - _READ_SECONDS)
            self.writing = 0.0

    @property
    def is_unread(self) -> bool:
        """Whether the client reads so slowly that the stream may be ended if another one needs its place."""
        return self._lag_now > UNREAD_SECONDS

    @property
    def _lag_now(self) -> float:
        return self.lag + (time.monotonic() - self.writing if self.writing else 0.0)

    def note_request(self) -> None:
        """Count a request that was sent on the stream."""
        self.num_sent += 1
        self.moved = time.monotonic()

    def note_answer(self, *, is_last: bool) -> None:
        """Note the time of an answer. Only the last answer to a request is counted."""
        self.num_received += is_last
        self.moved = time.monotonic()

    @property
    def is_quiet(self) -> bool:
        """Whether each request of the stream has its last answer, and no message was sent or received for 5 s."""
        return self.is_answered and time.monotonic() - self.moved > QUIET_SECONDS

    @property
    def is_answered(self) -> bool:
        """Whether each request of the stream has its last answer."""
        return self.num_received >= self.num_sent


class Upstream:
    """A Triton server that is ready, the connections to it, and its requests and streams in flight."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.channel = grpc.aio.insecure_channel(server.grpc_url, options=channel_options(server.grpc_url))
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            skip_auto_headers=_ADDED_HEADERS,
        )
        self.client = AsyncGrpc(server.grpc_url)  # for canary requests
        self.sent: dict[asyncio.Future[Any], str] = {}  # with the model of each
        self.streams: set[Stream] = set()
        self.num_lost = 0  # requests lost when it died
        self.is_repeat = False  # whether one of them had already been lost by the previous server

    async def close(self) -> None:
        """Close the connections to the server. Triton would wait for them when it stops."""
        await asyncio.gather(self.session.close(), self.channel.close(), self.client.close())

    async def wait_idle(self) -> None:
        """Wait until all requests are answered, and all streams are answered and had no message for 5 s."""
        while self.sent or not all(stream.is_quiet for stream in self.streams):
            await asyncio.sleep(0.1)

    def end_streams(self, models: Iterable[str] | None = None) -> None:
        """End the streams to ``models``; if ``models`` is None, end all streams."""
        named = None if models is None else set(models)
        for stream in list(self.streams):
            if named is None or stream.models & named:
                stream.end()

    def end_unread(self, is_wanted: Callable[[Stream], bool]) -> bool:
        """End those of the streams ``is_wanted`` whose clients read too slowly; return whether there were any."""
        unread = [stream for stream in self.streams if stream.is_unread and is_wanted(stream)]
        for stream in unread:
            stream.leave()
        return bool(unread)
