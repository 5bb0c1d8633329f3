"""Retry policy of one call: which failures, how often, and after which pauses."""

from __future__ import annotations

import random
import time

from shoal.client.calls import Call
from shoal.client.failures import CallError, Kind, Server
from shoal.client.settings import MAX_SECONDS, Settings

FIRST_PAUSE, MAX_PAUSE = 0.1, 5.0  # seconds before a repetition; each is twice the one before


class Attempts:
    """Attempts of one call: the time left, and the back-off before the next one."""

    def __init__(self, call: Call, settings: Settings) -> None:
        self.seconds = settings.timeout if call.timeout is None else call.timeout
        self._deadline = time.monotonic() + min(self.seconds, MAX_SECONDS)
        self._retries = settings.retries
        self._safe = {Kind.UNREACHABLE, Kind.BUSY} | ({Kind.CONNECTION_LOST} if settings.is_repeatable else set())
        self._pauses = 0
        self._settings = settings

    @property
    def server(self) -> Server:
        """Address, protocol and time-out, for error messages."""
        return Server(self._settings.url, self._settings.protocol, self.seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; never 0, which some libraries take for no limit."""
        return max(1e-3, self._deadline - time.monotonic())

    def pause(self, failure: CallError) -> float | None:
        """Return the seconds to wait before the next attempt, about as long as the server asks; None to give up.

        The pause has jitter, so that clients rejected together do not retry together.
        """
        if failure.kind not in self._safe or self._pauses >= self._retries:
            return None
        seconds = max(failure.after, min(MAX_PAUSE, FIRST_PAUSE * 2**self._pauses)) * random.uniform(0.5, 1)
        self._pauses += 1
        return seconds if seconds < self.left else None
