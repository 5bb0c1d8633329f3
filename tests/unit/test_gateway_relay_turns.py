"""Streams to Triton whose requests wait for their caller's turn, and what ends them meanwhile."""

from __future__ import annotations

import asyncio

import grpc  # type: ignore[import-untyped]
import pytest

from shoal.gateway.core.refusals import RefusedError
from shoal.gateway.core.turns import Turns
from tests.support.relays import MINE, Bench
from tests.support.virtual_time import run, settle


def test_requests_wait_for_their_turn() -> None:
    async def work() -> None:
        bench = Bench()
        bench.traffic._turns["llm"] = Turns(2)
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
        assert not bench.traffic.turns("llm")._sent

    run(work())


def test_a_client_that_leaves_waits_for_no_turn() -> None:
    async def work() -> None:
        bench = Bench()
        bench.traffic._turns["llm"] = Turns(1)
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
        assert not bench.traffic.turns("llm")._sent
        assert not bench.traffic.turns("llm")._waiting

    run(work())


def test_a_stream_that_waits_for_its_first_turn_ends() -> None:
    async def work() -> None:
        bench = Bench()
        bench.traffic._turns["llm"] = Turns(1)
        with bench.traffic.turns("llm").enter(MINE), bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            await bench.send()
            await settle()
            assert not bench.upstream.fake.calls
            relay.end()
            with pytest.raises(RefusedError, match="ended while it had this request"):
                await reading
        assert bench.traffic.in_flight("llm") == 0
        assert not bench.traffic.turns("llm")._waiting

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
                    bench.traffic._turns["llm"] = Turns(1)
                    with bench.traffic.turns("llm").enter(MINE):
                        reading = asyncio.create_task(bench.read())
                        await bench.send()
                    with pytest.raises(RefusedError, match="ended while it had this request"):
                        await reading
                else:
                    with pytest.raises(RefusedError, match="ended while it had this request"):
                        await bench.send()
            assert bench.traffic.in_flight("llm") == 0

    run(work())
