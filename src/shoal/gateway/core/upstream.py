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
UNREAD_SECONDS = 2.0  # that a stream's client may be late while others need its place
_READ_SECONDS, _READ_BYTES = 0.1, 2**18  # that it may take for each answer, and bytes per further second
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
    late: float = 0.0  # seconds by which the client is late in reading
    due: float = 0.0  # when the answer that is being written should be read, or 0; sooner by ``late``

    @contextmanager
    def write(self, num_bytes: int) -> Iterator[None]:
        """Measure how late the client is, while an answer is written that it lets the service wait for."""
        self.due = time.monotonic() + _READ_SECONDS + num_bytes / _READ_BYTES - self.late
        try:
            yield
        finally:
            self.late, self.due = max(0.0, time.monotonic() - self.due), 0.0

    @property
    def is_unread(self) -> bool:
        """Whether the client is reading so slowly that the stream may be ended if another one needs its place."""
        return bool(self.due) and time.monotonic() - self.due > UNREAD_SECONDS

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
