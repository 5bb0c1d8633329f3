"""Requests and streams in flight: who is refused, who makes room, and what is counted."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from time import sleep

import pytest

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Quota, Reservation
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.admission import A_REQUEST, FEW, MANY, Admission
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.core.upstream import QUIET_SECONDS, UNREAD_SECONDS
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from tests.support.fake_upstream import FakeStream, FakeUpstream
from tests.support.virtual_time import run

MINE, YOURS = Caller("mine"), Caller("yours")


async def make(limits: Limits = Limits(), **slots: int) -> tuple[Traffic, FakeUpstream, ActiveServer]:  # noqa: B008 (frozen)
    active, upstream = ActiveServer(), FakeUpstream()
    traffic = Traffic(active, ["a", "b"], limits, max_wait=1.0, slots=slots or None)
    assert traffic.num_requests == 0  # without a server
    await active.activate(upstream)
    return traffic, upstream, active


def test_a_request_counts_until_it_is_released() -> None:
    async def work() -> None:
        traffic, upstream, _ = await make(a=2)
        assert traffic.models == ["a", "b"]
        with traffic.admit("a", 10, MINE):
            assert (traffic.in_flight("a"), traffic.in_flight("b"), traffic.num_requests) == (1, 0, 1)
            assert not traffic.is_full("a")
            with traffic.admit("a", 10, MINE):
                assert traffic.is_full("a")
                assert not traffic.is_full("b")
                upstream.streams = {FakeStream(MINE), FakeStream(MINE, moved=0.0)}  # the second one is quiet
                assert traffic.num_requests == 3
        assert traffic.in_flight("a") == 0

    run(work())


def test_models_without_a_name_share_one_count() -> None:
    async def work() -> None:
        traffic, _, _ = await make()
        with ExitStack() as admitted:
            for number in range(3):
                admitted.enter_context(traffic.admit(f"unknown {number}", 10, MINE))
                traffic.count(f"unknown {number}", "failed")
            traffic.count("a", "failed")
            assert traffic.num_requests == traffic.in_flight("") == 3
            assert traffic.outcomes == {("", "failed"): 3, ("a", "failed"): 1}
        assert traffic.num_requests == 0

    run(work())


@pytest.mark.parametrize(("model", "name"), [("a", "a"), ("", "this server")])
def test_too_many_requests(model: str, name: str) -> None:
    async def work() -> None:
        traffic, _, _ = await make()
        with ExitStack() as admitted:
            for _ in range(MANY):
                admitted.enter_context(traffic.admit(model, 0, MINE))
                sleep(0.001)  # a slow machine: real time is not the test's time
            said = rf"^Too many requests for {name}: {MANY} are in flight\.$"
            with pytest.raises(RefusedError, match=said) as caught:
                admitted.enter_context(traffic.admit(model, 0, MINE))
            assert (caught.value.reason, caught.value.retry_after) == (RefusalReason.BUSY, 1.0)
            assert traffic.outcomes == {(model, "refused"): 1}
            assert traffic.in_flight(model) == MANY

    run(work())


def test_an_unavailable_model_is_counted() -> None:
    async def work() -> None:
        traffic, upstream, active = await make()
        assert traffic.find("a") is upstream
        active.block(["a"], "it died")
        with pytest.raises(RefusedError):
            traffic.find("a")
        assert traffic.outcomes == {("a", "unavailable"): 1}

    run(work())


def test_memory_has_a_limit_and_a_share() -> None:
    async def work() -> None:
        traffic, _, _ = await make(Limits(memory_mib=1.0, client_share=0.5))
        held = Reservation(traffic.memory, MINE)
        traffic.grow(held, 2**19)
        with pytest.raises(RefusedError, match="fill its memory") as caught:
            traffic.grow(held, 1)
        assert (caught.value.reason, caught.value.retry_after, held.num_bytes) == (RefusalReason.BUSY, 1.0, 2**19)
        other = Reservation(traffic.memory, YOURS)
        traffic.grow(other, 2**19)
        assert traffic.memory.taken == 2**20
        held.release()
        held.release()
        assert traffic.memory.taken == 2**19

    run(work())


@pytest.mark.parametrize(("num_mine", "num_yours"), [(2, 0), (2, 2)])
def test_a_stream_finds_no_place(num_mine: int, num_yours: int) -> None:
    async def work() -> None:
        traffic, upstream, _ = await make(Limits(max_streams=4))
        mine, yours = FakeStream(MINE), FakeStream(YOURS)
        mine.num_sent = yours.num_sent = 1  # not answered: not quiet
        upstream.streams = {mine, yours}
        with ExitStack() as open_:
            for caller, number in ((MINE, num_mine), (YOURS, num_yours)):
                for _ in range(number):
                    open_.enter_context(traffic.reserve_stream(caller))
            mine.began = yours.began = asyncio.get_running_loop().time() - UNREAD_SECONDS - 0.1
            with pytest.raises(RefusedError) as caught, traffic.reserve_stream(MINE):
                pass
            is_full = num_yours > 0
            assert (caught.value.reason, caught.value.retry_after) == (RefusalReason.BUSY, 1.0)
            assert ("one client has at most 2 of 4" in caught.value.message) != is_full
            assert f"{num_mine + num_yours} streams are open" in caught.value.message
            assert mine.ends == ["given up"]
            assert yours.ends == (["given up"] if is_full else [])
            assert traffic.streams.taken == num_mine + num_yours
        assert traffic.streams.taken == 0

    run(work())


@pytest.mark.parametrize("is_full", [True, False])
def test_the_stream_that_was_quiet_for_longest_makes_room(is_full: bool) -> None:
    async def work() -> None:
        traffic, upstream, _ = await make(Limits(max_streams=4))
        now = asyncio.get_running_loop().time()
        younger = FakeStream(MINE, moved=now - QUIET_SECONDS - 1)
        older = FakeStream(MINE, moved=now - QUIET_SECONDS - 2)
        oldest = FakeStream(YOURS, moved=now - QUIET_SECONDS - 3)
        moving = FakeStream(MINE, moved=now - QUIET_SECONDS)
        upstream.streams = {younger, older, oldest, moving}
        traffic.streams.take(MINE, 2)
        if is_full:
            traffic.streams.take(YOURS, 2)
        with traffic.reserve_stream(MINE):
            assert [each.ends for each in (younger, older, oldest, moving)] == (
                [[], [], ["ended"], []] if is_full else [[], ["ended"], [], []]
            )
            assert traffic.streams.taken == (5 if is_full else 3)

    run(work())


def test_no_place_without_a_server() -> None:
    async def work() -> None:
        traffic, _, active = await make(Limits(max_streams=1))
        active.upstream = None
        traffic.end_unread()
        with traffic.reserve_stream(MINE), pytest.raises(RefusedError), traffic.reserve_stream(MINE):
            pass

    run(work())


def test_streams_that_are_not_read_end_where_others_wait() -> None:
    async def work() -> None:
        traffic, upstream, _ = await make(a=1)
        streams = {name: FakeStream(MINE, [name]) for name in "ab"}
        upstream.streams = {*streams.values()}
        for stream in streams.values():
            stream.unread_seconds = lambda: UNREAD_SECONDS + 0.1
        with traffic.admit("a", 0, MINE):
            traffic.end_unread()
            assert not streams["a"].ends
            with traffic.admit("a", 0, MINE):  # the model computes one at a time
                traffic.end_unread()
        assert (streams["a"].ends, streams["b"].ends) == (["given up"], [])

    run(work())


def test_streams_whose_client_reads_nothing_end() -> None:
    async def work() -> None:
        traffic, upstream, _ = await make()
        patient, other = FakeStream(MINE), FakeStream(YOURS)
        other.patience = 30.0
        upstream.streams = {patient, other}
        with patient.write(), other.write():
            await asyncio.sleep(30.0)
            traffic.end_unread()
            assert not other.ends
            await asyncio.sleep(0.1)
            traffic.end_unread()
            assert (patient.ends, other.ends) == ([], ["given up"])
        await asyncio.sleep(60.0)
        traffic.end_unread()  # nothing is being written
        assert other.ends == ["given up"]

    run(work())


def test_a_client_that_reads_nothing() -> None:
    async def work() -> None:
        stream = FakeStream(MINE)
        stream.end_if_unread()  # nothing is being written
        for _ in range(100):  # each answer is read in time
            with stream.write():
                await asyncio.sleep(UNREAD_SECONDS - 0.01)
                stream.end_if_unread()
        assert not stream.ends
        with stream.write():
            await asyncio.sleep(UNREAD_SECONDS + 0.01)
            stream.end_if_unread()
            assert stream.ends == ["given up"]
        stream.end_if_unread()
        assert stream.ends == ["given up"]

    run(work())


def test_a_quiet_stream() -> None:
    async def work() -> None:
        stream, states = FakeStream(MINE), list[bool]()
        for seconds, num_sent in ((QUIET_SECONDS, 0), (0.1, 0), (0.1, 1)):
            await asyncio.sleep(seconds)
            stream.num_sent = num_sent
            states.append(stream.is_quiet)
        assert states == [False, True, False]

    run(work())


def test_quotas_forget_those_who_left() -> None:
    quota = Quota(3, 0.1)
    assert quota.share == 1
    quota.take(MINE)
    assert not quota.has(MINE)
    quota.take(MINE, 2)
    quota.give_back(MINE)
    assert quota._of == {"mine": 2}
    quota.give_back(MINE, 2)
    assert not quota._of


def test_slots_and_waiting() -> None:
    admission = Admission(1.0, slots=2, clock=lambda: 0.0)
    states = []
    for _ in range(4):
        states.append((admission.is_full, admission.has_waiting))
        admission.enter(0)
    assert states == [(False, False), (False, False), (True, False), (True, True)]
    without = Admission(1.0, clock=lambda: 0.0)
    for _ in range(FEW):
        without.enter(0)
    assert not without.is_full
    assert not without.has_waiting


def test_the_rate_needs_half_a_second_and_fades_in_ten() -> None:
    now = [0.0]
    admission = Admission(1.0, clock=lambda: now[0])
    for _ in range(FEW):
        admission.enter(0)
    now[0] += 0.4
    assert admission.refuse(10**9) is None
    now[0] += 0.2
    assert admission.refuse(10**9) == 30.0
    for _ in range(FEW):
        admission.leave(0, is_done=True)
    now[0] += 1000.0  # nothing in flight: no time of work
    for _ in range(FEW):
        admission.enter(0)
    seconds = 0.4 * (1 - 0.2 / 10) + 0.2  # in which the 16 were done, the earlier ones weighing less
    assert admission.refuse(FEW * A_REQUEST - A_REQUEST) == pytest.approx(2 * seconds - 1.0)


def test_a_full_model_names_the_time_of_its_next_end() -> None:
    now = [0.0]
    admission = Admission(1.0, slots=1, clock=lambda: now[0])
    for _ in range(4):
        admission.enter(0)
        now[0] += 5.0
        admission.leave(0, is_done=True)
    for _ in range(4):
        admission.enter(0)
    assert admission.refuse(0) == pytest.approx(6.25)
    now[0] += 500.0
    assert admission.refuse(0) == 30.0
