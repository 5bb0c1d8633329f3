"""Supervision: faults and what they block, restarts and their pauses, hand-over, drain and stop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from shoal.client.failures import CallError, Kind
from shoal.errors import ServerError
from shoal.gateway.control.process_monitor import PERIOD, ProcessFault
from shoal.gateway.control.supervisor import (
    AGAIN_SECONDS,
    GIVE_UP_SECONDS,
    MOST_PAUSE,
    MOST_RESTART_PAUSE,
    SETTLED_SECONDS,
    STOP_SECONDS,
)  # fmt: skip
from shoal.gateway.core.callers import ANYONE
from shoal.gateway.options import RESTARTS_SECONDS
from tests.support.fake_service import A, B, FakeService, refuse_to_start
from tests.support.fake_upstream import FakeStream
from tests.support.virtual_time import VirtualLoop, run, settle

Play = Callable[[Callable[[FakeService], Awaitable[None]]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a scene with a started service, and stop the service after it."""

    def begin(scene: Callable[[FakeService], Awaitable[None]]) -> None:
        async def work() -> None:
            service = FakeService(monkeypatch)
            await service.start()
            await scene(service)
            await service.stop()
            assert all(each.is_closed for each in service.upstreams)

        run(work())

    return begin


def test_a_started_service_is_open_and_tested(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        assert service.active.trouble() == ""
        num_calls = len(service.upstreams[0].client.calls)
        assert num_calls == 4, "each canary is asked twice, to see whether its answer is reproducible"
        await asyncio.sleep(60)
        assert len(service.upstreams[0].client.calls) == pytest.approx(num_calls + 2 * 60 / 2, abs=3)
        assert (len(service.servers), service.health.restarts) == (1, {})

    play(scene)


def test_a_process_that_ends_blocks_its_model_and_what_calls_it(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.unready = refuse_to_start(1)
        service.end(0, B)
        await asyncio.sleep(2 * PERIOD)
        what = "a process of b ended, with exit code 0"
        assert service.active.blocked == {"b": what, "both": what}
        assert service.health.restarts == {"died": 1}
        await service.wait_for(3)
        assert service.active.trouble() == ""

    play(scene)


def test_the_old_server_finishes_its_requests(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        old = service.upstreams[0]
        requests = {name: asyncio.create_task(asyncio.sleep(5)) for name in ("a", "b")}
        old.sent = {task: name for name, task in requests.items()}
        service.end(0, B)
        await service.wait_for(2)
        assert requests["b"].cancelled()
        assert not requests["a"].done()
        assert service.servers[0].stopped == []
        await requests["a"]
        old.sent.clear()
        await asyncio.sleep(0.2)
        assert service.servers[0].stopped == [0]
        assert old.is_closed
        assert old not in service.pool
        assert service.upstreams[1] in service.pool

    play(scene)


def test_a_stream_that_goes_on_is_ended_after_the_grace(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        stream = FakeStream(ANYONE, ["a"])
        stream.num_sent = 1
        service.upstreams[0].streams = {stream}
        service.end(0, B)
        seconds = await service.wait_for(2)
        await asyncio.sleep(service.options.grace - seconds - 0.5)
        assert stream.ends == []
        await asyncio.sleep(1.5)
        assert (stream.ends, service.servers[0].stopped) == (["ended"], [0])

    play(scene)


def test_a_server_that_ends_blocks_everything(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        blocked = service.active.block
        seen: list[set[str]] = []
        service.active.block = lambda models, reason: (seen.append({*models}), blocked(seen[-1], reason))[1]  # type: ignore[method-assign,func-returns-value]
        service.end(0, 0)
        await service.wait_for(2)
        assert seen == [{"a", "b", "both", ""}]
        assert service.health.restarts == {"server": 1}
        assert service.processes.killed == []

    play(scene)


def test_a_fault_kills_the_processes_of_its_model(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.processes.beacons[100 + A] = time.monotonic()  # at work without processor time
        await service.wait_for(2)
        assert service.processes.killed == [100 + A]
        assert service.health.restarts == {"hangs": 1}

    play(scene)


@pytest.mark.parametrize(
    ("model", "num_wrong", "faults"),
    [("a", 1, {}), ("a", 2, {"wrong": 1}), ("both", 2, {}), ("both", 3, {"wrong": 1})],
)
def test_wrong_canaries(play: Play, model: str, num_wrong: int, faults: dict[str, int]) -> None:
    async def scene(service: FakeService) -> None:
        asked = []

        def answer(call: Any) -> Any:
            asked.append(call.model)
            is_wrong = call.model == model and asked.count(model) <= num_wrong
            return {"Y": np.full(1, float(is_wrong))}

        service.answer = answer
        await asyncio.sleep(2.0 + num_wrong * (AGAIN_SECONDS + 0.1) + 1.0)
        assert service.health.restarts == faults
        if faults:
            await service.wait_for(2)
        else:  # errors count in a row only
            asked.clear()
            await asyncio.sleep(10)
            assert service.health.restarts == {}

    play(scene)


@pytest.mark.parametrize(
    ("kind", "model", "faults"),
    [
        (Kind.TIMEOUT, "a", {}),  # the monitor finds hanging processes
        (Kind.TIMEOUT, "both", {"wrong": 1}),
        (Kind.BUSY, "a", {}),
        (Kind.FAILED, "a", {"wrong": 1}),
    ],
)
def test_failing_canaries(play: Play, kind: Kind, model: str, faults: dict[str, int]) -> None:
    async def scene(service: FakeService) -> None:
        def answer(call: Any) -> Any:
            if call.model == model and len(service.servers) == 1:
                raise CallError(kind, "queue")
            return {"Y": np.zeros(1)}

        service.answer = answer
        await asyncio.sleep(10)
        assert service.health.restarts == faults

    play(scene)


def test_models_that_are_full_or_blocked_get_no_canary(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.traffic.admit("a", 0, ANYONE)
        service.active.blocked = {"both": "it died"}
        calls = service.upstreams[0].client.calls
        calls.clear()
        await asyncio.sleep(20)
        assert calls == []
        service.traffic.release("a", 0, ANYONE, is_done=True)
        answered = service.active.answered
        await asyncio.sleep(5)
        assert {call.model for call in calls} == {"a"}
        assert service.active.answered > answered

    play(scene)


def test_launches_that_fail_are_repeated_with_longer_pauses(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(5)
        service.end(0, B)
        await service.wait_for(2, 60)
        pauses = np.diff(service.launches[1:]).tolist()
        assert pauses == pytest.approx([1.0, 2.0, 4.0, MOST_PAUSE, MOST_PAUSE])
        assert service.servers[0].stopped == [0], "the old server may be in the way of the next"

    play(scene)


def test_the_old_server_gives_way_once_the_next_one_failed(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(1)
        service.end(0, B)
        await asyncio.sleep(0.5)
        assert service.active.is_open("a")
        assert service.servers[0].stopped == []
        await asyncio.sleep(1.0)
        assert service.servers[0].stopped == [0]
        await service.wait_for(2)

    play(scene)


def test_without_memory_for_two_servers_the_old_one_stops_first(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        await asyncio.sleep(1)
        service.memory = 30 * 2**20  # as much as the server's three processes have
        service.end(0, B)
        launch, stopped = service._launch, []

        def note(*arguments: Any) -> Any:
            stopped.append([*service.servers[0].stopped])
            return launch(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.gateway.control.supervisor.Server", note)
            await service.wait_for(2)
        assert stopped == [[0]]

    play(scene)


def test_the_service_gives_up_after_ten_minutes(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(1000)
        service.end(0, B)
        start = time.monotonic()
        assert service.running is not None
        with pytest.raises(ServerError, match="No server has started for 10 minutes: It did not start"):
            await service.running
        assert time.monotonic() - start == pytest.approx(GIVE_UP_SECONDS, abs=2 * MOST_PAUSE)

    play(scene)


def test_too_many_restarts_are_followed_by_pauses(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        pauses = []
        for number in range(9):
            service.end(number, B)
            pauses.append(round(await service.wait_for(number + 2, 100)))
            if number == 3:
                assert service.active.trouble() == ""
        assert pauses == [0, 0, 2, 4, 8, 16, 32, MOST_RESTART_PAUSE, MOST_RESTART_PAUSE]
        service.end(9, B)
        await asyncio.sleep(1)
        assert "too often" in service.active.trouble("a")
        await service.wait_for(11, 100)
        await asyncio.sleep(RESTARTS_SECONDS + 1)
        service.end(10, B)
        assert await service.wait_for(12) < 1

    play(scene)


def test_a_server_that_died_of_a_resent_request_does_not_count(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        for number in range(6):
            service.upstreams[-1].is_repeat = number % 3 > 0
            service.end(number, B)
            assert await service.wait_for(number + 2) < 1

    play(scene)


def test_a_suspicion_without_a_fault_is_dropped(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        upstream = service.upstreams[0]
        upstream.num_lost = 1
        service.active.suspected.set()
        await asyncio.sleep(SETTLED_SECONDS - PERIOD)
        assert service.active.suspected.is_set()
        assert upstream.num_lost == 1
        await asyncio.sleep(4 * PERIOD)
        assert not service.active.suspected.is_set()
        assert upstream.num_lost == 0
        service.active.suspected.set()
        await asyncio.sleep(SETTLED_SECONDS - 2 * PERIOD)
        assert service.active.suspected.is_set(), "the second suspicion lasts as long as the first"

    play(scene)


def test_processes_that_cannot_be_read_are_no_fault(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(service: FakeService) -> None:
        service.processes.error = OSError(24, "Too many open files")
        await asyncio.sleep(1)
        service.processes.error = None
        await asyncio.sleep(1)
        assert service.health.restarts == {}

    play(scene)
    assert "cannot be checked" in caplog.text


@pytest.mark.parametrize(("seconds", "is_said"), [(0.4, False), (100.0, True)])
def test_a_service_that_was_paused_itself_blames_nobody(
    play: Play, caplog: pytest.LogCaptureFixture, seconds: float, is_said: bool
) -> None:
    async def scene(service: FakeService) -> None:
        await asyncio.sleep(3.1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        service.processes.beacons[100 + A] = time.monotonic()
        loop.now += seconds
        await asyncio.sleep(0.3)
        assert service.health.restarts == {}

    play(scene)
    assert ("was stalled" in caplog.text) == is_said


def test_an_error_of_its_own_ends_the_service(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        def answer(_: Any) -> Any:
            raise ZeroDivisionError

        service.answer = answer
        assert service.running is not None
        with pytest.raises(ZeroDivisionError):
            await service.running

    play(scene)


def test_faults_of_an_older_server_and_of_blocked_models_do_not_count(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        note, fault = service.supervisor._note, ProcessFault("b", "died", "it died")
        service.end(0, A)
        await service.wait_for(2)
        note(service.upstreams[0], fault)
        assert service.active.trouble() == ""
        note(service.upstreams[1], fault)
        note(service.upstreams[1], fault)
        assert service.health.restarts == {"died": 2}
        service.active.block([""], "it ended")
        note(service.upstreams[1], ProcessFault("a", "died", "it died"))
        assert service.health.restarts == {"died": 2}

    play(scene)


def test_a_model_with_answers_that_differ_gets_no_canary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        service, numbers = FakeService(monkeypatch), itertools.count()
        service.answer = lambda call: {"Y": np.full(1, float(next(numbers) if call.model == "a" else 0))}
        await service.start()
        assert list(service.canaries) == ["both"]
        await service.stop()

    run(work())
    assert "a gets no canary requests" in caplog.text


@pytest.mark.parametrize("kind", [Kind.CONNECTION_LOST, Kind.TIMEOUT])
def test_a_first_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    async def work() -> None:
        service = FakeService(monkeypatch)

        def answer(_: Any) -> Any:
            raise CallError(kind, "gone")

        service.answer = answer
        with pytest.raises(ServerError, match="a does not answer as it should"):
            await service.supervisor.start()
        assert service.servers[0].stopped == [0]
        assert service.active.trouble() == "it is starting"

    run(work())


def test_a_next_server_must_answer_as_the_first(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.answer = lambda call: {"Y": np.full(1, float(len(service.servers) == 2))}
        service.end(0, B)
        await service.wait_for(3)
        assert service.servers[1].stopped == [0]

    play(scene)


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_that_is_cancelled_stops_what_it_started(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    async def work() -> None:
        service, loop = FakeService(monkeypatch), asyncio.get_running_loop()
        service.failures = refuse_to_start(int(fails))
        assert isinstance(loop, VirtualLoop)
        loop.thread_seconds = 5.0
        starting = asyncio.create_task(service.supervisor.start())
        await asyncio.sleep(1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert [each.stopped for each in service.servers] == ([] if fails else [[0]])
        await service.supervisor.drain()  # there is no server

    run(work())


@pytest.mark.parametrize(("seconds", "is_late"), [(4.0, False), (100.0, True)])
def test_drain(play: Play, caplog: pytest.LogCaptureFixture, seconds: float, is_late: bool) -> None:
    async def scene(service: FakeService) -> None:
        stream = FakeStream(ANYONE, ["a"])
        service.traffic.admit("b", 0, ANYONE)
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, lambda: service.traffic.release("b", 0, ANYONE, is_done=True))
        start, draining = loop.time(), asyncio.create_task(service.supervisor.drain())
        await settle()
        assert service.active.closed == "it is stopping"
        service.upstreams[0].streams = {stream}
        stream.moved = -100.0
        await draining
        assert loop.time() - start == pytest.approx(min(seconds, service.options.grace), abs=0.1)
        assert stream.ends == ["ended"]

    play(scene)
    assert ("1 requests were not answered within 10 s" in caplog.text) == is_late


def test_stop_ends_all_servers_and_checks(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        request = asyncio.create_task(asyncio.sleep(1000))
        service.upstreams[0].sent = {request: "a"}
        service.end(0, B)
        await service.wait_for(2)
        assert service.running is not None
        service.running.cancel()
        await service.supervisor.stop()
        assert [each.stopped for each in service.servers] == [[STOP_SECONDS]] * 2
        assert service.active.closed == "it is stopping"
        num_calls = len(service.upstreams[1].client.calls)
        await asyncio.sleep(60)
        assert len(service.upstreams[1].client.calls) == num_calls

    play(scene)
