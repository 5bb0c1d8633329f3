"""A ready server, with its requests and streams in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.server.launch import Server

QUIET_SECONDS = 5.0  # after which an answered stream no longer counts as in flight


@dataclass(eq=False)
class Stream:
    """Message counts of one client's stream."""

    model: str
    address: str
    end: Callable[[], None]
    num_sent: int = 0
    num_received: int = 0
    moved: float = field(default_factory=time.monotonic)

    def note_request(self) -> None:
        """Count a request."""
        self.num_sent += 1
        self.moved = time.monotonic()

    def note_answer(self, *, is_last: bool) -> None:
        """Note an answer; the last one to a request counts."""
        self.num_received += is_last
        self.moved = time.monotonic()

    @property
    def is_quiet(self) -> bool:
        """Whether it has had an answer for each request, and none lately."""
        return self.is_answered and time.monotonic() - self.moved > QUIET_SECONDS

    @property
    def is_answered(self) -> bool:
        """Whether it has had an answer for each request."""
        return self.num_received >= self.num_sent


@dataclass(eq=False)
class Upstream:
    """A ready server, with its requests and streams in flight."""

    server: Server
    sent: dict[asyncio.Future[Any], str] = field(default_factory=dict)  # with the model of each
    streams: set[Stream] = field(default_factory=set)
    num_lost: int = 0  # requests lost when it died
    is_repeat: bool = False  # whether one of them had already been lost by the previous server

    async def wait_idle(self) -> None:
        """Wait until everything is answered and all streams are quiet."""
        while self.sent or not all(stream.is_quiet for stream in self.streams):
            await asyncio.sleep(0.1)

    def end_streams(self, models: Iterable[str] | None = None) -> None:
        """End the streams to ``models``, or all."""
        named = None if models is None else set(models)
        for stream in list(self.streams):
            if named is None or stream.model in named:
                stream.end()
