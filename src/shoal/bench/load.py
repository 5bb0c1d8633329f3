"""Load on anything that answers: callers that wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import itertools
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


def closed_loop(send: Send, *, callers: int, seconds: float, warm_seconds: float = 1.0) -> Load:
    """``callers`` threads that each send the next request when their last is answered, for ``seconds``.

    What happens in the ``warm_seconds`` before is not counted. A request that lies partly in the counted time counts
    with that part of its rows: whole ones alone would leave a rate of few long requests to chance. Latencies are those
    of the requests that were answered in the counted time, or, if there are none, of all that lie partly in it.

    Raises:
        InputError: there is no caller or no time.
        Exception: whatever ``send`` raises ends the load.
    """
    _check(callers=callers, seconds=seconds)
    numbers, stop = itertools.count(), threading.Event()
    begin = time.perf_counter() + warm_seconds
    end = begin + seconds

    def call() -> list[_Request]:
        done = []
        while not stop.is_set() and (start := time.perf_counter()) < end:
            rows = send(next(numbers))
            done.append(_Request(start, time.perf_counter(), rows))
        return done

    return _count(_run(call, callers, stop), begin, end)


def _count(requests: list[_Request], begin: float, end: float) -> Load:
    overlapping = [r for r in requests if r.end > begin and r.start < end]
    rows = sum(r.rows * (min(r.end, end) - max(r.start, begin)) / (r.end - r.start) for r in overlapping)
    answered = [r for r in overlapping if r.end <= end] or overlapping
    return Load(rows / (end - begin), np.array([r.end - r.start for r in answered]))


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

    def call() -> list[_Request]:
        done = []
        while not stop.is_set() and (number := next(numbers)) < len(arrivals):
            arrival = begin + arrivals[number]
            time.sleep(max(arrival - time.perf_counter(), 0))
            rows = send(number)
            done.append(_Request(arrival, time.perf_counter(), rows))
        return done

    requests = _run(call, most_callers, stop)
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


def _run(call: Callable[[], list[_Request]], callers: int, stop: threading.Event) -> list[_Request]:
    """What all callers did; the first one's error stops the others."""
    with ThreadPoolExecutor(callers, thread_name_prefix="shoal-load") as pool:

        def guarded() -> list[_Request]:
            try:
                return call()
            except BaseException:
                stop.set()
                raise

        try:
            done = [pool.submit(guarded) for _ in range(callers)]
            return [request for future in done for request in future.result()]
        except BaseException:  # an interruption, too
            stop.set()
            raise


def _check(**given: float) -> None:
    for name, value in given.items():
        if not value > 0:
            raise InputError(f"A load with {name.replace('_', ' ')} {value:g} is none.", "Give more than 0.")
