"""The listener over real sockets on loopback: who is counted, who is closed, and when."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from shoal.errors import SetupError
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.http import listener
from shoal.serving.gateway.http.certificates import Certificates
from shoal.serving.gateway.http.listener import Listener, PageGuard, listen
from shoal.serving.gateway.http.routes import find_status
from shoal.serving.gateway.options import IDLE_SECONDS, Limits, Options
from shoal.serving.gateway.refusals import RefusedError
from tests.support.pairs import make_pair
from tests.support.virtual_time import run, settle

REQUEST = b"GET /PATH HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENCE = 0.005  # seconds of real time for loopback, before the clock jumps
Scene = Callable[["Bench"], Awaitable[None]]


class Bench:
    """A listener whose application answers ``/`` at once and ``/slow`` after 100 s, in virtual time."""

    def __init__(self, limits: Limits, most: int, tls: Certificates | None = None) -> None:
        app = web.Application(middlewares=[self._refuse])
        app.router.add_get("/", self._answer)
        app.router.add_get("/slow", self._answer_late)
        app.router.add_get("/large", self._answer_at_length)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setblocking(False)
        self.listener = Listener(app, limits, most, PageGuard([]), tls)

    @staticmethod
    @web.middleware
    async def _refuse(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer what the listener refuses, as ``HttpRoutes`` does."""
        try:
            return await handler(request)
        except RefusedError as refused:
            return web.Response(status=find_status(refused))

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text="answered")

    async def _answer_late(self, _: web.Request) -> web.Response:
        await asyncio.sleep(100)
        return web.Response(text="late")

    async def _answer_at_length(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(bytes(2**20))
        return response

    @property
    def num_open(self) -> int:
        return self.listener._connections.taken

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.listening.getsockname(), **options)

    async def play(self, scene: Scene) -> None:
        running = asyncio.create_task(self.listener.run(self.listening))
        await settle()
        try:
            await scene(self)
        finally:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert self.listening.fileno() == -1


def serve(scene: Scene, limits: Limits | None = None, most: int = 8, tls: Certificates | None = None) -> None:
    async def work() -> None:
        await Bench(limits or Limits(), most, tls).play(scene)

    run(work(), PATIENCE)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def is_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return not await reader.read(1)
    except ConnectionResetError:
        return True


async def seconds_until_end(reader: asyncio.StreamReader) -> float:
    start = asyncio.get_running_loop().time()
    while not await is_ended(reader):
        pass
    return asyncio.get_running_loop().time() - start


def test_connections_over_the_share_are_closed_at_once() -> None:
    async def scene(bench: Bench) -> None:
        held = [await bench.connect() for _ in range(4)]
        await asyncio.sleep(0.1)
        assert bench.num_open == 4
        reader, writer = await bench.connect()
        assert await seconds_until_end(reader) < 1
        writer.close()
        held[0][1].close()
        await asyncio.sleep(0.1)
        assert bench.num_open == 3
        reader, writer = await bench.connect()
        writer.write(REQUEST.replace(b"PATH", b""))
        head = await read_head(reader)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"Server: shoal\r\n" in head
        for _, each in (*held, (reader, writer)):
            each.close()
        await asyncio.sleep(0.1)
        assert bench.num_open == 0

    serve(scene, Limits(client_share=0.5))


def test_a_trusted_proxy_may_use_all_connections() -> None:
    async def scene(bench: Bench) -> None:
        held = [await bench.connect() for _ in range(8)]
        await asyncio.sleep(0.1)
        assert bench.num_open == 8
        reader, writer = await bench.connect()
        assert await seconds_until_end(reader) < 1
        for _, each in (*held, (reader, writer)):
            each.close()

    serve(scene, Limits(client_share=0.5, trusted_proxies=("127.0.0.1",)))


def test_what_cannot_be_read_is_not_repeated() -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        writer.write(REQUEST.removesuffix(b"\r\n") + b"Authorization: Bearer shoal_secret\x01\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.0 400 ")
        assert b"\r\nServer: shoal\r\n" in answer
        assert answer.endswith(b'{"error": "The request cannot be read."}')
        writer.close()

    serve(scene)


@pytest.mark.parametrize("sent", [b"", REQUEST[:10]])
def test_a_head_must_arrive_in_time(sent: bytes) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        writer.write(sent)
        assert await seconds_until_end(reader) == pytest.approx(5.5, abs=1)
        await asyncio.sleep(0.1)
        assert bench.num_open == 0
        writer.close()

    serve(scene, Limits(head_seconds=5.0))


def test_an_answer_may_take_long_and_an_idle_connection_ends() -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        start = asyncio.get_running_loop().time()
        writer.write(REQUEST.replace(b"PATH", b"slow"))
        await read_head(reader)
        assert await reader.readexactly(4) == b"late"
        assert asyncio.get_running_loop().time() - start >= 100
        await asyncio.sleep(IDLE_SECONDS - 10)  # and the next request has a time of its own for its head
        writer.write(REQUEST[:10])
        assert await seconds_until_end(reader) == pytest.approx(5.5, abs=1)
        writer.close()
        reader, writer = await bench.connect()
        writer.write(REQUEST.replace(b"PATH", b""))
        await read_head(reader)
        assert await reader.readexactly(8) == b"answered"
        assert await seconds_until_end(reader) == pytest.approx(IDLE_SECONDS, abs=2)
        writer.close()

    serve(scene, Limits(head_seconds=5.0))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_head_that_arrives_byte_by_byte_has_no_more_time(is_first: bool) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        if not is_first:
            writer.write(REQUEST.replace(b"PATH", b""))
            await read_head(reader)
            assert await reader.readexactly(8) == b"answered"
            await asyncio.sleep(20)
        start = asyncio.get_running_loop().time()
        for number in range(30):
            if bench.num_open == 0:
                break
            writer.write(REQUEST[number : number + 1])
            await asyncio.sleep(0.9)
        assert asyncio.get_running_loop().time() - start == pytest.approx(6, abs=1.5)
        writer.close()

    serve(scene, Limits(head_seconds=5.0))


def test_an_answer_must_be_read() -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect(limit=2**10)
        writer.write(REQUEST.replace(b"PATH", b"large"))
        await read_head(reader)
        await asyncio.sleep(5)
        assert bench.num_open == 1
        await asyncio.sleep(95)  # on a busy machine, the client's kernel takes more at first, bit by bit
        assert bench.num_open == 0
        writer.close()

    serve(scene, Limits(unread_seconds=10.0))


def test_pages_of_other_sites_are_refused() -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        writer.write(REQUEST.replace(b"PATH", b"").replace(b"localhost", b"evil.example"))
        assert (await read_head(reader)).startswith(b"HTTP/1.1 403")
        writer.close()

    serve(scene)


@pytest.mark.parametrize("host", ["evil.example", "localhost/x", "localhost?x", "localhost#x", "me@localhost"])
@pytest.mark.parametrize("target", ["/", "http://localhost/", "http://evil.example/", "*", "//", "/%2F", "/.."])
def test_no_method_lets_a_foreign_host_in(host: str, target: str) -> None:
    async def scene(bench: Bench) -> None:
        for method in ("GET", "HEAD", "OPTIONS", "TRACE", "CONNECT", "POST", "BREW"):
            reader, writer = await bench.connect()
            writer.write(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            head = await reader.readline()
            assert head.split()[1:2] in ([b"400"], [b"403"], [b"405"], []), (method, head)
            writer.close()

    serve(scene)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(*make_pair(tmp_path_factory.mktemp("tls")))


def test_a_connection_in_the_middle_of_a_handshake_counts_and_ends(tls: Certificates) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect()
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a client's first message
        await asyncio.sleep(0.1)
        assert bench.num_open == 1
        assert await seconds_until_end(reader) == pytest.approx(5.5, abs=1)
        await asyncio.sleep(1)
        assert bench.num_open == 0
        writer.close()
        reader, writer = await bench.connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")  # not a handshake
        assert await seconds_until_end(reader) < 1
        await asyncio.sleep(0.1)
        assert bench.num_open == 0
        writer.close()

    serve(scene, Limits(head_seconds=5.0), tls=tls)


def test_a_reset_in_the_middle_of_a_handshake_keeps_the_time_outs_of_others(tls: Certificates) -> None:
    async def scene(bench: Bench) -> None:
        _, writer = await bench.connect()
        await asyncio.sleep(0.1)
        reset = struct.pack("ii", 1, 0)  # closing sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()
        await asyncio.sleep(10)
        assert bench.num_open == 0
        reader, writer = await bench.connect()
        assert await seconds_until_end(reader) == pytest.approx(5.5, abs=1)
        writer.close()
        await asyncio.sleep(1)
        assert bench.num_open == 0

    serve(scene, Limits(head_seconds=5.0), tls=tls)


def test_handshakes_by_half_keep_nobody_waiting(tls: Certificates) -> None:
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    async def scene(bench: Bench) -> None:
        halves = [await bench.connect() for _ in range(100)]
        for _, writer in halves:
            writer.write(b"\x16\x03\x01\x02\x00\x01")
        await asyncio.sleep(0.1)
        assert bench.num_open == 100
        reader, writer = await bench.connect(ssl=client)
        writer.write(REQUEST.replace(b"PATH", b""))
        assert (await read_head(reader)).startswith(b"HTTP/1.1 200")
        assert bench.num_open == 101, "the others are still in the middle of theirs"
        for _, each in (*halves, (reader, writer)):
            each.transport.abort()
        await asyncio.sleep(1)

    serve(scene, most=256, tls=tls)


def test_a_request_after_a_handshake(tls: Certificates) -> None:
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    async def scene(bench: Bench) -> None:
        reader, writer = await bench.connect(ssl=client)
        writer.write(REQUEST.replace(b"PATH", b""))
        assert (await read_head(reader)).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        await asyncio.sleep(0.1)

    serve(scene, tls=tls)


@pytest.mark.parametrize(("number", "seconds"), [(errno.EMFILE, 1.0), (errno.ECONNABORTED, 0.0)])
def test_errors_of_accept(monkeypatch: pytest.MonkeyPatch, number: int, seconds: float) -> None:
    async def work() -> None:
        bench, loop = Bench(Limits(), 8), asyncio.get_running_loop()

        async def accept(_: socket.socket) -> Any:
            raise OSError(number, "no")

        monkeypatch.setattr(loop, "sock_accept", accept)
        start = loop.time()
        await bench.listener._accept(bench.listening)
        assert loop.time() - start == pytest.approx(seconds)
        bench.listening.close()

    run(work())


def test_a_fault_while_accepting_leaves_the_port_open(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [ValueError("unexpected")]

    def find(client: str, address: str) -> Caller:
        if faults:
            raise faults.pop()
        return Caller(client, address)

    async def scene(bench: Bench) -> None:
        monkeypatch.setattr(listener, "Caller", find)
        reader, writer = await bench.connect()
        assert await is_ended(reader)
        writer.close()
        reader, writer = await bench.connect()
        writer.write(REQUEST.replace(b"PATH", b""))
        assert (await read_head(reader)).startswith(b"HTTP/1.1 200")
        writer.close()

    serve(scene)
    assert not faults


def test_a_port_that_is_taken() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(SetupError, match=f"Port {port} cannot be used"):
                async with listen(web.Application(), f"127.0.0.1:{port}", Options(is_open=True)):
                    pass

    run(work())


def test_listening_at_an_address() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        async with listen(web.Application(), f"127.0.0.1:{port}", Options(is_open=True)):
            await settle()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST.replace(b"localhost", b"example.org"))
            assert (await read_head(reader)).startswith(b"HTTP/1.1 404")
            writer.close()

    run(work(), PATIENCE)
