"""Load on anything that answers: callers that wait for their answers, or arrivals that wait for nobody."""

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

from shoal.errors import InputError

Send = Callable[[int], int]  # performs the i-th request; how many rows it had


class _Request(NamedTuple):
    """Seconds on the clock, and rows."""

    start: float
    end: float
    rows: int


@dataclass(frozen=True)
class Load:
    """What a load came to: rows a second, and the seconds of each counted request."""

    rows_per_second: float
    latencies: NDArray[np.float64]

    def percentile(self, q: float) -> float:
        """Seconds within which ``q`` percent of the requests were answered."""
        return float(np.percentile(self.latencies, q))


class _Window:
    """The counted time of a closed loop, from one answer to another.

    It opens after every caller has had an answer: the first requests meet an empty server. A request that lies partly
    in it counts with that part of its rows, or few long requests, or answers that come in bursts, would leave the rate
    to chance. Callers go on until all that were under way at its end are answered: these take as long as others.
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
        """Whether it has opened; it may have closed since."""
        return self._opening < math.inf

    @property
    def is_closed(self) -> bool:
        """Whether it has closed."""
        return self._closing < math.inf

    def answer(self, caller: int, start: float, rows: int) -> bool:
        """Note that a request that this caller sent at ``start`` is answered; whether the caller may stop."""
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
        """What was counted, once it is closed."""
        opening, closing = self._opening, self._closing
        rows = sum(
            r.rows * (min(r.end, closing) - max(r.start, opening)) / (r.end - r.start)
            for r in self._requests
            if r.start < closing
        )
        latencies = [r.end - r.start for r in self._requests if r.end <= closing]
        return Load(rows / (closing - opening), np.array(latencies))


def closed_loop(
    send: Send,
    *,
    callers: int,
    seconds: float,
    warm_seconds: float = 1.0,
    on_open: Callable[[], None] = lambda: None,
    on_close: Callable[[], None] = lambda: None,
) -> Load:
    """``callers`` threads that each send the next request when their last is answered.

    Counting begins at the first answer after ``warm_seconds`` have passed and every caller has had an answer. It ends
    at the first answer after ``seconds`` more with which at least two a caller were answered, so requests that are
    longer make it longer. One that lies partly in that time counts with that part of its rows; latencies are those of
    the requests answered in it. ``on_open`` and ``on_close`` are called in this thread when counting begins and ends;
    callers go on meanwhile, and after it until what was under way is answered.

    Raises:
        InputError: there is no caller or no time.
        Exception: whatever ``send`` raises ends the load.
    """
    _check(callers=callers, seconds=seconds)
    numbers, stop = itertools.count(), threading.Event()
    window = _Window(callers, seconds, warm_seconds)

    def call(caller: int) -> None:
        try:
            while not stop.is_set():
                start = time.perf_counter()
                rows = send(next(numbers))
                if window.answer(caller, start, rows):
                    stop.set()
        finally:  # after an error nobody waits for these in vain
            window.opened.set()
            window.closed.set()

    def watch() -> None:
        window.opened.wait()
        if window.is_open:
            on_open()
        window.closed.wait()
        if window.is_closed:
            on_close()

    _run(call, callers, stop, watch)
    return window.load()


def open_loop(send: Send, *, rate: float, seconds: float, seed: int | None, most_callers: int) -> Load:
    """Requests that arrive at random, ``rate`` a second (a Poisson process), whether or not the last is answered.

    Without a ``seed`` they arrive evenly spaced, as perf_analyzer's do by default. A latency is measured from the
    scheduled arrival: a request that waits for one of ``most_callers`` callers waits as its user would. The same
    ``seed`` gives the same arrivals. All that arrive within ``seconds`` count.

    Raises:
        InputError: there is no caller, no time, or no rate.
        Exception: whatever ``send`` raises ends the load.
    """
    _check(most_callers=most_callers, seconds=seconds, rate=rate)
    arrivals = _arrivals(rate, seconds, seed)
    numbers, stop = itertools.count(), threading.Event()
    begin = time.perf_counter()

    requests: list[_Request] = []

    def call(_: int) -> None:
        while not stop.is_set() and (number := next(numbers)) < len(arrivals):
            arrival = begin + arrivals[number]
            time.sleep(max(arrival - time.perf_counter(), 0))
            rows = send(number)
            requests.append(_Request(arrival, time.perf_counter(), rows))

    _run(call, most_callers, stop)
    spent = max(seconds, *(r.end - begin for r in requests))  # under overload the last answers come late
    return Load(sum(r.rows for r in requests) / spent, np.array([r.end - r.start for r in requests]))


def _arrivals(rate: float, seconds: float, seed: int | None) -> list[float]:
    """Seconds from the beginning; at least one arrival."""
    if seed is None:
        return [number / rate for number in range(max(1, int(rate * seconds)))]
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1 / rate, int(rate * seconds + 10 * (rate * seconds) ** 0.5) + 10)
    times = np.cumsum(gaps)
    return [float(t) for t in times[times < seconds]] or [0.0]


def _run(
    call: Callable[[int], None], callers: int, stop: threading.Event, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Have so many callers, each told its number, until all are done; the first one's error stops the others."""
    with ThreadPoolExecutor(callers, thread_name_prefix="shoal-load") as pool:

        def guarded(caller: int) -> None:
            try:
                call(caller)
            except BaseException:
                stop.set()
                raise

        try:
            done = [pool.submit(guarded, caller) for caller in range(callers)]
            meanwhile()
            for future in done:
                future.result()
        except BaseException:  # an interruption, too
            stop.set()
            raise


def _check(**given: float) -> None:
    for name, value in given.items():
        if not value > 0:
            raise InputError(f"A load with {name.replace('_', ' ')} {value:g} is none.", "Give more than 0.")
