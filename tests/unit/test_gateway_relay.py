"""Streams to Triton: the ends of requests, of streams and of clients, and the requests to stop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import ExitStack
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2

from shoal.authoring.repository.call_graph import sort_decoupled
from shoal.clients.client.calls import WITH_FINAL
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.relay import Relay, RelayedAnswer
from shoal.serving.gateway.core.stream_requests import StreamRequest, StreamRequests
from shoal.serving.gateway.refusals import FailedError, LostError, RefusedError
from tests.support.configs import DECOUPLED, PYTHON, chain, make_configs
from tests.support.fake_upstream import FakeCall
from tests.support.relays import CONFIGS, MINE, Bench
from tests.support.virtual_time import run, settle

DEAD = "Failed to process the request(s) for model 'llm_0_0', message: Stub process 'llm_0_0' is not healthy."
CUT = grpc.StatusCode.UNAVAILABLE, "Socket closed"
CODE = grpc.StatusCode


def begin(requests: StreamRequests, *request: Any) -> StreamRequest:
    """Return the record of a request that does not end."""
    return ExitStack().enter_context(requests.begin(*request))


def test_answers_until_the_last_one() -> None:
    async def work() -> None:
        bench, held = Bench(), Reservation(Bench().traffic.memory, MINE)
        held.grow(10)
        with bench.relay as relay:
            assert bench.upstream.streams == {relay}
            reading = asyncio.create_task(bench.read())
            await settle()
            own_id = await bench.send(held=held)
            assert bench.call.metadata == [("traceparent", "x")]
            message = service_pb2.ModelInferRequest.FromString(bench.call.written[0])
            assert message.id == own_id
            assert message.parameters[WITH_FINAL].bool_param
            assert (relay.num_bytes, relay.models, bench.traffic.in_flight("llm")) == (10, {"llm"}, 1)
            start = relay.unanswered[own_id].sent = asyncio.get_running_loop().time()
            await asyncio.sleep(2)
            bench.call.say(own_id, is_final=False)
            await settle()
            assert (len(bench.answers), relay.is_answered, held.num_bytes) == (1, False, 10)
            assert bench.active.answered == relay.moved == start + 2
            await asyncio.sleep(1)
            bench.call.say(own_id, is_final=True, outputs=0)
            await settle()
            assert (relay.is_answered, held.num_bytes, bench.traffic.in_flight("llm")) == (True, 0, 0)
            assert relay.settled.is_set()
            assert [(each.is_last, each.is_empty, each.lost) for each in bench.answers] == [
                (False, False, None), (True, True, None),
            ]  # fmt: skip
            assert bench.requests.first_answers == {"llm": [1, 2.0]}
            await relay.finish()
            assert bench.call.is_done_writing
            bench.call.finish()
            await reading
        assert not bench.upstream.streams

    run(work())


def test_two_requests_of_one_stream_use_one_call() -> None:
    async def work() -> None:
        bench = Bench()
        with bench.relay as relay:
            first, second = await bench.send(), await bench.send("both", request_id="")
            left = relay.unanswered[first]
            assert len(bench.upstream.fake.calls) == 1
            assert len(bench.call.written) == 2
            reading = asyncio.create_task(bench.read())
            error = f"[request id: {second}] {second} is wrong\nAt:\n/models/m/1/model.py(1)"
            bench.call.say(second, error=error, outputs=0, is_final=True)
            bench.call.say("unknown", error="what is this\n\nAt:\n/models/m/1/model.py")
            await settle()
            assert list(relay.unanswered) == [first]
            assert bench.answers[0].request is not None
            assert bench.answers[0].message.error_message == "<id_unknown> is wrong"
            assert (bench.answers[1].request, bench.answers[1].is_last) == (None, False)
            assert bench.answers[1].message.error_message == "what is this"
            assert not bench.active.suspected
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        assert bench.call.cancelled(), "the stream was left with a request in flight"
        assert not left.admitted.is_done, "what was left tells nothing of the model's rate"
        assert bench.traffic.num_requests == 0

    run(work())


def test_models_that_are_not_decoupled_get_a_call_of_their_own() -> None:
    async def work() -> None:
        bench, delivered = Bench(), list[RelayedAnswer]()

        async def deliver(answer: RelayedAnswer) -> None:
            delivered.append(answer)

        with bench.relay as relay:
            relay.deliver = deliver
            reading = asyncio.create_task(bench.read())
            llm, plain = await bench.send(), await bench.send("plain")
            await bench.send("pair")
            await bench.send("both")
            first, second = bench.upstream.fake.calls
            assert (len(first.written), len(second.written)) == (2, 2)
            second.say(plain)
            first.say(llm, is_final=False)
            await settle()
            assert [each.request and each.request.model for each in (*bench.answers, *delivered)] == ["llm", "plain"]
            assert (relay.num_received, len(relay.unanswered)) == (1, 3)
            await relay.finish()
            assert first.is_done_writing
            assert second.is_done_writing
            first.finish()
            await settle()
            assert not reading.done()  # the other call has not ended
            second.finish()
            await reading

    run(work())


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("status", "kind"), [((CODE.INTERNAL, "broken"), FailedError), (CUT, RefusedError)])
def test_the_end_of_one_of_two_calls_ends_the_stream(is_first: bool, status: Any, kind: type[Exception]) -> None:
    async def work() -> None:
        bench, unheard = Bench(), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        with bench.relay:
            reading = asyncio.create_task(bench.read())
            await bench.send()
            await bench.send("plain")
            await settle()
            bench.upstream.fake.calls[0 if is_first else 1].finish(*status)
            with pytest.raises(kind):
                await reading
        await settle()
        assert bench.upstream.fake.calls[1 if is_first else 0].cancelled()
        assert bench.traffic.num_requests == 0
        assert bool(bench.active.suspected) is (status is CUT)  # the other call, which we cancel, is not lost
        gc.collect()
        assert not unheard

    run(work())


def test_a_model_that_fails_while_its_version_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        bench = Bench()

        async def ask(*_: Any, **__: Any) -> bytes:
            bench.active.block(["llm"], "it hangs")
            return b""

        monkeypatch.setattr(bench.upstream, "ask", ask)
        with bench.relay as relay:
            with pytest.raises(RefusedError, match="llm is unavailable: it hangs"):
                await relay.send("llm", "mine", b"", num_bytes=10, version="1")
            assert not bench.upstream.fake.calls

    run(work())


def test_a_version_that_the_server_does_not_have_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        bench, asked = Bench(), list[str]()

        async def ask(_: str, request: bytes, *, is_admin: bool) -> bytes:
            assert is_admin
            asked.append(service_pb2.ModelMetadataRequest.FromString(request).version)
            if asked[-1] == "3":
                raise LostError
            if asked[-1] != "1":
                raise FailedError(CODE.NOT_FOUND if asked[-1] == "9" else CODE.INTERNAL, "no")
            return b""

        monkeypatch.setattr(bench.upstream, "ask", ask)
        with bench.relay as relay:
            for version, message in (
                ("9", "llm has no version '9'"), ("2", "^no$"), ("3", "ended while"), ("1x", "no version '1x'"),
                ("+1", "no version"), ("01", "no version"), ("1" * 20, "no version"),
            ):  # fmt: skip
                with pytest.raises(RefusedError, match=message):
                    await relay.send("llm", "mine", b"", num_bytes=10, version=version)
            assert not bench.upstream.fake.calls
            for _ in range(2):
                assert await relay.send("llm", "mine", b"", num_bytes=10, version="1")
        assert asked == ["9", "2", "3", "1"]

    run(work())


def test_a_model_that_died_is_reported_in_the_answer() -> None:
    async def work() -> None:
        bench = Bench()
        with bench.relay:
            own_id = await bench.send()
            bench.call.say(own_id, error=DEAD)
            bench.call.say("unknown", error=DEAD)
            bench.call.finish()
            await bench.read()
        known, unknown = bench.answers
        assert bench.active.suspected
        assert known.lost is not None
        assert known.message.error_message == known.lost.client_message
        assert "llm ended while it had this request. Try again in 5 s." in known.lost.client_message
        assert unknown.lost is not None
        assert "this stream" in unknown.lost.message

    run(work())


@pytest.mark.parametrize("is_raised", [True, False])
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (CUT, RefusedError, "The process of llm ended while it had this request."),
        ((CODE.CANCELLED, ""), RefusedError, "The process of llm ended"),
        ((CODE.INTERNAL, "no\n\nAt:\n/work"), FailedError, "^no$"),
        ((CODE.OK, ""), None, ""),
    ],
)
def test_the_status_of_a_stream(status: Any, error: Any, message: str, is_raised: bool) -> None:
    async def work() -> None:
        bench = Bench()
        with bench.relay:
            await bench.send()
            bench.call.finish(*status, is_raised=is_raised)
            if error is None:
                await bench.read()
            else:
                with pytest.raises(error, match=message):
                    await bench.read()
        assert bool(bench.active.suspected) == (error is RefusedError)

    run(work())


def test_the_service_ends_a_stream() -> None:
    async def work() -> None:
        bench = Bench()
        with bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            await bench.send()
            await settle()
            await bench.active.close("it is stopping")
            relay.end()
            with pytest.raises(RefusedError, match="is stopping, and ended this request to llm"):
                await reading
            assert relay.has_ended
            await relay.finish()  # the call has ended: nothing to say
            assert not bench.call.is_done_writing

    run(work())


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_stream_with_nothing_in_flight_ends_by_sending_no_more(is_answered: bool) -> None:
    async def work() -> None:
        bench, said = Bench(), list[str]()
        bench.relay.stop_sending = lambda: said.append("stop")
        with bench.relay as relay:
            if is_answered:
                own_id = await bench.send("plain")
                bench.call.say(own_id)
                bench.call.finish()
            relay.end()
            if is_answered:
                assert bench.call.cancelled(), "an answer is missing until it is read"
                return
            assert said == ["stop"]
            await relay.finish()
            await bench.read()  # nothing was sent: it ends at once
            assert not bench.answers

    run(work())


def test_a_stream_that_has_ended_needs_no_collector() -> None:
    """Full collections are seldom, and a stream holds its request, its call and their buffers."""

    class Owner:
        relay: Relay

        def drop(self) -> None: ...

    async def work() -> None:
        bench, owner = Bench(), Owner()
        relay = owner.relay = bench.relay
        with relay:
            relay.drop = relay.stop_sending = owner.drop
            with relay.write():
                pass
        found = weakref.ref(relay)
        del relay, bench, owner
        assert found() is None

    gc.disable()
    try:
        run(work())
    finally:
        gc.enable()


def test_answered_and_ended() -> None:
    async def work() -> None:
        bench, said = Bench(), list[str]()
        bench.relay.stop_sending = lambda: said.append("stop")
        with bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            bench_id = await bench.send("plain")
            bench.call.say(bench_id)
            await settle()
            relay.end()
            assert (said, bench.call.cancelled()) == (["stop"], False)
            bench.call.finish()
            await relay.finish()  # refused by the call, which has ended
            await reading

    run(work())


@pytest.mark.parametrize(("model", "num_stops"), [("llm", 1), ("both", 1), ("plain", 0), ("pair", 0)])
def test_models_are_asked_to_stop_until_the_last_answer(model: str, num_stops: int) -> None:
    async def work() -> None:
        bench = Bench()
        with bench.relay as relay:
            reading = asyncio.create_task(bench.read())
            own_id = await bench.send(model)
            relay.leave()
            relay.leave()
            await settle()
            assert len(bench.stops) == num_stops
            await asyncio.sleep(0.5)
            assert len(bench.stops) == 3 * num_stops
            bench.call.say(own_id, is_final=True)
            await asyncio.sleep(10)
            assert len(bench.stops) == 3 * num_stops
            assert not bench.requests._stopping
            for stop in bench.stops:
                message = service_pb2.ModelInferRequest.FromString(stop.written[0])
                assert (message.model_name, message.id) == ("llm", own_id)
                given = {each.name: (each.datatype, list(each.shape)) for each in message.inputs}
                assert given == {"PROMPT": ("BYTES", [1, 2]), "stop": ("BOOL", [1])}
                assert list(message.raw_input_contents) == [bytes(8), b"\1"]
            bench.call.finish()
            await reading

    run(work())


def test_what_is_sent_after_the_client_left_is_stopped_too() -> None:
    async def work() -> None:
        bench, dropped = Bench(), list[str]()
        bench.relay.drop = lambda: dropped.append("dropped")
        with bench.relay as relay:
            relay.give_up()
            assert (relay.is_unread, relay.has_left, dropped) == (True, True, ["dropped"])
            await bench.send()
            FakeCall.errors = (grpc.aio.AioRpcError(CODE.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()),)
            try:
                await settle()
                assert len(bench.stops) == 1
                await asyncio.sleep(0.3)
                assert len(bench.stops) == 2, "a stop request that fails is sent again"
            finally:
                FakeCall.errors = ()

    run(work())


def make_stop(*, is_set: bool = True) -> bytes:
    message = service_pb2.ModelInferRequest()
    message.inputs.add(name="stop", datatype="BOOL", shape=[1, 1])
    message.raw_input_contents.append(bytes([is_set]))
    return bytes(message.SerializeToString())


def test_a_clients_own_stop_request() -> None:
    """It ends the caller's requests of its id, on other streams too, and no others."""

    async def work() -> None:
        bench = Bench()
        other, foreign = (
            Relay(caller, bench.upstream, bench.active, bench.traffic, bench.requests, [])
            for caller in (MINE, Caller("other"))
        )
        with bench.relay as relay, other, foreign:
            for each in (relay, foreign):
                assert await each.send("llm", "same", b"", num_bytes=1)
            await relay.send("llm", "another", b"", num_bytes=1)
            await other.send("llm", "elsewhere", b"", num_bytes=1)
            before = len(bench.upstream.fake.calls)
            assert not await other.send("llm", "same", make_stop(), num_bytes=1)
            await settle()
            (stop,) = bench.upstream.fake.calls[before:]
            assert service_pb2.ModelInferRequest.FromString(stop.written[0]).id == next(iter(relay.unanswered))
            for _ in range(5):
                assert not await other.send("llm", "same", make_stop(), num_bytes=1)
            assert len(bench.requests._stopping) == 1, "one is enough"
            assert await other.send("llm", "same", make_stop(is_set=False), num_bytes=1)
            for request_id, words in [("unknown", "id 'unknown' to llm is in flight"), ("", "an empty id")]:
                with pytest.raises(RefusedError, match=words):
                    await other.send("llm", request_id, make_stop(), num_bytes=1)

    run(work())


def test_a_refused_request_is_not_sent() -> None:
    async def work() -> None:
        bench = Bench()
        with bench.relay as relay:
            bench.active.block(["llm"], "it died")
            with pytest.raises(RefusedError, match="it died"):
                await bench.send()
            assert (relay.num_sent, relay.unanswered, bench.traffic.in_flight("llm")) == (0, {}, 0)

    run(work())


def test_an_ensembles_own_policy_does_not_count() -> None:
    """Triton replaces it."""
    configs = make_configs(plain=PYTHON, odd=chain("plain", "plain") + DECOUPLED, outer=chain("odd", "odd"))
    assert StreamRequests(configs).models == []
    assert not any(sort_decoupled(configs).values())


def test_no_two_requests_have_the_same_id() -> None:
    requests = StreamRequests(CONFIGS)
    assert requests.models == ["both", "llm"]
    assert not requests.is_decoupled("plain")
    assert len({begin(requests, "llm", "same").own_id for _ in range(10)}) == 10
    assert begin(requests, "llm", "").meter is not None
    assert begin(requests, "plain", "").meter is None


@pytest.mark.parametrize(
    ("switch", "is_raw", "numbers"),
    [(False, True, (1, 3, 6)), (True, True, (1, 2, 3)), (True, False, (1, 2, 3)), (None, True, (1, 3, 6))],
)
def test_tokens_are_counted_in_all_or_by_answer(switch: bool | None, is_raw: bool, numbers: tuple[int, ...]) -> None:
    """Six tokens in three answers."""
    message = service_pb2.ModelInferRequest()
    message.inputs.add(name="text_input", datatype="BYTES").contents.bytes_contents.append(b"return_num_output_tokens")
    if switch is not None:
        added = message.inputs.add(name="return_num_output_tokens", datatype="BOOL")
        added.contents.bool_contents.append(switch)
    if is_raw:
        for tensor in message.inputs:
            tensor.ClearField("contents")
        message.raw_input_contents.extend([b"text", bytes([switch or 0])][: len(message.inputs)])
    requests = StreamRequests(CONFIGS)
    meter = begin(requests, "llm", "", message.SerializeToString()).meter
    assert meter is not None
    for number in numbers:
        answer = service_pb2.ModelInferResponse()
        for name, count in (("num_input_tokens", 4), ("num_output_tokens", number)):
            answer.outputs.add(name=name)
            answer.raw_output_contents.append(count.to_bytes(4, "little"))
        meter.read(answer)
    assert requests.tokens.counts == {("llm", "input"): 4, ("llm", "output"): 6}


@pytest.mark.parametrize(
    ("model", "error", "is_final", "is_last"),
    [
        ("plain", "", None, True),
        ("llm", "", None, False),
        ("llm", "", True, True),
        ("llm", "", False, False),
        ("llm", "wrong", None, True),
        ("llm", "wrong", False, False),
    ],
)
def test_the_last_answer(model: str, error: str, is_final: bool | None, is_last: bool) -> None:
    async def work() -> None:
        call = FakeCall()
        call.say("x", is_final=is_final, error=error)
        message = service_pb2.ModelStreamInferResponse.FromString(await call.read())
        requests = StreamRequests(CONFIGS)
        assert requests.count(begin(requests, model, ""), message) == is_last

    run(work())
