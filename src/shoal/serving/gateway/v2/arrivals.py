"""Messages of gRPC that arrive: how many at a time, and for how long each may take."""

from __future__ import annotations

import asyncio
import time

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Quota
from shoal.serving.gateway.refusals import RefusalReason, RefusedError

PAUSE = 0.02  # seconds between two looks at a pool, or at a message
_LOOKS = 5  # after which a message is late; several, because one pause can pass while the event loop is busy
_PATIENCE = 5.0  # seconds after which a late message loses its place to another


class LatePlaces:
    """Places for messages that do not arrive at once; one caller gets at most the part ``share``."""

    def __init__(self, most: int, share: float) -> None:
        self._most, self._share = most, max(1, int(most * share))
        self._of: dict[Arrival, float] = {}  # oldest first: when each took its place

    def take(self, arrival: Arrival) -> None:
        """Take a place. If none is free, the oldest message loses its place if it has had its time.

        Raises:
            RefusedError: no place is free.
        """
        rivals = [each for each in self._of if each.caller.id == arrival.caller.id]
        if len(rivals) < self._share:
            rivals = list(self._of) if len(self._of) >= self._most else []
        if rivals:
            if time.monotonic() - self._of[rivals[0]] < _PATIENCE:
                raise RefusedError(
                    RefusalReason.BUSY, "Too many requests for this server: too many are still arriving.", 1.0
                )
            rivals[0].stop()
            del self._of[rivals[0]]
        self._of[arrival] = time.monotonic()

    def give_back(self, arrival: Arrival) -> None:
        """Give back the place of a message, if it has one."""
        self._of.pop(arrival, None)


class Arrival:
    """Message that is being read: for a few looks, in one of the places ``early``, and after them in one of ``late``.

    It is read within the context ``timer``, which stops the reading when the message has had its ``seconds`` or loses
    its place; ``refusal`` says so.
    """

    def __init__(self, early: Quota, late: LatePlaces, caller: Caller, seconds: float) -> None:
        self.caller, self.timer = caller, asyncio.timeout(None)
        self._early, self._late, self._seconds = early, late, seconds
        self._loop, self._start, self._looks = asyncio.get_running_loop(), time.monotonic(), _LOOKS
        self._full: RefusedError | None = None
        early.take(caller)
        self._next = self._loop.call_later(PAUSE, self._look)

    @property
    def refusal(self) -> RefusedError:
        """The refusal of a message that was not read to its end."""
        seconds = time.monotonic() - self._start
        return self._full or RefusedError(RefusalReason.SLOW, f"No whole message came within {seconds:.0f} s.")

    def _look(self) -> None:
        self._looks -= 1
        if self._looks:
            self._next = self._loop.call_later(PAUSE, self._look)
            return
        self._early.give_back(self.caller)
        try:
            self._late.take(self)
        except RefusedError as refused:
            self._full = refused
            self.stop()
        else:
            self.timer.reschedule(self._loop.time() + self._seconds)

    def stop(self) -> None:
        """Stop the reading now, if its time is not over already."""
        if not self.timer.expired():
            self.timer.reschedule(self._loop.time())

    def end(self) -> None:
        """Give back the message's place. Called when the reading has ended."""
        self._next.cancel()
        if self._looks:
            self._early.give_back(self.caller)
        self._late.give_back(self)
