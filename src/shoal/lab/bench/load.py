"""Load generator: a closed loop, in which each caller waits for its answer before it sends the next request."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Send = Callable[[int], int]  # performs the i-th request; returns its number of rows


class _Request(NamedTuple):
    """Start and end of a request in clock seconds, and its number of rows."""

    start: float
    end: float
    rows: int


@dataclass(frozen=True)
class Load:
    """Result of a load: rows per second, and the latency of each counted request in seconds."""

    rows_per_second: float
    latencies: NDArray[np.float64]

    def percentile(self, q: float) -> float:
        """Return the latency in seconds at percentile ``q``."""
        return float(np.percentile(self.latencies, q))


class _Window:
    """Measurement window of a closed loop, which opens at one answer and closes at a later one.

    It opens after every caller has had an answer, since the first requests meet an empty server. If a request is only
    partly inside the window, the same part of its rows counts; otherwise a few long requests, or answers in bursts,
    would make the rate random. When the window closes, callers continue until all requests in flight at that time are
    answered, so that these requests see the same load.
    """

    def __init__(self, callers: int, seconds: float, warm_seconds: float) -> None:
        self._callers, self._seconds = callers, seconds
        self._warm_until = time.perf_counter() + warm_seconds
        self._lock, self._answered, self._owed = threading.Lock(), set[int](), set[int]()
        self._requests: list[_Request] = []
        self._opening = self._closing = math.inf
        self.opened, self.closed = threading.Event(), threading.Event()

    @property
    def is_open(self) -> bool:
        """Whether the window has opened; it may have closed since."""
        return self._opening < math.inf

    @property
    def is_closed(self) -> bool:
        """Whether the window has closed."""
        return self._closing < math.inf

    def answer(self, caller: int, start: float, rows: int) -> bool:
        """Record the answer to a request that this caller sent at ``start``; return whether all callers may stop."""
        with self._lock:
            now = time.perf_counter()
            if self.is_open:
                self._requests.append(_Request(start, now, rows))
            elif now >= self._warm_until and len(self._answered) == self._callers:
                self._opening = now
                self.opened.set()
            self._answered.add(caller)
            if start < self._closing:
                self._owed.discard(caller)
            is_enough = len(self._requests) >= 2 * self._callers and now - self._opening >= self._seconds
            if is_enough and not self.is_closed:
                self._closing = now
                self._owed = set(range(self._callers)) - {caller}
                self.closed.set()
            return self.is_closed and not self._owed

    def load(self) -> Load:
        """Return the rows per second and latencies within the window. Call it after the window has closed."""
        opening, closing = self._opening, self._closing
        rows = sum(
            r.rows * (min(r.end, closing) - max(r.start, opening)) / (r.end - r.start)
            for r in self._requests
            if r.start < closing
        )
        latencies = [r.end - r.start for r in self._requests if r.end <= closing]
        return Load(rows / (closing - opening), np.array(latencies))


def closed_loop(
    send: Send, *, callers: int, seconds: float, warm_seconds: float = 1.0, on_edge: Callable[[], None] = lambda: None
) -> Load:
    """Run ``callers`` threads that each send the next request when their last is answered; return what was counted.

    Counting begins at the first answer after ``warm_seconds`` have passed and every caller has had an answer. It ends
    at the first answer after ``seconds`` more, but not before twice as many requests as callers were answered. If a
    request is only partly inside this time, the same part of its rows counts. Latencies are those of the requests
    answered in this time. ``on_edge`` runs in the calling thread when counting begins and when it ends; the
    callers continue meanwhile, and then until the requests in flight are answered.

    Raises:
        Exception: whatever ``send`` raises ends the load.
    """
    numbers, stop = itertools.count(), threading.Event()
    window = _Window(callers, seconds, warm_seconds)

    def call(caller: int) -> None:
        try:
            while not stop.is_set():
                start = time.perf_counter()
                rows = send(next(numbers))
                if window.answer(caller, start, rows):
                    stop.set()
        finally:  # after an error, the other callers must stop, and this thread must not wait for the window
            stop.set()
            window.opened.set()
            window.closed.set()

    with ThreadPoolExecutor(callers, thread_name_prefix="shoal-load") as pool:
        try:
            done = [pool.submit(call, caller) for caller in range(callers)]
            window.opened.wait()
            if window.is_open:
                on_edge()
            window.closed.wait()
            if window.is_closed:
                on_edge()
            for future in done:
                future.result()
        finally:  # after KeyboardInterrupt too
            stop.set()
    return window.load()
