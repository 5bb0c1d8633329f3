"""Starts of servers and the pauses before them, canaries of a new server, drain and stop."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.failures import CallError, Kind
from shoal.errors import ServerError
from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.control.process_monitor import PERIOD
from shoal.serving.gateway.control.supervisor import (
    GIVE_UP_SECONDS,
    MOST_PAUSE,
    MOST_RESTART_PAUSE,
    STOP_SECONDS,
)  # fmt: skip
from shoal.serving.gateway.options import RESTARTS_SECONDS
from shoal.serving.gateway.refusals import RETRY_SECONDS, RefusedError
from tests.support.fake_service import A, B, FakeService, Play, player, refuse_to_start
from tests.support.fake_upstream import FakeStream
from tests.support.virtual_time import VirtualLoop, run, settle


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return player(monkeypatch)


@pytest.mark.parametrize(
    ("process", "pauses"),
    [(0, [1.0, 2.0, 4.0, MOST_PAUSE, MOST_PAUSE, MOST_PAUSE]), (B, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])],
)
def test_launches_that_fail_are_repeated_with_longer_pauses(play: Play, process: int, pauses: list[float]) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(6)
        service.end(0, process)
        await service.wait_for(2, 100)
        assert np.diff(service.launches[1:]).tolist() == pytest.approx(pauses)

    play(scene)


@pytest.mark.parametrize(
    ("processes", "words", "stops"),
    [
        ([B], "It did not start.", False),
        ([B], "CUDA out of memory", True),
        ([A, B], "It did not start.", True),  # no model is left
        ([0], "It did not start.", True),
    ],
)
def test_the_old_server_goes_on_beside_starts_that_fail(
    play: Play, processes: list[int], words: str, stops: bool
) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = [ServerError(words) for _ in range(4)]
        for process in processes:
            service.end(0, process)
        await asyncio.sleep(0.5)
        assert service.active.is_open("a") == (processes == [B])
        await asyncio.sleep(5)
        assert service.active.is_open("a") != stops
        await service.wait_for(2, 60)
        assert service.was_stopped == [False, False, *[stops] * 4]

    play(scene)


def test_faults_of_an_old_server_that_goes_on_are_found(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(6)
        service.end(0, B)
        await asyncio.sleep(20)  # in a pause of 16 s
        service.answer = lambda call: {"Y": np.ones(1)}
        await asyncio.sleep(8)
        assert service.health.restarts == {"died": 1, "wrong": 1}
        assert not service.active.is_open("a")
        service.answer = lambda call: {"Y": np.zeros(1)}
        await service.wait_for(2, 100)

    play(scene)


def test_a_pause_ends_with_an_old_server_that_ends(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(5)
        service.end(0, B)
        await asyncio.sleep(20)  # in a pause of 16 s
        service.end(0, 0)
        assert await service.wait_for(2) < 1

    play(scene)


def test_requests_of_a_server_that_must_stop_first(play: Play) -> None:
    """It has some seconds for them, and what goes on then is sent to the next server."""

    async def scene(service: FakeService) -> None:
        old, resending = service.upstreams[0], service.gate.resending
        asked: list[tuple[bytes, Any]] = []

        async def ask(body: bytes, seconds: float) -> str:
            async def call(upstream: Any) -> str:
                asked.append((body, upstream))
                await asyncio.sleep(seconds)
                return "answer"

            return await resending.run("a", body, old, call, lambda: True)

        short, long = asyncio.create_task(ask(b"short", 3)), asyncio.create_task(ask(b"long", 30))
        stream = FakeStream(ANYONE, ["a"])
        stream.num_sent, old.streams = 1, {stream}
        await settle()
        service.memory = 0
        service.end(0, B)
        await asyncio.sleep(5)
        assert await short == "answer"
        assert (service.servers[0].stopped, stream.ends) == ([], [])
        await service.wait_for(2, 10)
        assert service.was_stopped == [False, True]
        assert stream.ends == ["ended"]
        assert await long == "answer"
        assert asked == [(b"short", old), (b"long", old), (b"long", service.upstreams[1])]
        assert not resending.quarantine.remaining("a", b"long")
        assert (old.num_lost, resending.num_resent) == (0, 1)

    play(scene)


def test_a_server_that_is_replaced_gets_no_canaries(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures, calls = refuse_to_start(5), service.upstreams[0].client.calls
        service.end(0, A)
        service.canaries["a"].sent = time.monotonic()  # in flight to a process that hangs
        service.end(0, B)
        await asyncio.sleep(2 * PERIOD)
        num_calls = len(calls)
        assert service.canaries["a"].sent == 0.0
        await asyncio.sleep(0.5)
        await service.wait_for(2, 60)
        await asyncio.sleep(20)
        assert len(calls) == num_calls

    play(scene)


def test_without_memory_for_two_servers_the_old_one_stops_first(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        await asyncio.sleep(1)
        service.memory = 30 * 2**20  # as much as the server's three processes have
        service.end(0, B)
        await service.wait_for(2)
        assert service.was_stopped == [False, True]

    play(scene)


def test_the_service_gives_up_after_ten_minutes(play: Play) -> None:
    async def scene(service: FakeService) -> None:
        service.failures = refuse_to_start(1000)
        service.end(0, B)
        await asyncio.sleep(2 * GIVE_UP_SECONDS)
        assert service.active.is_open("a"), "a server that still serves a model goes on"
        service.end(0, 0)
        start = time.monotonic()
        assert service.running is not None
        with pytest.raises(ServerError, match="No server has started for 10 minutes: It did not start"):
            await service.running
        assert time.monotonic() - start < MOST_RESTART_PAUSE + 1

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
        assert "too often" in service.active.trouble("b")
        assert service.active.is_open("a")
        with pytest.raises(RefusedError) as caught:
            service.active.find("b")
        seconds = caught.value.retry_seconds
        assert MOST_RESTART_PAUSE < seconds <= MOST_RESTART_PAUSE + RETRY_SECONDS, "the next server is not there sooner"
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
        admitted = ExitStack()
        admitted.enter_context(service.traffic.admit("b", 0, ANYONE))
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, admitted.close)
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
