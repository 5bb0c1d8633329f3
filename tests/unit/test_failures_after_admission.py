"""Whatever fails behind an admission, in any codec: what was admitted is released, and others are answered."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import aiohttp
import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from shoal.clients.client.calls import Call, Method, to_arrays
from shoal.clients.client.grpc_transport import to_grpc
from shoal.serving.gateway.callers.accounts import Account
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.key_file import KeyLimits
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.upstream import SERVICE
from shoal.serving.gateway.options import Addresses, Options
from tests.conftest import Scale
from tests.support.scripted_triton import CONFIGS, serve

_GATEWAY = "/shoal/serving/gateway/"
_MOST = 40  # calls and awaits behind an admission
# Code that counts or gives back: it may not fail, and so does little else.
_COUNTERS = "/core/admission.py", "/callers/quotas.py", "/core/fair_queue.py"
_RELEASES = {"__exit__", "__aexit__", "_settle", "release", "__del__", "_remove"}


class InjectedError(Exception):
    """A failure that nobody expects."""


class OneKey:
    """Two keys, by the text of the only header."""

    def __init__(self) -> None:
        self.accounts = {name: Account(name, KeyLimits(at_once=1)) for name in ("first", "second")}

    def find(self, address: str, authorizations: Any) -> Caller:
        """Return the caller that a header names."""
        name = next(iter(authorizations)).removeprefix("Bearer ")
        return Caller(name, address, digest=name, account=self.accounts[name])

    def is_valid(self, caller: Caller) -> bool:
        """Whether the key is valid: always."""
        return bool(caller.id)


class Injector:
    """Raises an error at one of the calls, and resumptions of tasks, behind the next admission."""

    def __init__(self) -> None:
        self.left, self.is_armed, self.num_raised = 0, False, 0

    def trace(self, frame: FrameType, event: str, _: Any) -> None:
        """Count the calls from code of the gateway (Python's interface)."""
        code, before = frame.f_code, frame.f_back
        if event != "call" or not self.left or code.co_name == "gc_callback":  # of hypothesis, at any moment
            return
        if not self.is_armed:
            self.is_armed = code.co_name == "enter" and code.co_filename.endswith(_COUNTERS[0])
            return
        if _GATEWAY not in code.co_filename and (before is None or _GATEWAY not in before.f_code.co_filename):
            return
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_name in _RELEASES or at.f_code.co_filename.endswith(_COUNTERS):
                return
            at = at.f_back
        self.left -= 1
        if not self.left:
            self.num_raised += 1
            raise InjectedError

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Let the ``number``-th call behind the next admission fail."""
        self.left, self.is_armed = number, False
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)


def _message(model: str, number: int = 0, **values: Any) -> bytes:
    spec = CONFIGS[model].spec
    call = Call(Method.INFER, model, to_arrays(spec.inputs, values, is_batched=spec.is_batched), request_id=f"{number}")
    return bytes(to_grpc(call).message.SerializeToString())


class Clients:
    """Requests of every kind to the ports of a service, as the owner of a key."""

    def __init__(self, at: Addresses, session: aiohttp.ClientSession, channel: Any) -> None:
        self._at, self._session, self._channel = at, session, channel
        chat = {"model": "llm", "messages": [{"role": "user", "content": "a"}]}
        whole = {"text_input": "a", "stream": False}
        self.kinds: dict[str, Callable[[str], Awaitable[bool]]] = {
            "infer": self._post("/v2/models/plain/infer", {
                "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}],
            }),
            "generate": self._post("/v2/models/plain/generate", {"X": 1.0}),
            "generate_stream": self._post("/v2/models/llm/generate_stream", whole),
            "chat": self._post("/v1/chat/completions", chat),
            "streamed chat": self._post("/v1/chat/completions", chat | {"stream": True}),
            "completions": self._post("/v1/completions", {"model": "llm", "prompt": ["a"] * 6}),
            "embeddings": self._post("/v1/embeddings", {"model": "embedder", "input": ["a"] * 20}),
            "ModelInfer": self._infer, "ModelStreamInfer": self._stream,
        }  # fmt: skip

    def _post(self, path: str, body: Any) -> Callable[[str], Awaitable[bool]]:
        async def ask(key: str) -> bool:
            headers = {"Authorization": f"Bearer {key}"}
            try:
                async with self._session.post(f"http://{self._at.http}{path}", json=body, headers=headers) as answer:
                    text = await answer.text()
                    return answer.status == 200 and "error" not in text
            except aiohttp.ClientError:
                return False

        return ask

    async def _infer(self, key: str) -> bool:
        call = self._channel.unary_unary(f"{SERVICE}ModelInfer")
        try:
            await call(_message("plain", X=[1.0]), metadata=[("authorization", f"Bearer {key}")])
        except grpc.aio.AioRpcError:
            return False
        return True

    async def _stream(self, key: str) -> bool:
        messages = [_message("llm", number, text_input=["a"]) for number in range(1)]
        call = self._channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        try:
            answers = [
                service_pb2.ModelStreamInferResponse.FromString(content)
                async for content in call(iter(messages), metadata=[("authorization", f"Bearer {key}")])
            ]
        except grpc.aio.AioRpcError:
            return False
        return len(answers) == 3 and not any(answer.error_message for answer in answers)


def count_held(gate: Gate, keys: OneKey) -> dict[str, Any]:
    """Return what is held of all that can run out, by name; nothing, if nothing is."""
    traffic, upstream = gate.traffic, gate.active.upstream
    assert upstream is not None
    held: dict[str, Any] = {
        "memory": traffic.memory.taken, "streams": traffic.streams.taken, "open": gate.requests.open,
        "sent": upstream.sent, "relays": upstream.streams,
        **{f"in flight {name}": traffic.in_flight(name) for name in ("", *traffic.models)},
        **{f"turns {name}": (turns._sent.total(), turns._waiting) for name, turns in traffic._queues.items()},
        **{f"at once {name}": account._at_once for name, account in keys.accounts.items()},
    }  # fmt: skip
    return {name: value for name, value in held.items() if value and value != (0, {})}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_what_was_admitted_is_released(scale: Scale) -> None:
    chance, injector, keys = random.Random(0), Injector(), OneKey()

    async def work() -> None:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            serve(Options(), keys) as (gate, at),
            aiohttp.ClientSession(timeout=timeout) as session,
            grpc.aio.insecure_channel(at.grpc) as channel,
        ):
            clients = Clients(at, session, channel)
            for name, ask in clients.kinds.items():
                assert await ask("first"), name
            for number in range(scale(500, full=2000)):
                name = chance.choice([*clients.kinds])
                place = chance.randint(1, _MOST)
                with injector.at(place):
                    await asyncio.wait_for(clients.kinds[name]("first"), 10)
                for _ in range(500):
                    if not count_held(gate, keys):
                        break
                    await asyncio.sleep(0.01)
                assert not count_held(gate, keys), (number, name, place)
                if number % 20 == 0:
                    for kind, ask in clients.kinds.items():
                        assert await ask("second"), (number, name, place, kind)
            assert injector.num_raised > scale(250, full=1000)

    logging.disable()  # records would keep the errors, and coroutines that were never awaited with them
    try:
        asyncio.run(work())
    finally:
        logging.disable(logging.NOTSET)
        gc.collect()


def test_headers_that_grpc_does_not_carry_hold_nothing() -> None:
    """With such a value, grpc's call never begins, and each one kept a place of the model for ever."""
    keys = OneKey()
    values = [b"caf\xe9", b"\xff\xfe", b"a\tb", b"\xf0\x9f\x90\x9f", b"00-\x80", b"x" * 4000]

    async def send(at: Addresses, path: str, header: str, value: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*at.http.split(":"))
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\nConnection: close\r\n".encode()
            + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{header}: ".encode() + value
            + b"\r\n\r\n" + body
        )  # fmt: skip
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer

    async def work() -> None:
        async with serve(Options(), keys) as (gate, at):
            for header in ("traceparent", "tracestate", "X-Request-Id"):
                for value in values:
                    for path, body in (
                        ("/v1/chat/completions", b'{"model":"llm","messages":[{"role":"user","content":"a"}]}'),
                        ("/v1/embeddings", b'{"model":"embedder","input":"a"}'),
                        ("/v2/models/llm/generate_stream", b'{"text_input":"a"}'),
                        ("/v2/models/plain/generate", b'{"X":1.0}'),
                    ):
                        answer = await send(at, path, header, value, body)
                        assert answer.startswith(b"HTTP/1.1 200"), (header, value, path, answer[:300])
            assert not count_held(gate, keys)

    asyncio.run(work())


def test_only_what_grpc_carries_is_passed_on() -> None:
    from shoal.serving.gateway.core.triton_errors import forwarded_metadata

    assert forwarded_metadata(
        [("traceparent", "a"), ("other", "b"), ("tracestate", "c\td"), ("x-request-id", " ~")]
    ) == (("traceparent", "a"), ("x-request-id", " ~"))
    assert (
        forwarded_metadata(None)
        == forwarded_metadata([("tracestate", ""), ("tracestate", "x" * 1025), ("traceparent", "é")])
        == ()
    )
    assert np.all(np.array([len(value) for _, value in forwarded_metadata([("tracestate", "x" * 1024)])]) == 1024)
