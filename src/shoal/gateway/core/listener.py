"""HTTP listener: connection limits per client address, time-outs for silent clients, and no entry for web pages."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache

from aiohttp import web

from shoal.errors import SetupError
from shoal.gateway.logs import log
from shoal.gateway.options import IDLE_SECONDS, Limits, Pool, is_loopback

_PERIOD = 1.0  # seconds between two checks of all connections
_UNSENT = 2**17  # bytes of answers that wait in the kernel to be sent, for each connection
_CLOSING = 0.5  # seconds for idle connections to close


class Door(asyncio.Protocol):
    """A client's connection: forwards asyncio's events to aiohttp's protocol, and enforces the time-outs."""

    def __init__(self, behind: asyncio.Protocol, limits: Limits, connections: Pool, doors: set[Door]) -> None:
        self._behind: asyncio.Protocol | None = behind
        self._limits, self._connections, self._doors = limits, connections, doors
        self._is_idle = False
        self._unread, self._unread_since = 0, 0.0
        self._deadline = time.monotonic() + limits.head_seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or abort it if too many are open."""
        assert isinstance(transport, asyncio.Transport)
        assert self._behind is not None
        self._transport = transport
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        is_proxy = self._address in self._limits.trusted_proxies
        if not self._connections.has("" if is_proxy else self._address):
            self._behind = None
            transport.abort()
            log.warning("A connection was closed: there are too many.", extra={"most": 1})
            return
        self._connections.take(self._address)
        self._doors.add(self)
        # without it, Linux takes megabytes of an answer that the client does not read
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._behind.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Forward bytes. The first bytes of a request start the time-out for the request's head."""
        if self._is_idle:
            self._is_idle = False
            self._deadline = time.monotonic() + self._limits.head_seconds
        if self._behind is not None:
            self._behind.data_received(data)

    def begin(self) -> None:
        """Stop the time-out for the request's head. Called when the head is complete."""
        self._deadline = float("inf")

    def end(self) -> None:
        """Start the time-out for idle connections. Called when the request is answered."""
        self._is_idle, self._deadline = True, time.monotonic() + IDLE_SECONDS

    def look(self, now: float) -> None:
        """Abort the connection if its client has sent or read nothing for too long."""
        unread = self._transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        is_unread = bool(unread) and now - self._unread_since > self._limits.unread_seconds
        if is_unread or now > self._deadline:
            if is_unread or not self._is_idle:
                log.warning("A connection was closed: its client neither sent nor read.", extra={"most": 1})
            self._transport.abort()

    def eof_received(self) -> bool | None:
        """Forward the end of the client's data."""
        return self._behind.eof_received() if self._behind is not None else None

    def connection_lost(self, error: Exception | None) -> None:
        """Forward the end of the connection, which no longer counts as open."""
        if self._behind is not None:
            self._doors.discard(self)
            self._connections.give_back(self._address)
            self._behind.connection_lost(error)

    def pause_writing(self) -> None:
        """Forward back-pressure: the client reads too slowly."""
        if self._behind is not None:
            self._behind.pause_writing()

    def resume_writing(self) -> None:
        """Forward the end of back-pressure."""
        if self._behind is not None:
            self._behind.resume_writing()


@web.middleware
async def mark(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Mark the connection as busy while a request is handled."""
    transport = request.transport
    door = transport.get_protocol() if transport is not None else None
    if not isinstance(door, Door):  # the client has disconnected
        raise web.HTTPBadRequest
    door.begin()
    try:
        return await handler(request)
    finally:
        door.end()


@web.middleware
async def keep_pages_out(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests that a browser sends for a web page that this machine did not serve.

    Such a page reaches ports on loopback, with its own name as the host if its name server says 127.0.0.1 (DNS
    rebinding).
    """
    headers = request.headers
    hosts, origins = [*headers.getall("Host", []), request.host], headers.getall("Origin", [])
    sites = [site.strip().lower() for site in headers.getall("Sec-Fetch-Site", [])]
    if len(hosts) > 2 or not all(map(_is_here, hosts)):
        what = f"Host {', '.join(hosts[:-1])!r:.60}"
    elif "cross-site" in sites or not all(map(_is_origin_here, origins)):
        what = f"Origin {', '.join(origins)!r:.60}"
    else:
        return await handler(request)
    log.warning("A request was refused: %s.", what, extra={"most": 1})
    message = f"{what} is not on this machine. Ask for localhost; behind a proxy, start the service with --open."
    return web.json_response({"error": message}, status=403)


@lru_cache(1024)
def _is_here(authority: str) -> bool:
    """Whether a host, with or without a port, is a loopback name or address."""
    found = re.fullmatch(r"(\[[\da-f:.]+\]|[\da-z.-]+)(:\d{0,5})?", authority.lower(), re.ASCII)
    host = found[1].strip("[]").rstrip(".") if found else ""
    return is_loopback(host) or host == "ip6-localhost" or host.endswith(".localhost")


def _is_origin_here(origin: str) -> bool:
    scheme, _, authority = origin.lower().partition("://")
    return scheme in ("http", "https") and _is_here(authority)


async def hide(_: web.Request, response: web.StreamResponse) -> None:
    """Replace the name and version of the HTTP library in the header ``Server``."""
    response.headers["Server"] = "shoal"


@asynccontextmanager
async def listen(
    app: web.Application, host: str, port: int, limits: Limits, connections: Pool, *, is_open: bool
) -> AsyncIterator[None]:
    """Serve ``app`` over HTTP at ``host`` and ``port`` while the context is open, within ``limits``.

    Unless ``is_open``, requests of web pages are refused (see ``keep_pages_out``).

    Raises:
        SetupError: the port cannot be used.
    """
    # Triton continues a request whose client has disconnected, so the handler continues too, and the request counts.
    # Bodies are inflated in http_front.py.
    runner = web.AppRunner(
        app, access_log=None, keepalive_timeout=IDLE_SECONDS, shutdown_timeout=_CLOSING, lingering_time=1.0,
        auto_decompress=False,
    )  # fmt: skip
    app.middlewares.extend([mark] if is_open else [mark, keep_pages_out])
    app.on_response_prepare.append(hide)
    await runner.setup()
    doors: set[Door] = set()
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None
    try:
        listening = await loop.create_server(lambda: Door(server(), limits, connections, doors), host, port)
    except OSError as error:
        await runner.cleanup()
        raise SetupError(f"Port {port} cannot be used: {error.strerror}.", "Choose another.") from None

    async def look() -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            now = time.monotonic()
            for door in list(doors):
                door.look(now)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        listening.close()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await runner.cleanup()
