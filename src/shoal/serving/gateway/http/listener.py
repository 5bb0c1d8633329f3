"""HTTP listener: connection limits per client address, time-outs for silent clients, and no entry for web pages."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import re
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shoal.errors import SetupError
from shoal.serving.gateway.addresses import find_client, read_address
from shoal.serving.gateway.callers.callers import ANYONE, Caller
from shoal.serving.gateway.callers.quotas import Quota
from shoal.serving.gateway.http.certificates import Certificates
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.options import CLOSING_SECONDS, IDLE_SECONDS, Limits, Options, is_loopback
from shoal.serving.gateway.refusals import RefusalReason, RefusedError

_PERIOD = 1.0  # seconds between two checks of all connections
_UNSENT = 2**17  # bytes of answers that wait in the kernel to be sent, for each connection
# of all answers: no name and version of the HTTP library, and no types that browsers guess
_HEADERS = {"Server": "shoal", "X-Content-Type-Options": "nosniff"}
_TCP_INFO = struct.Struct("24xI92xQ")  # of Linux's tcp_info: tcpi_unacked and tcpi_bytes_acked
_UNSENT_BYTES = struct.Struct("i")
_BACKLOG = 1024  # connections that wait to be accepted


class Connection(asyncio.Protocol):
    """A client's connection: forwards asyncio's events to aiohttp's protocol, and enforces the time-outs.

    It counts from the moment when it was accepted, before any handshake; the head of the first request must arrive
    within ``head_seconds`` of that.
    """

    def __init__(self, behind: asyncio.Protocol, limits: Limits, accepted: socket.socket) -> None:
        self._behind, self._limits, self._socket = behind, limits, accepted
        self._transport: asyncio.Transport | None = None
        self._is_idle = False
        self._read, self._read_at = 1, time.monotonic()
        self._deadline = time.monotonic() + limits.head_seconds
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Forward the beginning of the connection, after a handshake if there is one."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._behind.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Forward bytes. The first bytes of a request start the time-out for the request's head."""
        if self._is_idle:
            self._is_idle = False
            self._deadline = time.monotonic() + self._limits.head_seconds
        self._behind.data_received(data)

    def begin(self) -> None:
        """Stop the time-out for the request's head. Called when the head is complete."""
        self._deadline = float("inf")

    def end(self) -> None:
        """Start the time-out for idle connections. Called when the request is answered."""
        self._is_idle, self._deadline = True, time.monotonic() + IDLE_SECONDS

    def look(self, now: float) -> None:
        """Abort the connection if its client has sent or read nothing for too long."""
        is_unread = self.unread_seconds(now) > self._limits.unread_seconds
        if is_unread or now > self._deadline:
            if is_unread or not self._is_idle:
                log.warning("A connection was closed: its client neither sent nor read.", extra={"most": 1})
            if self._transport is not None:
                self._transport.abort()
            else:  # in the middle of a handshake
                with contextlib.suppress(OSError):  # the client has reset it
                    self._socket.shutdown(socket.SHUT_RDWR)

    def unread_seconds(self, now: float | None = None, *, is_by_choice: bool = False) -> float:
        """Return for how many seconds the client has read nothing of what was sent; 0 if it has read everything.

        The kernel knows: a client that does not read confirms no more bytes once its own kernel's buffer is full.
        ``is_by_choice``: 0, too, while packets are not confirmed, which may be lost on their way.
        """
        now = time.monotonic() if now is None else now
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            (unsent,) = _UNSENT_BYTES.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_UNSENT_BYTES.size)))
        except OSError:  # the connection has ended
            return 0.0
        on_the_way, read = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
        read = read or -unsent  # some kernels do not count
        if read != self._read or not unsent:
            self._read, self._read_at = read, now
        return 0.0 if is_by_choice and on_the_way else now - self._read_at

    def eof_received(self) -> bool | None:
        """Forward the end of the client's data."""
        return self._behind.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Forward the end of the connection, which no longer counts as open."""
        self.ended.set()
        self._behind.connection_lost(error)

    def pause_writing(self) -> None:
        """Forward back-pressure: the client reads too slowly."""
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        """Forward the end of back-pressure."""
        self._behind.resume_writing()


@web.middleware
async def mark_busy(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Mark the connection as busy while a request is handled."""
    transport = request.transport
    connection = transport.get_protocol() if transport is not None else None
    if not isinstance(connection, Connection):  # the client has disconnected
        raise web.HTTPBadRequest
    connection.begin()
    try:
        return await handler(request)
    finally:
        connection.end()


class PageGuard:
    """Refuses requests that a browser sends for a web page that neither this machine nor one of ``hosts`` served.

    Such a page reaches ports on loopback, with its own name as the host if its name server says 127.0.0.1 (DNS
    rebinding).
    """

    __middleware_version__ = 1  # aiohttp's mark of a middleware

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = {host.lower() for host in hosts}

    async def __call__(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Pass a request on (aiohttp's interface).

        Raises:
            RefusedError: the request is refused.
        """
        headers = request.headers
        hosts, origins = [*headers.getall("Host", []), request.host], headers.getall("Origin", [])
        sites = [site.strip().lower() for site in headers.getall("Sec-Fetch-Site", [])]
        if len(hosts) > 2 or not all(map(self._is_known, hosts)):  # the last is the target's, if that has one
            what = f"Host {', '.join(hosts[:-1])!r:.60}"
        elif "cross-site" in sites or not all(map(self._is_origin_known, origins)):
            what = f"Origin {', '.join(origins)!r:.60}"
        else:
            return await handler(request)
        message = f"{what} is not on this machine. Ask for localhost, or start the service with --allow-host NAME."
        raise RefusedError(RefusalReason.CLOSED, message)

    def _is_known(self, authority: str) -> bool:
        host = _read_host(authority)
        return is_loopback(host) or host == "ip6-localhost" or host.endswith(".localhost") or host in self._hosts

    def _is_origin_known(self, origin: str) -> bool:
        scheme, _, authority = origin.lower().partition("://")
        return scheme in ("http", "https") and self._is_known(authority)


@lru_cache(1024)
def _read_host(authority: str) -> str:
    """Return the host of an authority without its port; empty if it is none."""
    found = re.fullmatch(r"(\[[\da-f:.]+\]|[\da-z.-]+)(:\d{0,5})?", authority.lower(), re.ASCII)
    return found[1].strip("[]").rstrip(".") if found else ""


async def set_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Set the headers that all answers have."""
    response.headers.update(_HEADERS)


class _Handler(web.RequestHandler):
    """aiohttp's side of a connection. Bodies are inflated in http_front.py."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what aiohttp itself refuses: it would repeat what the client sent, which may be a key."""
        super().handle_error(request, status, exc, message)
        what = "The server failed on this request." if status >= 500 else "The request cannot be read."
        answer = web.json_response({"error": what}, status=status, headers=_HEADERS)
        answer.force_close()
        return answer


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether to log a record of aiohttp: not if it is about malformed HTTP, which clients could send without end."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class Listener:
    """A port for HTTP, within limits. Connections are counted when they are accepted, by their clients' addresses."""

    def __init__(
        self, app: web.Application, limits: Limits, most: int, guard: PageGuard | None, tls: Certificates | None = None
    ) -> None:
        # Triton continues a request whose client has disconnected, so the handler continues too, and the request
        # counts.
        self._runner = web.AppRunner(app, shutdown_timeout=CLOSING_SECONDS)
        app.middlewares.extend([mark_busy, guard] if guard else [mark_busy])
        app.on_response_prepare.append(set_headers)
        logging.getLogger("aiohttp.server").addFilter(_is_ours)
        self._limits, self._tls, self._connections = limits, tls, Quota(most, limits.client_share)
        self._open: dict[Connection, asyncio.Task[None]] = {}

    async def run(self, *listening: socket.socket) -> None:
        """Accept connections until cancelled, then close them all."""
        await self._runner.setup()
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.gather(*map(self._accept_all, listening))
        finally:
            looking.cancel()
            for each in listening:
                each.close()
            await self._runner.cleanup()
            for task in self._open.values():
                task.cancel()

    async def _accept_all(self, listening: socket.socket) -> None:
        while True:
            await self._accept(listening)

    async def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, peer = await asyncio.get_running_loop().sock_accept(listening)
        except OSError as error:  # out of file descriptors, or the client has gone
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.warning("No connection can be accepted: %s.", error.strerror, extra={"most": 1})
                await asyncio.sleep(_PERIOD)
            return
        try:
            self._take(accepted, Caller(find_client(str(peer[0])), read_address(str(peer[0]))))
        except Exception:  # the port stays open whatever goes wrong with one connection
            accepted.close()
            log.exception("A connection was closed by a fault of the service.")

    def _take(self, accepted: socket.socket, caller: Caller) -> None:
        if not self._connections.has(ANYONE if caller.address in self._limits.trusted_proxies else caller):
            accepted.close()
            log.warning("A connection was closed: there are too many.", extra={"most": 1})
            return
        server = self._runner.server
        assert server is not None
        options: dict[str, Any] = {"access_log": None, "lingering_time": 1.0, "auto_decompress": False}
        handler = _Handler(server, loop=asyncio.get_running_loop(), keepalive_timeout=IDLE_SECONDS, **options)
        connection = Connection(handler, self._limits, accepted)
        self._connections.take(caller)
        self._open[connection] = asyncio.create_task(self._follow(connection, accepted, caller))

    async def _follow(self, connection: Connection, accepted: socket.socket, caller: Caller) -> None:
        """Take a connection through its handshake, and count it until it has ended."""
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # without it, Linux takes megabytes of an answer that the client does not read
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls.context if self._tls else None,
                ssl_handshake_timeout=self._limits.head_seconds if self._tls else None,
            )
            await connection.ended.wait()
        except OSError:  # the client has gone, or its handshake failed
            accepted.close()
        finally:
            del self._open[connection]
            self._connections.give_back(caller)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            now = time.monotonic()
            for connection in list(self._open):
                connection.look(now)


@asynccontextmanager
async def listen(
    app: web.Application, address: str, options: Options, tls: Certificates | None = None, *, most: int = 0
) -> AsyncIterator[None]:
    """Serve ``app`` over HTTP at ``address`` (``host:port``) while the context is open, with the limits of ``options``.

    ``most`` is the largest number of connections, by default ``limits.connections``. With ``tls``, connections are
    encrypted. Unless clients have keys or all hosts are allowed, requests of web pages are refused (``PageGuard``).

    Raises:
        SetupError: the port cannot be used.
    """
    host, _, port = address.rpartition(":")
    listening = list[socket.socket]()
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, at in dict.fromkeys((each[0], each[4][:2]) for each in found):  # localhost may have two
            listening.append(socket.create_server(at, family=family, backlog=_BACKLOG))
            listening[-1].setblocking(False)
    except OSError as error:
        raise SetupError(f"Port {port} cannot be used: {error.strerror}.", "Choose another.") from None
    guard = None if options.takes_pages else PageGuard(options.allowed_hosts)
    listener = Listener(app, options.limits, most or options.limits.connections, guard, tls)
    running = asyncio.create_task(listener.run(*listening))
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        for each in listening:  # of a listener that never ran
            each.close()
