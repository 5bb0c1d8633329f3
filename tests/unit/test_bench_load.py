"""Closed load on something that only sleeps: a sleep does not depend on the processor."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

import numpy as np
import pytest

from shoal.lab.bench.load import Load, closed_loop


def sleep(_: int) -> int:
    time.sleep(0.02)
    return 3


def test_callers_share_the_requests_and_their_rows_are_counted() -> None:
    numbers, threads = list[int](), set[str]()

    def send(number: int) -> int:
        numbers.append(number)
        threads.add(threading.current_thread().name)
        return sleep(number)

    load = closed_loop(send, callers=4, seconds=0.5, warm_seconds=0.1)
    assert sorted(numbers) == list(range(len(numbers)))
    assert len(threads) == 4
    assert load.percentile(1) >= 0.02
    assert 0.3 * 4 * 3 / 0.02 < load.rows_per_second <= 4 * 3 / 0.02  # never more than sleeping allows


class OneServer:
    """Answers one request at a time, first come, first served, each after ``SERVICE`` seconds."""

    SERVICE = 0.1

    def __init__(self) -> None:
        self._lock, self._free_at = threading.Lock(), 0.0

    def send(self, _: int) -> int:
        with self._lock:
            ready = self._free_at = max(self._free_at, time.perf_counter()) + self.SERVICE
        time.sleep(ready - time.perf_counter())
        return 8


@pytest.mark.parametrize("callers", [1, 2, 5])
def test_long_requests_that_wait_for_each_other(callers: int) -> None:
    """Longer than the warm-up and the counted time: the first meet an empty server, and must not count."""
    load = closed_loop(OneServer().send, callers=callers, seconds=0.05, warm_seconds=0.05)
    assert len(load.latencies) >= 2 * callers
    assert load.rows_per_second == pytest.approx(8 / OneServer.SERVICE, rel=0.2)
    assert load.percentile(0) == pytest.approx(callers * OneServer.SERVICE, rel=0.2)
    assert load.percentile(50) == pytest.approx(callers * OneServer.SERVICE, rel=0.2)


@pytest.mark.parametrize(("callers", "seconds"), [(1, 0.05), (4, 0.05), (4, 0.5)])
def test_long_requests_side_by_side(callers: int, seconds: float) -> None:
    """Answers come in bursts: counting from the last of one to the first of another would lose most of a burst."""

    def send(_: int) -> int:
        time.sleep(0.2)
        return 8

    load = closed_loop(send, callers=callers, seconds=seconds, warm_seconds=0.05)
    assert load.rows_per_second == pytest.approx(callers * 8 / 0.2, rel=0.2)
    assert load.percentile(50) == pytest.approx(0.2, rel=0.2)


class JoiningServer:
    """Takes all that wait at a time, as Triton's dynamic batching does: bursts of answers, large and small ones."""

    def __init__(self) -> None:
        self._waiting = queue.Queue[threading.Event]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._waiting.get_nowait())
            time.sleep(0.02 * len(batch))
            for event in batch:
                event.set()

    def send(self, _: int) -> int:
        event = threading.Event()
        self._waiting.put(event)
        event.wait()
        return 1


def test_answers_in_bursts() -> None:
    """50 a second, however they are joined; a window of a few bursts says so too."""
    send = JoiningServer().send
    rates = [closed_loop(send, callers=16, seconds=0.5, warm_seconds=0.1).rows_per_second for _ in range(3)]
    assert rates == pytest.approx([50] * 3, rel=0.15)


def test_the_watcher_is_notified_when_counting_begins_and_ends() -> None:
    seen, answers = list[int](), list[float]()

    def send(_: int) -> int:
        time.sleep(0.02)
        answers.append(time.perf_counter())
        return 1

    load = closed_loop(send, callers=2, seconds=0.3, warm_seconds=0.1, on_edge=lambda: seen.append(len(answers)))
    before, after = seen
    assert before >= 4
    assert after - before == pytest.approx(len(load.latencies), abs=4)


def test_an_error_ends_the_load() -> None:
    def send(number: int) -> int:
        if number == 5:
            raise ValueError("the sixth")
        return sleep(number)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="the sixth"):
        closed_loop(send, callers=2, seconds=60)
    assert time.monotonic() - begin < 30


def test_percentiles_are_in_seconds() -> None:
    assert Load(1.0, np.arange(101) / 100).percentile(99) == pytest.approx(0.99)
