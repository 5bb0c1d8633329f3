"""Supervision: faults, what they block, and the hand-over to the next server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.failures import CallError, Kind
from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.control.process_monitor import PERIOD, ProcessFault
from shoal.serving.gateway.control.supervisor import AGAIN_SECONDS, SETTLED_SECONDS  # fmt: skip
from tests.support.fake_service import A, B, FakeService, Play, player, refuse_to_start
from tests.support.fake_upstream import FakeStream
from tests.support.virtual_time import VirtualLoop


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return player(monkeypatch)


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
    ("model", "num_wrong", "faults"), [("a", 1, {}), ("a", 2, {"wrong": 1}), ("both", 2, {}), ("both", 3, {"wrong": 1})]
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
        service.active.blocked = {"both": "it died"}
        calls = service.upstreams[0].client.calls
        with service.traffic.admit("a", 0, ANYONE):
            calls.clear()
            await asyncio.sleep(20)
            assert calls == []
        answered = service.active.answered
        await asyncio.sleep(5)
        assert {call.model for call in calls} == {"a"}
        assert service.active.answered > answered

    play(scene)


def test_a_suspicion_without_a_fault_is_dropped(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        upstream = service.upstreams[0]
        upstream.num_lost = 1
        service.active.suspect()
        await asyncio.sleep(SETTLED_SECONDS - PERIOD)
        assert service.active.suspected
        assert upstream.num_lost == 1
        await asyncio.sleep(4 * PERIOD)
        assert not service.active.suspected
        assert upstream.num_lost == 0
        service.active.suspect()
        await asyncio.sleep(SETTLED_SECONDS - 2 * PERIOD)
        assert service.active.suspected, "the second suspicion lasts as long as the first"
        service.active.suspect()
        upstream.num_lost = 1
        await asyncio.sleep(SETTLED_SECONDS - PERIOD)
        assert upstream.num_lost == 1, "the time counts from the latest lost request"

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
