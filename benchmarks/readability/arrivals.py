"""Open loop: requests at random times, whether or not the last is answered."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shoal.bench.load import Load


def open_loop(send: Callable[[int], int], *, rate: float, seconds: float, seed: int, most_callers: int) -> Load:
    """Send requests at random times, ``rate`` per second (a Poisson process).

    Latency is measured from the scheduled arrival, so it includes the wait for one of the ``most_callers`` callers. The
    same ``seed`` gives the same arrivals. All that arrive within ``seconds`` count. Whatever ``send`` raises ends the
    load.
    """
    arrivals = draw_arrivals(rate, seconds, seed)
    numbers, stop = itertools.count(), threading.Event()
    requests: list[tuple[float, float, int]] = []  # scheduled, answered, rows
    begin = time.perf_counter()

    def call() -> None:
        try:
            while not stop.is_set() and (number := next(numbers)) < len(arrivals):
                arrival = begin + arrivals[number]
                time.sleep(max(arrival - time.perf_counter(), 0))
                rows = send(number)
                requests.append((arrival, time.perf_counter(), rows))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(most_callers) as pool:
        try:
            for future in [pool.submit(call) for _ in range(most_callers)]:
                future.result()
        finally:  # after KeyboardInterrupt too
            stop.set()
    spent = max(seconds, *(end - begin for _, end, _ in requests))  # under overload the last answers come late
    return Load(sum(rows for _, _, rows in requests) / spent, np.array([end - start for start, end, _ in requests]))


def draw_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw arrival times in seconds from the beginning; at least one."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1 / rate, int(rate * seconds + 10 * (rate * seconds) ** 0.5) + 10)
    times = np.cumsum(gaps)
    return [float(t) for t in times[times < seconds]] or [0.0]
