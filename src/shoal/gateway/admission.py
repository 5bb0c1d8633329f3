"""Admission control for one model: a request that could not be answered in time is refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable

FEW = 16  # concurrent requests that are never refused: so few are not an overload
MANY = 1024  # concurrent requests; each holds its tensors in memory
PER_SLOT = 4  # streams under way for each that an engine runs at once
MOST_SECONDS = 30.0  # longest retry-after of a refused request
A_REQUEST = 256  # bytes, the fixed cost of a request
_MEMORY = 10.0  # seconds of work over which the rate is averaged, recent ones weighing more
_ENOUGH = 0.5  # seconds of work before the rate is used


class Admission:
    """Counts a model's requests and work in flight, and estimates its throughput.

    Work is measured in bytes, which grow with rows and with the length of texts. A request is refused if, at the recent
    throughput, it would wait longer than ``max_wait`` seconds; or, with ``slots``, if four times as many are under way.
    """

    def __init__(self, max_wait: float, *, slots: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self._most = PER_SLOT * slots
        self._max_wait, self._clock = max_wait, clock
        self._work = 0.0  # in flight
        self._done = self._spent = 0.0  # decayed sums: work done, and the seconds with any in flight
        self._last = clock()

    def refuse(self, num_bytes: int) -> float | None:
        """Return the seconds after which to retry a request of this size; ``None`` if it is admitted now."""
        self._advance()
        if self._most:
            return None if self.num_requests < self._most else self._next_end()
        if self.num_requests < FEW:
            return None
        if self.num_requests >= MANY:
            return 1.0
        wait = self._wait(num_bytes)
        return min(wait - self._max_wait, MOST_SECONDS) if wait > self._max_wait else None

    def enter(self, num_bytes: int) -> None:
        """Record that a request was sent."""
        self._advance()
        self.num_requests += 1
        self._work += num_bytes + A_REQUEST

    def leave(self, num_bytes: int, *, is_done: bool) -> None:
        """Record that a request ended; work that the server refused or lost does not count as done."""
        self._advance()
        self.num_requests -= 1
        self._work -= num_bytes + A_REQUEST
        if is_done:
            self._done += num_bytes + A_REQUEST

    @property
    def is_full(self) -> bool:
        """Whether all slots of the engine are taken."""
        return bool(self._most) and self.num_requests >= self._most // PER_SLOT

    def _next_end(self) -> float:
        """Estimate the seconds until one of the requests under way has ended."""
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
