"""Streams to Triton whose requests wait for their caller's turn, and what ends them meanwhile."""

from __future__ import annotations

import asyncio

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2

from shoal.serving.gateway.core.fair_queue import FairQueue
from shoal.serving.gateway.refusals import RefusedError
from tests.support.fake_upstream import FakeCall
from tests.support.relays import MINE, Bench
from tests.support.virtual_time import run, settle


def test_requests_wait_for_their_turn() -> None:
    async def work() -> None:
        bench = Bench()
        bench.let_wait(2)
        with bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            ids = [await bench.send() for _ in range(4)]
            await relay.finish()
            await settle()
            assert (len(bench.call.written), bench.call.is_done_writing) == (2, False)
            assert bench.traffic.in_flight("llm") == 4
            for number, own_id in enumerate(ids):
                bench.call.say(own_id, is_final=True)
                await settle()
                assert len(bench.call.written) == min(4, number + 3)
            assert bench.call.is_done_writing
            bench.call.finish()
            await reading
        assert [answer.is_last for answer in bench.answers] == [True] * 4
        assert not bench.traffic.queue("llm")._sent

    run(work())


def test_a_client_that_leaves_waits_for_no_turn() -> None:
    async def work() -> None:
        bench = Bench()
        bench.let_wait(1)
        with bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            first, second = [await bench.send() for _ in range(2)]
            relay.leave()
            assert [request.own_id for request in relay.dropped] == [second]
            assert (list(relay.unanswered), bench.traffic.in_flight("llm")) == ([first], 1)
            await bench.send()  # it has left: dropped as well
            assert bench.traffic.in_flight("llm") == 1
            await relay.finish()
            bench.call.say(first, is_final=True)
            bench.call.finish()
            await reading
            assert relay.is_answered
        assert not bench.traffic.queue("llm")._sent
        assert not bench.traffic.queue("llm")._waiting

    run(work())


def test_a_stream_that_waits_for_its_first_turn_ends() -> None:
    async def work() -> None:
        bench = Bench()
        bench.let_wait(1)
        with bench.traffic.queue("llm").enter(MINE), bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            await bench.send()
            await settle()
            assert not bench.upstream.fake.calls
            relay.end()
            with pytest.raises(RefusedError, match="ended while it had this request"):
                await reading
        assert bench.traffic.in_flight("llm") == 0
        assert not bench.traffic.queue("llm")._waiting

    run(work())


def test_a_closed_connection_is_a_lost_request() -> None:
    async def work() -> None:
        for is_waiting in (False, True):
            bench = Bench()

            def fail(*_: object, **__: object) -> None:
                raise grpc.aio.UsageError("Channel is closed.")

            bench.upstream.fake.stream_stream = lambda _: fail  # type: ignore[assignment, method-assign, return-value]
            with bench.relay:
                if is_waiting:
                    bench.let_wait(1)
                    with bench.traffic.queue("llm").enter(MINE):
                        reading = asyncio.create_task(bench.read())
                        await bench.send()
                    with pytest.raises(RefusedError, match="ended while it had this request"):
                        await reading
                else:
                    with pytest.raises(RefusedError, match="ended while it had this request"):
                        await bench.send()
            assert bench.traffic.in_flight("llm") == 0

    run(work())


def test_a_client_that_leaves_while_all_its_requests_wait() -> None:
    """Nobody has said yet that no more come, as more prompts of its request would."""

    async def work() -> None:
        bench = Bench()
        with bench.let_wait(1).enter(MINE), bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            for _ in range(4):
                await bench.send()
            relay.leave()
            await asyncio.wait_for(reading, 1)
        assert bench.traffic.in_flight("llm") == 0

    run(work())


def test_a_request_that_is_being_sent_when_its_client_leaves_is_stopped() -> None:
    async def work() -> None:
        bench, sent = Bench(), asyncio.Event()

        async def write(self: FakeCall, message: bytes) -> None:
            if self.written:
                await sent.wait()
            self.written.append(message)

        turns = bench.let_wait(2)
        with pytest.MonkeyPatch.context() as patch, bench.relay as relay:
            patch.setattr(FakeCall, "write", write)
            reading = asyncio.create_task(bench.read())
            first = await bench.send()
            with turns.enter(MINE):
                second = await bench.send()
            await settle()  # its turn has come, and it waits within ``write``
            relay.leave()
            assert list(relay.unanswered) == [first, second]
            assert not bench.call.cancelled()
            sent.set()
            await relay.finish()
            for own_id in (first, second):
                bench.call.say(own_id, is_final=True)
            bench.call.finish()
            await reading
        assert not turns._sent

    run(work())


def test_requests_of_a_stream_keep_their_order() -> None:
    async def work() -> None:
        bench = Bench()
        turns = bench.let_wait(2)
        with bench.relay:
            reading = asyncio.create_task(bench.read())
            with turns.enter(MINE), turns.enter(MINE):
                early = await bench.send()
            late = await bench.send()  # its turn has come as well, before the other's task has run
            await settle()
            written = [service_pb2.ModelInferRequest.FromString(each).id for each in bench.call.written]
            assert written == [early, late]
            reading.cancel()

    run(work())


def test_streams_to_models_without_slots_take_no_turns() -> None:
    traffic = Bench().traffic
    traffic._queues["plain"] = FairQueue(1)
    assert traffic.stream_queue("plain")._width == 0
    assert traffic.queue("plain")._width == 1
