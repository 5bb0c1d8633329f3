"""Lost requests: resent once, one at a time, and never what may have killed a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.serving.gateway.core.active_server import NEXT_SECONDS, ActiveServer
from shoal.serving.gateway.core.resending import (
    _MOST_SUSPECTS,
    SUSPECT_SECONDS,
    TOGETHER_SECONDS,
    Quarantine,
    Resending,
)
from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.refusals import FailedError, LostError
from tests.support.fake_upstream import FakeUpstream
from tests.support.virtual_time import run, settle


class Bench:
    """A service with servers ``a``, ``b``, ``c``; each server that dies fails its requests in flight together."""

    def __init__(self, *, is_allowed: bool = True) -> None:
        self.active = ActiveServer()
        self.resending = Resending(self.active, is_allowed=is_allowed)
        self.servers = [FakeUpstream() for _ in range(3)]
        self.calls: list[tuple[bytes, int]] = []
        self.deaths = [asyncio.Event() for _ in self.servers]
        self.seconds = 1.0
        self.num_running = self.most_running = 0  # on later servers
        self.is_waited_for = True

    def call(self, body: bytes) -> Callable[[Upstream], Awaitable[str]]:
        async def send(upstream: Upstream) -> str:
            number = self.servers.index(upstream)  # type: ignore[arg-type]
            self.calls.append((body, number))
            self.num_running += number > 0
            self.most_running = max(self.most_running, self.num_running)
            try:
                async with asyncio.timeout(self.seconds):
                    await self.deaths[number].wait()
                raise LostError
            except TimeoutError:
                return f"{body.decode()} from {number}"
            finally:
                self.num_running -= number > 0

        return send

    def ask(self, body: bytes, server: int = 0, model: str = "m") -> asyncio.Task[str]:
        work = self.resending.run(model, body, self.servers[server], self.call(body), lambda: self.is_waited_for)
        return asyncio.create_task(work)

    async def kill(self, number: int, *, next_after: float | None = 2.0) -> None:
        """Let a server die, and activate the next one later."""
        await settle()
        self.deaths[number].set()
        await settle()
        if next_after is not None:
            await asyncio.sleep(next_after)
            await self.active.activate(self.servers[number + 1])


async def bench(*, is_allowed: bool = True) -> Bench:
    made = Bench(is_allowed=is_allowed)
    await made.active.activate(made.servers[0])
    return made


async def is_lost(task: asyncio.Task[str]) -> bool:
    try:
        await task
    except LostError:
        return True
    return False


def test_an_answer_passes() -> None:
    async def work() -> None:
        service = await bench()
        assert await service.ask(b"x") == "x from 0"
        assert service.resending.num_resent == 0
        assert not service.servers[0].sent
        assert not service.active.suspected

    run(work())


@pytest.mark.parametrize("fault", [lambda: FailedError(400, "It is refused.", is_fault=False), LostError])
def test_a_request_that_failed_is_freed_at_once(fault: Callable[[], Exception]) -> None:
    """Without the garbage collector, which may not run for many large requests."""

    async def fail() -> weakref.ref[Any]:
        async def call(_: Upstream) -> bytes:  # as a front's, which holds the request
            await asyncio.sleep(1)
            raise fault()

        service = await bench(is_allowed=False)
        with contextlib.suppress(LostError, FailedError):
            await service.resending.run("m", b"x", service.servers[0], call, lambda: True)
        return weakref.ref(call)

    async def work() -> None:
        asked = await fail()
        await settle()
        assert asked() is None

    gc.disable()
    try:
        run(work())
    finally:
        gc.enable()


def test_the_only_request_in_flight_is_quarantined() -> None:
    async def work() -> None:
        service = await bench()
        asked = service.ask(b"x")
        await service.kill(0)
        assert await is_lost(asked)
        assert service.calls == [(b"x", 0)]
        assert service.resending.quarantine.remaining("m", b"x")
        assert service.active.suspected
        assert not service.servers[0].is_repeat

    run(work())


@pytest.mark.parametrize("seconds", [2.0, 100.0])
def test_a_request_that_the_service_stops_is_sent_again(seconds: float) -> None:
    """As often as that happens, without suspicion, not one by one; also one that was waiting for its turn."""

    async def work() -> None:
        service = await bench()
        asked = [service.ask(body) for body in (b"x", b"y")]
        for number in (0, 1):
            await asyncio.sleep(0.5)
            service.servers[number].stop()
            if not number:
                asked.append(service.ask(b"z"))
            await asyncio.sleep(seconds)
            assert not any(task.done() for task in asked)
            await service.active.activate(service.servers[number + 1])
        assert await asyncio.gather(*asked) == ["x from 2", "y from 2", "z from 2"]
        assert (service.most_running, service.resending.num_resent) == (3, 6)
        assert [server.num_lost for server in service.servers] == [0, 0, 0]
        assert not service.active.suspected
        assert not any(service.resending.quarantine.remaining("m", body) for body in (b"x", b"y", b"z"))

    run(work())


@pytest.mark.parametrize("reason", ["left", "closed", "not allowed"])
def test_a_stopped_request_that_is_not_sent_again(reason: str) -> None:
    async def work() -> None:
        service = await bench(is_allowed=reason != "not allowed")
        asked = service.ask(b"x")
        await settle()
        service.servers[0].stop()
        service.is_waited_for = reason != "left"
        if reason == "closed":
            await service.active.close("it is stopping")
        assert await is_lost(asked)
        assert not service.resending.quarantine.remaining("m", b"x")

    run(work())


def test_a_process_that_triton_has_given_up_is_killed_once() -> None:
    async def work() -> None:
        service = await bench()

        async def call(_: Upstream) -> bytes:
            raise LostError("in ensemble 'e', Stub process 'm_0_1' is not healthy.")

        for _ in range(2):
            with pytest.raises(LostError):
                await service.resending.run("m", b"x", service.servers[0], call, lambda: True)
        assert service.servers[0].server.killed == ["m_0_1"]  # type: ignore[attr-defined]

    run(work())


def test_a_question_is_sent_again_and_never_quarantined() -> None:
    """It has no model; others ask it with the same bytes."""

    async def work() -> None:
        service = await bench()
        asked = service.ask(b"x", model="")
        await service.kill(0)
        assert await asked == "x from 1"
        asked = service.ask(b"x", 1, model="")
        await service.kill(1)
        await service.kill(2, next_after=None)
        assert await is_lost(asked)
        assert not service.resending.quarantine.remaining("", b"x")

    run(work())


@pytest.mark.parametrize("blocked", ["", "other"])
def test_a_server_that_proves_healthy_gets_the_request_again(blocked: str) -> None:
    async def work() -> None:
        service = await bench()
        service.active.blocked = dict.fromkeys([blocked] * bool(blocked), "it died")
        asked = service.ask(b"x")
        await service.kill(0, next_after=None)
        service.deaths[0].clear()
        await service.active.confirm_healthy()
        assert await asked == "x from 0"
        assert not service.resending.quarantine.remaining("m", b"x")
        assert service.resending.num_resent == 1

    run(work())


def test_requests_lost_together_are_resent_one_at_a_time() -> None:
    async def work() -> None:
        service = await bench()
        asked = [service.ask(body) for body in (b"x", b"y", b"z")]
        await service.kill(0)
        assert await asyncio.gather(*asked) == ["x from 1", "y from 1", "z from 1"]
        assert (service.most_running, service.resending.num_resent) == (1, 3)
        assert not any(service.resending.quarantine.remaining("m", body) for body in (b"x", b"y", b"z"))

    run(work())


def test_what_is_lost_twice_is_quarantined_and_the_others_go_on() -> None:
    async def work() -> None:
        service = await bench()
        guilty, other = service.ask(b"x"), service.ask(b"y")
        await service.kill(0)
        await service.kill(1, next_after=3.0)
        assert await is_lost(guilty)
        assert await other == "y from 2"
        assert service.calls == [(b"x", 0), (b"y", 0), (b"x", 1), (b"y", 2)]
        assert service.resending.quarantine.remaining("m", b"x")
        assert not service.resending.quarantine.remaining("m", b"y")
        assert [server.is_repeat for server in service.servers] == [False, True, False]
        assert [server.num_lost for server in service.servers] == [2, 1, 0]

    run(work())


@pytest.mark.parametrize("num_asked", [1, 2])
def test_nothing_is_resent_where_that_is_not_allowed(num_asked: int) -> None:
    async def work() -> None:
        service = await bench(is_allowed=False)
        asked = [service.ask(body) for body in (b"x", b"y")[:num_asked]]
        await service.kill(0, next_after=0.0)
        start = asyncio.get_running_loop().time()
        assert all([await is_lost(each) for each in asked])
        assert asyncio.get_running_loop().time() - start == pytest.approx(TOGETHER_SECONDS)
        assert len(service.calls) == num_asked
        assert bool(service.resending.quarantine.remaining("m", b"x")) == (num_asked == 1)

    run(work())


def test_a_client_that_has_left_is_not_asked_for_again() -> None:
    async def work() -> None:
        service = await bench()
        service.is_waited_for = False
        asked = [service.ask(b"x"), service.ask(b"y")]
        await service.kill(0)
        assert all([await is_lost(each) for each in asked])
        assert len(service.calls) == 2

    run(work())


@pytest.mark.parametrize("reason", ["closed", "blocked"])
def test_without_a_next_server_the_request_is_lost(reason: str) -> None:
    async def work() -> None:
        service = await bench()
        asked = [service.ask(b"x"), service.ask(b"y")]
        await service.kill(0, next_after=None)
        start = asyncio.get_running_loop().time()
        if reason == "closed":
            await service.active.close("it is stopping")
        else:
            service.active.block(["m"], "it died")
        assert all([await is_lost(each) for each in asked])
        assert asyncio.get_running_loop().time() - start == pytest.approx(0 if reason == "closed" else NEXT_SECONDS)
        assert len(service.calls) == 2
        assert service.resending.num_resent == 0

    run(work())


@pytest.mark.parametrize("seconds", [5.0, 40.0, 100.0])
def test_in_its_turn_a_request_waits_for_an_open_server(seconds: float) -> None:
    async def work() -> None:
        service = await bench()
        asked = [service.ask(b"x"), service.ask(b"y")]
        await service.kill(0)
        await asyncio.sleep(0.5)
        service.active.block(["m"], "it hangs")  # and the call in flight is lost for the second time
        await asyncio.sleep(seconds)
        await service.active.activate(service.servers[2])
        assert await is_lost(asked[0])
        if seconds < 2 * NEXT_SECONDS:  # the first request waits too, before it gives up its turn
            assert await asked[1] == "y from 2"
        else:
            assert await is_lost(asked[1])

    run(work())


def test_a_turn_is_waited_for_for_30_seconds() -> None:
    async def work() -> None:
        service = await bench()
        service.seconds = 100.0
        first, second = service.ask(b"x"), service.ask(b"y")
        await service.kill(0)
        start = asyncio.get_running_loop().time()
        assert await second == "y from 1"
        assert asyncio.get_running_loop().time() - start == pytest.approx(NEXT_SECONDS + 100)
        assert await first == "x from 1"
        assert service.most_running == 2
        assert not service.resending._turn_lock.locked()

    run(work())


def test_a_client_that_disconnects_does_not_cancel_the_call() -> None:
    async def work() -> None:
        service = await bench()
        asked = service.ask(b"x")
        await settle()
        asked.cancel()
        assert await asked == "x from 0"
        assert service.calls == [(b"x", 0)]

    run(work())


def test_a_quarantine_ends_after_a_minute() -> None:
    async def work() -> None:
        quarantine = Quarantine()
        quarantine.add("m", b"x")
        await asyncio.sleep(SUSPECT_SECONDS - 0.1)
        assert quarantine.remaining("m", b"x")
        assert not quarantine.remaining("n", b"x")
        assert not quarantine.remaining("m", b"y")
        await asyncio.sleep(0.2)
        assert not quarantine.remaining("m", b"x")
        quarantine.add("m", b"other")
        assert len(quarantine._ends) == 1
        for number in range(_MOST_SUSPECTS + 100):
            quarantine.add("m", str(number).encode())
        assert len(quarantine._ends) == _MOST_SUSPECTS + 1

    run(work())
