"""How much may wait for one model: what could not be answered in time is better refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable

FEW = 16  # requests at a time that are never refused: so many callers are no overload
MANY = 1024  # requests at a time; each holds its tensors in memory
MOST_SECONDS = 30.0  # after which a refused request may come again: by then all may be different
A_REQUEST = 256  # bytes: what a request costs, however little is in it
_MEMORY = 10.0  # seconds of work that the rate is the mean of, later ones weighing more
_ENOUGH = 0.5  # seconds of work, before which a rate says nothing


class Admission:
    """Counts what is under way to a model, in requests and in work, and learns how fast that is done.

    Work is measured in bytes, which grow with rows and with the length of texts. A request is refused that would wait
    longer than ``max_wait`` seconds, by what the work before it took lately.
    """

    def __init__(self, max_wait: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self._max_wait, self._clock = max_wait, clock
        self._work = 0.0  # under way
        self._done = self._spent = 0.0  # work, and the seconds in which there was any
        self._last = clock()

    def refuse(self, num_bytes: int) -> float | None:
        """The seconds after which a request of this size may come again; ``None`` if it may come now."""
        self._advance()
        if self.num_requests < FEW:
            return None
        if self.num_requests >= MANY:
            return 1.0
        wait = self._wait(num_bytes)
        return min(wait - self._max_wait, MOST_SECONDS) if wait > self._max_wait else None

    def enter(self, num_bytes: int) -> None:
        """A request is on its way."""
        self._advance()
        self.num_requests += 1
        self._work += num_bytes + A_REQUEST

    def leave(self, num_bytes: int, *, is_done: bool) -> None:
        """It is over; what the server refused to do, or lost, is no work done."""
        self._advance()
        self.num_requests -= 1
        self._work -= num_bytes + A_REQUEST
        if is_done:
            self._done += num_bytes + A_REQUEST

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
