"""A server that answers, and what it has under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.server.launch import Server

QUIET_SECONDS = 5.0  # after which a stream that has had its answers keeps nobody waiting


@dataclass(eq=False)
class Stream:
    """Requests and answers of one client; how many answers a request has, only its model knows."""

    model: str
    address: str
    end: Callable[[], None]
    num_sent: int = 0
    num_received: int = 0
    moved: float = field(default_factory=time.monotonic)

    def note(self, *, is_answer: bool) -> None:
        """A request, or an answer, has passed."""
        self.num_received += is_answer
        self.num_sent += not is_answer
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
    """A server that is ready, and the requests that it has."""

    server: Server
    sent: dict[asyncio.Future[Any], str] = field(default_factory=dict)  # with the model that each asks for
    streams: set[Stream] = field(default_factory=set)
    num_lost: int = 0  # requests that it died with
    is_repeat: bool = False  # whether one of them had been under way when the server before it died

    async def wait_idle(self) -> None:
        """Until it has answered everything, and its streams have fallen silent."""
        while self.sent or not all(stream.is_quiet for stream in self.streams):
            await asyncio.sleep(0.1)

    def end_streams(self, models: Iterable[str] | None = None) -> None:
        """End those to ``models``, or all."""
        named = None if models is None else set(models)
        for stream in list(self.streams):
            if named is None or stream.model in named:
                stream.end()
