"""Admission of requests to a model, by its recent throughput or by the number of requests that it computes at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from shoal.serving.gateway.callers.callers import ANYONE, Caller

FEW = 16  # concurrent requests that are never refused: so few are not an overload
MANY = 1024  # concurrent requests; each holds its tensors in memory
PER_SLOT = 4  # streams in flight for each one that an engine runs at once
MOST_SECONDS = 30.0  # longest retry-after of a refused request
A_REQUEST = 256  # bytes of work that each request costs besides its size
_MEMORY = 10.0  # seconds of work over which the rate is averaged, recent ones weighing more
_ENOUGH = 0.5  # seconds of work before the rate is used


class Admission:
    """Counts a model's requests and work in flight, estimates its throughput, and decides whether to admit a request.

    Work is measured in bytes, which grow with the number of rows and the length of texts. ``slots`` is the number of
    requests that the model computes at once, or 0 if it is not known. With ``slots``, a request is refused if four
    times as many are in flight. Without ``slots``, it is refused if it would wait longer than ``max_wait`` seconds at
    the recent throughput, as its caller takes turns with the others. Even then, it is always admitted if fewer than 16
    requests are in flight, and never if 1024 are, of which its caller has its part.

    With ``slots``, one caller may use all places: another one that has less than the part ``share`` of them is admitted
    beyond them, until twice as many requests are in flight. In which order they are sent is a matter of ``FairQueue``.
    """

    def __init__(
        self, max_wait: float, *, slots: int = 0, share: float = 1.0, clock: Callable[[], float] | None = None
    ) -> None:
        self.num_requests = 0
        self._most, self._share = PER_SLOT * slots, max(1, int(PER_SLOT * slots * share))
        self._of: Counter[str] = Counter()  # requests in flight, by caller
        self._max_wait, self._clock = max_wait, clock or time.monotonic
        self._work = 0.0  # in flight
        self._done = self._spent = 0.0  # decayed sums: work done, and the seconds with any in flight
        self._last = self._clock()

    def refuse(self, num_bytes: int, caller: Caller = ANYONE) -> float | None:
        """Return ``None`` if a request of ``num_bytes`` is admitted now, else the seconds after which to retry it."""
        self._advance()
        if self._most:
            most = 2 * self._most if self._of[caller.id] < self._share else self._most
            return None if self.num_requests < most else self._next_end()
        if self.num_requests < FEW:
            return None
        # of the callers that ask now, each waits for its own requests, and for as many of each other one
        fair = len(self._of.keys() | {caller.id}) * (self._of[caller.id] + 1)
        if self.num_requests >= MANY and fair > MANY:
            return 1.0
        wait = self._wait(num_bytes) * min(1.0, fair / (self.num_requests + 1))
        return min(wait - self._max_wait, MOST_SECONDS) if wait > self._max_wait else None

    def enter(self, num_bytes: int, caller: Caller = ANYONE) -> None:
        """Count a request of ``num_bytes`` as in flight."""
        self._advance()
        self.num_requests += 1
        self._of[caller.id] += 1
        self._work += num_bytes + A_REQUEST

    def leave(self, num_bytes: int, caller: Caller = ANYONE, *, is_done: bool) -> None:
        """Record that a request ended. If it was lost or got an error (not ``is_done``), its work was not done."""
        self._advance()
        self.num_requests -= 1
        self._of[caller.id] -= 1
        if not self._of[caller.id]:
            del self._of[caller.id]
        self._work -= num_bytes + A_REQUEST
        if is_done:
            self._done += num_bytes + A_REQUEST

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for one of the model's ``slots``; False if these are not known."""
        return bool(self._most) and self.num_requests > self._most // PER_SLOT

    @property
    def is_full(self) -> bool:
        """Whether the model has at least ``slots`` requests in flight; False if its ``slots`` are not known."""
        return bool(self._most) and self.num_requests >= self._most // PER_SLOT

    def _next_end(self) -> float:
        """Estimate after how many seconds the next of the requests in flight ends."""
        return min(max(1.0, self._wait(0) / self.num_requests), MOST_SECONDS)

    def _wait(self, num_bytes: int) -> float:
        if self._spent < _ENOUGH:
            return 0.0
        return (self._work + num_bytes + A_REQUEST) * self._spent / max(self._done, 1.0)

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._last = now - self._last, now
        if self.num_requests and seconds > 0:
            weight = max(0.0, 1 - seconds / _MEMORY)
            self._done *= weight
            self._spent = self._spent * weight + seconds
