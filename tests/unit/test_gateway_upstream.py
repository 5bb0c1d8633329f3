"""Connections to Triton: what its statuses mean, over real sockets to a server that answers as it is asked to."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from aiohttp import web

from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.core.triton_errors import forwarded_metadata, is_cut, is_dead, reword
from shoal.serving.gateway.core.upstream import SERVICE, TritonStream, Upstream, judge_status
from shoal.serving.gateway.http.bodies import CHUNK
from shoal.serving.gateway.http.triton_http import TritonHttp
from shoal.serving.gateway.refusals import FailedError, LostError, RefusalReason, RefusedError
from tests.support.fake_upstream import FakeServer, FakeStream, FakeUpstream
from tests.support.virtual_time import run

CODE = grpc.StatusCode
DEAD = "Failed to process the request(s) for model 'a_0_0', message: Stub process 'a_0_0' is not healthy."


class Triton(grpc.GenericRpcHandler):  # type: ignore[misc]
    """HTTP and gRPC on loopback; ``seen`` are the headers of the last request."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.app = web.Application(client_max_size=2**30)
        self.app.router.add_route("*", "/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen, body = dict(request.headers), await request.read()
        if request.path == "/status":
            status, message = json.loads(body)
            return web.Response(status=status, text=message)
        if request.path == "/close":
            assert request.transport is not None
            request.transport.close()
        if request.path == "/packed":
            return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})
        return web.Response(body=body, headers={"X": request.rel_url.raw_path})

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            self.seen = dict(context.invocation_metadata())
            if details.method != f"{SERVICE}Echo":
                await context.abort(CODE.INTERNAL, "it failed\n\nAt:\n/models/m/1/model.py(3)")
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Upstream, Triton]]:
    triton, server, at = Triton(), grpc.aio.server(), FakeServer()
    server.add_generic_rpc_handlers((triton,))
    at.grpc_url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    runner = web.AppRunner(triton.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    at.http_url = "{}:{}".format(*runner.addresses[0])
    upstream = Upstream(at, TritonHttp(at))  # type: ignore[arg-type]
    try:
        yield upstream, triton
    finally:
        await upstream.close()
        await runner.cleanup()
        await server.stop(0)


@pytest.mark.parametrize(
    ("message", "instance"),
    [
        (DEAD, "a_0_0"),
        ("Stub process 'a_0_1' is not healthy.", "a_0_1"),
        ("in ensemble 'e', in ensemble 'd', Stub process 'a_0_0' is not healthy.", "a_0_0"),
        ("No label is Stub process 'a_0_0' is not healthy.", ""),  # a client's text in a model's error
        ("Stub process 'a_0_0' is not healthy. It is a text.", ""),
        ("", ""),
    ],
)
def test_a_process_that_triton_gave_up(message: str, instance: str) -> None:
    upstream = FakeUpstream()
    upstream.kill_unhealthy(message)
    assert upstream.server.killed == [instance] * bool(instance)  # type: ignore[attr-defined]


def play(scene: Callable[[Upstream, Triton], Awaitable[None]]) -> None:
    async def work() -> None:
        async with connected() as (upstream, triton):
            await scene(upstream, triton)

    asyncio.run(work())


def test_grpc() -> None:
    async def scene(upstream: Upstream, triton: Triton) -> None:
        assert await upstream.ask("Echo", b"x", [("traceparent", "1")]) == b"x"
        assert triton.seen["traceparent"] == "1"
        assert "triton-grpc-protocol-admin-key" not in triton.seen
        await upstream.ask("Echo", b"", is_admin=True)
        assert triton.seen["triton-grpc-protocol-admin-key"] == "key"
        with pytest.raises(FailedError, match=r"^it failed$") as caught:
            await upstream.ask("Fail", b"")
        assert (caught.value.status, caught.value.is_fault) == (CODE.INTERNAL, True)

    play(scene)


@pytest.mark.parametrize("num_bytes", [0, 5, CHUNK + 1, 3 * 2**20])
def test_http(num_bytes: int) -> None:
    async def scene(upstream: Upstream, triton: Triton) -> None:
        body = bytes(num_bytes)
        reply = await upstream.http.ask("POST", "/v2/%61?b=c", {"A": "b"}, body)
        assert (reply.content, reply.headers["X"]) == (body, "/v2/%61")
        assert triton.seen["A"] == "b"
        assert int(triton.seen.get("Content-Length", 0)) == num_bytes
        assert not {"Accept", "User-Agent", "Content-Type", "admin-key"} & triton.seen.keys()
        reply = await upstream.http.ask("POST", "/packed", {}, body, is_admin=True)
        assert gzip.decompress(reply.content) == body
        assert triton.seen["admin-key"] == "key"

    play(scene)


@pytest.mark.parametrize(
    ("status", "text", "expected", "message"),
    [
        (400, '{"error": "wrong"}', 400, "wrong"),
        (500, '{"error": "it failed\\n\\nAt:\\n/work"}', 500, "it failed"),
        (500, '{"error": "failed to parse the request JSON"}', 400, "failed to parse the request JSON"),
        (503, "no JSON", 503, "The server answered with status 503 and gave no reason."),
        (404, "[]", 404, "The server answered with status 404 and gave no reason."),
        (500, json.dumps({"error": DEAD}), None, "not healthy"),
    ],
)
def test_http_errors(status: int, text: str, expected: int | None, message: str) -> None:
    async def scene(upstream: Upstream, _: Triton) -> None:
        with pytest.raises(FailedError if expected else LostError, match=message) as caught:
            await upstream.http.ask("POST", "/status", {}, json.dumps([status, text]).encode())
        if isinstance(caught.value, FailedError):
            assert (caught.value.status, caught.value.message) == (expected, message)
            assert caught.value.is_fault == (status >= 500 and expected != 400)

    play(scene)


def test_a_connection_that_breaks_is_a_lost_request() -> None:
    async def scene(upstream: Upstream, _: Triton) -> None:
        with pytest.raises(LostError):
            await upstream.http.ask("GET", "/close", {})
        upstream.server.http_url = "127.0.0.1:1"
        with pytest.raises(LostError):
            await upstream.http.ask("GET", "/", {})

    play(scene)


@pytest.mark.parametrize(
    ("code", "details", "is_lost", "is_fault"),
    [
        (CODE.UNAVAILABLE, "Socket closed", True, False),
        (CODE.UNAVAILABLE, None, True, False),
        (CODE.UNAVAILABLE, "Request for unknown model: 'a' is not ready", False, True),
        (CODE.INTERNAL, DEAD, True, False),
        (CODE.INTERNAL, "it failed", False, True),
        (CODE.UNKNOWN, "it failed", False, True),
        (CODE.INVALID_ARGUMENT, "Socket closed", False, False),
        (CODE.INVALID_ARGUMENT, None, False, False),
    ],
)
def test_statuses(code: Any, details: str | None, is_lost: bool, is_fault: bool) -> None:
    judged = judge_status(code, details)
    assert isinstance(judged, LostError if is_lost else FailedError)
    assert is_cut(code, details or "") == is_lost
    assert is_lost or (isinstance(judged, FailedError) and judged.is_fault == is_fault)


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("Unable to parse JSON bytes array: attempt to access JSON non-string as string", "has to be a JSON string"),
        ("Unable to parse 'data': attempt to access JSON non-number as double", "not null, not a string$"),
        ("Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned int", "not a string$"),
        ("Unable to parse 'data': attempt to access JSON non-boolean as boolean", "has to be true or false$"),
        ("Unable to parse 'data': attempt to access JSON non-array as array", r"a list, such as \"data\": \[1, 2\]$"),
        (
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
            "not as many values as 'shape' says$",
        ),
        (
            "HTTP end point doesn't support models with decoupled transaction policy",
            "decoupled transaction policy: POST /v2/models/NAME/generate_stream, or gRPC's stream$",
        ),
        (
            "Expected [-1,1], got [1]. NOTE: Setting a non-zero max_batch_size in the model config requires a batch "
            "dimension to be prepended to each input shape. See the documentation.",
            r"got \[1\]\. The first number of a shape .* sent as \[1,1\]\. A model .*: 0 takes \[1\]\.$",
        ),
    ],
)
def test_clients_read_what_to_send(said: str, read: str) -> None:
    assert re.search(read, reword(said))


def test_words_of_triton() -> None:
    assert is_dead(DEAD)
    assert is_dead("Failed to process the request(s) for model 'a', message: Broken pipe")
    assert not is_dead("Broken pipe")
    assert reword("a\n\nAt:\n/work\nb") == "a"
    assert reword("[request id: <id_unknown>] no\n\nAt:\n/work\nb") == "no"
    assert reword("in ensemble 'a', [request id: 5] no") == "in ensemble 'a', [request id: 5] no"
    assert forwarded_metadata([("traceparent", "x"), ("authorization", "y")]) == (("traceparent", "x"),)
    assert forwarded_metadata(None) == ()
    assert RefusedError(RefusalReason.WRONG, "No.").client_message == "No."
    assert RefusedError(RefusalReason.BUSY, "No.", 0.2).client_message == "No. Try again in 1 s."


def test_waiting_until_a_server_is_idle() -> None:
    async def work() -> None:
        upstream, loop = FakeUpstream(), asyncio.get_running_loop()
        stream = FakeStream(ANYONE)
        upstream.streams = {stream}
        upstream.sent = {loop.create_future(): "a"}
        loop.call_later(2, upstream.sent.clear)
        start = loop.time()
        await upstream.wait_idle()
        assert loop.time() - start == pytest.approx(5.1, abs=0.15), "a stream is quiet after 5 s"
        upstream.end_streams(["b"])
        assert stream.ends == []
        upstream.end_streams()
        assert stream.ends == ["ended"]
        with pytest.raises(NotImplementedError):
            TritonStream(ANYONE).end()
        with pytest.raises(NotImplementedError):
            TritonStream(ANYONE).give_up()

    run(work())
