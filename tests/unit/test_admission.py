"""Who is let in, by what the work before took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.admission import A_REQUEST, FEW, MANY, Admission
from tests.support.virtual_time import Clock

MINE, YOURS, THEIRS = Caller("mine"), Caller("yours"), Caller("theirs")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def work(admission: Admission, clock: Clock, *, number: int, seconds: float, num_bytes: int = 0) -> None:
    """Requests one after the other."""
    for _ in range(number):
        admission.enter(num_bytes)
        clock.now += seconds
        admission.leave(num_bytes, is_done=True)


def test_a_few_are_never_refused(clock: Clock) -> None:
    admission = Admission(0.001, clock=clock)
    work(admission, clock, number=10, seconds=100)
    for _ in range(FEW):
        assert admission.refuse(0) is None
        admission.enter(0)
    assert admission.refuse(0) is not None


def test_half_a_second_of_work_gives_a_rate(clock: Clock) -> None:
    for seconds, is_known in ((0.49, False), (0.5, True)):
        admission = Admission(0.1, clock=clock)
        clock.now = 0.0
        admission.refuse(0)
        work(admission, clock, number=1, seconds=seconds)
        for _ in range(FEW):
            admission.enter(0)
        assert (admission.refuse(0) is not None) == is_known


def test_waiting_is_bounded(clock: Clock) -> None:
    """Ten requests a second, and two seconds of patience: twenty may be under way."""
    admission = Admission(2.0, clock=clock)
    work(admission, clock, number=100, seconds=0.1)
    number = 0
    while admission.refuse(0) is None:
        admission.enter(0)
        number += 1
    assert number == 20
    assert admission.refuse(0) == pytest.approx(0.1, abs=0.01)
    large = 19 * A_REQUEST  # as much as 20 of the others
    assert admission.refuse(large) == pytest.approx(2.0, abs=0.01)


def test_large_requests_count_for_more(clock: Clock) -> None:
    admission = Admission(2.0, clock=clock)
    work(admission, clock, number=100, seconds=0.1, num_bytes=10 * A_REQUEST)
    for _ in range(FEW):
        admission.enter(0)
    assert admission.refuse(10 * A_REQUEST) is None
    assert admission.refuse(1000 * A_REQUEST) is not None


def test_before_anything_is_known(clock: Clock) -> None:
    admission = Admission(1.0, clock=clock)
    for _ in range(MANY):
        assert admission.refuse(0) is None
        admission.enter(0)
    assert admission.refuse(0) == 1.0


def test_lost_requests_are_no_work_done(clock: Clock) -> None:
    admission = Admission(2.0, clock=clock)
    work(admission, clock, number=100, seconds=0.1)
    for _ in range(1000):
        admission.enter(0)
        admission.leave(0, is_done=False)
    for _ in range(20):
        admission.enter(0)
    assert admission.refuse(0) is not None


def test_another_caller_is_admitted_beyond_the_places_that_one_has_taken() -> None:
    admission = Admission(1.0, slots=4, share=0.5)
    for _ in range(16):
        assert admission.refuse(0, MINE) is None
        admission.enter(0, MINE)
    assert admission.refuse(0, MINE) is not None
    for _ in range(8):
        assert admission.refuse(0, YOURS) is None
        admission.enter(0, YOURS)
    assert admission.refuse(0, YOURS) is not None, "it has its share"
    for _ in range(8):
        assert admission.refuse(0, THEIRS) is None
        admission.enter(0, THEIRS)
    assert admission.refuse(0, Caller("a fourth one")) is not None, "twice the places are taken"
    for _ in range(9):
        admission.leave(0, MINE, is_done=True)
    assert admission.refuse(0, MINE) is None, "it has less than its share"
    admission.leave(0, THEIRS, is_done=True)
    assert admission.refuse(0, Caller("a fourth one")) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.floats(0, 20)), max_size=60))
def test_whatever_comes(steps: list[tuple[int, int, float]]) -> None:
    """Counts come back to nothing, and a wait is never negative."""
    clock = Clock()
    admission, under_way = Admission(1.0, clock=clock), list[int]()
    for what, num_bytes, seconds in steps:
        clock.now += seconds
        wait = admission.refuse(num_bytes)
        assert wait is None or wait > 0
        if what and wait is None:
            admission.enter(num_bytes)
            under_way.append(num_bytes)
        elif under_way:
            admission.leave(under_way.pop(), is_done=bool(num_bytes % 2))
        assert admission.num_requests == len(under_way)
    for num_bytes in under_way:
        admission.leave(num_bytes, is_done=True)
    assert admission.num_requests == 0
    assert admission.refuse(0) is None
