"""Fair queue: callers whose requests wait for a model, and who is refused beside a caller that sends too much."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.admission import FEW, MANY, Admission
from shoal.serving.gateway.core.fair_queue import FairQueue
from shoal.serving.gateway.core.models import find_widths
from tests.support.configs import PYTHON, chain, make_configs, parameter
from tests.support.gates import make_gate
from tests.support.virtual_time import Clock, run

MANY_SENDER, FEW_SENDER = Caller("sends much"), Caller("sends little")


class Model:
    """A model that computes one request at a time, first come first served, as Triton's queue gives them to it."""

    def __init__(self, width: int) -> None:
        self.turns, self.order, self._lock = FairQueue(width), list[str](), asyncio.Lock()
        self.most = self._now = 0

    async def ask(self, caller: Caller) -> float:
        """Return the seconds until the answer."""
        start = asyncio.get_running_loop().time()
        async with self.turns.take(caller):
            self._now += 1
            self.most = max(self.most, self._now)
            async with self._lock:
                await asyncio.sleep(1)
            self._now -= 1
        self.order.append(caller.id)
        return asyncio.get_running_loop().time() - start


def test_a_request_waits_for_few_of_another_caller() -> None:
    async def work(width: int) -> float:
        model = Model(width)
        flood = [asyncio.ensure_future(model.ask(MANY_SENDER)) for _ in range(100)]
        await asyncio.sleep(5)
        seconds = [await model.ask(FEW_SENDER) for _ in range(10)]
        await asyncio.gather(*flood)
        assert model.most == (width or 100) + bool(width)
        assert not model.turns._sent
        assert not model.turns._waiting
        return max(seconds)

    assert run(work(4)) <= 5  # its own, and those of the other that were in Triton
    assert run(work(0)) > 90


def test_callers_with_much_to_do_get_as_much() -> None:
    async def work() -> None:
        model = Model(4)
        callers = [Caller(f"{number}") for number in range(3)]
        everything = [asyncio.ensure_future(model.ask(callers[0])) for _ in range(300)]
        for caller in callers[1:]:
            everything += [asyncio.ensure_future(model.ask(caller)) for _ in range(30)]
        await asyncio.gather(*everything)
        first = model.order[4:94]
        assert all(abs(first.count(caller.id) - 30) <= 4 for caller in callers)

    run(work())


def test_a_cancelled_request_gives_its_turn_back() -> None:
    async def work() -> None:
        chance = random.Random(0)
        model = Model(2)
        callers = [Caller(f"{number}") for number in range(3)]
        tasks = [asyncio.ensure_future(model.ask(chance.choice(callers))) for _ in range(100)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(chance.choice((0.0, 0.5, 1.0)))
            chance.choice(tasks).cancel()
        assert not model.turns._sent
        assert not model.turns._waiting
        assert await model.ask(callers[0]) == 1

    run(work())


def test_requests_of_the_gate_take_turns() -> None:
    async def work() -> None:
        gate = make_gate()
        gate.traffic._queues["plain"] = FairQueue(4)
        in_triton, most = 0, 0

        async def call(_: object, __: str) -> str:
            nonlocal in_triton, most
            in_triton += 1
            most = max(most, in_triton)
            await asyncio.sleep(1)
            in_triton -= 1
            return "answer"

        asked = [gate.ask(MANY_SENDER, "plain", b"x", call) for _ in range(12)]
        assert await asyncio.gather(*asked) == ["answer"] * 12
        assert most == 4
        assert gate.traffic.in_flight("plain") == 0

    run(work())


def test_how_many_are_in_triton() -> None:
    configs = make_configs(
        one=PYTHON, three=PYTHON + "instance_group [ { count: 3 } ]", batched=PYTHON + "dynamic_batching { }",
        engine=PYTHON + parameter("slots", "32"), both=chain("three", "batched"),
    )  # fmt: skip
    assert find_widths(configs) == {
        "one": 4, "three": 6, "batched": 8, "engine": 40, "both": 14
    }  # fmt: skip


def test_the_seconds_until_turns_come_are_counted() -> None:
    async def work() -> None:
        clock = Clock()
        turns = FairQueue(1, clock=clock)
        with ExitStack() as waiting:
            with turns.enter(FEW_SENDER):
                with turns.enter(FEW_SENDER):  # it leaves before its turn
                    clock.now += 5
                assert turns.waits == (1, 0.0)
                waiting.enter_context(turns.enter(FEW_SENDER))
                clock.now += 3
            assert turns.waits == (2, 3.0)

    run(work())


def test_places_are_kept_free_for_those_that_have_few() -> None:
    """One caller alone has 20 requests sent to 16 slots, and 14 beside callers that asked within ten seconds."""

    async def work() -> None:
        clock = Clock()
        turns = FairQueue(20, 14, clock=clock)

        def fill(caller: Caller, most: int = 100) -> list[ExitStack]:
            """Let a caller ask; return what ends the turns that have come."""
            found = []
            for _ in range(most):
                with ExitStack() as asked:
                    if asked.enter_context(turns.enter(caller)).has_place:
                        found.append(asked.pop_all())
            return found

        many = fill(MANY_SENDER)
        assert len(many) == 20
        few = fill(FEW_SENDER, 4)
        assert len(few) == 4, "it has less than its part"
        for turn in few:
            turn.close()
        while not fill(MANY_SENDER, 1):  # until 14 are left, of which one is its own
            many.pop().close()
        assert len(many) == 13
        assert len(fill(FEW_SENDER, 2)) == 2, "places were kept free for it"
        turns._sent.clear()
        clock.now += 11
        assert len(fill(MANY_SENDER)) == 20, "nobody else has asked for long"
        assert len(turns._asked) == 1, "callers of former times are forgotten"

    run(work())


# --- admission -------------------------------------------------------------------------------------------------------


def test_a_caller_is_not_refused_for_the_requests_of_another() -> None:
    """Ten requests a second, and two seconds of patience: 20 of the one are let in, and some of the other."""
    clock = Clock()
    admission = Admission(2.0, clock=clock)
    for _ in range(100):
        admission.enter(0)
        clock.now += 0.1
        admission.leave(0, is_done=True)
    while admission.refuse(0, MANY_SENDER) is None:
        admission.enter(0, MANY_SENDER)
    assert admission.num_requests == 20
    for _ in range(9):
        assert admission.refuse(0, FEW_SENDER) is None
        admission.enter(0, FEW_SENDER)
    assert admission.refuse(0, MANY_SENDER) is not None
    while admission.refuse(0, FEW_SENDER) is None:
        admission.enter(0, FEW_SENDER)
        assert admission.num_requests < 60
    assert admission._of[FEW_SENDER.id] == 10, "a second of its own, and a second of the other's"


def test_many_requests_of_one_caller_leave_places_for_another() -> None:
    admission = Admission(1.0, clock=Clock())
    for _ in range(MANY):
        admission.enter(0, MANY_SENDER)
    assert admission.refuse(0, MANY_SENDER) == 1.0
    for _ in range(MANY // 2 - 1):
        assert admission.refuse(0, FEW_SENDER) is None
        admission.enter(0, FEW_SENDER)
    assert admission.num_requests > FEW
    assert admission.refuse(0, FEW_SENDER) is None
    admission.enter(0, FEW_SENDER)
    assert admission.refuse(0, FEW_SENDER) == 1.0
