"""A connection without a socket: clients that read nothing, and requests of clients that left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from shoal.serving.gateway.http.listener import Connection, mark_busy
from shoal.serving.gateway.options import Limits
from tests.support.virtual_time import run


class Pipe(asyncio.Transport):
    """A transport that notes its end."""

    was_aborted = False

    def abort(self) -> None:
        """Note the end."""
        self.was_aborted = True


class Behind(asyncio.Protocol):
    """Protocol that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("pause_writing", "resume_writing", "eof_received", "data_received", "connection_lost"):
            return lambda *_: self.events.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("is_sent", "reads", "ends"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_client_that_reads_nothing(is_sent: bool, reads: bool, ends: bool) -> None:
    behind, pipe, limits = Behind(), Pipe(), Limits(unread_seconds=30.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0] as accepted,
    ):
        accepted.setblocking(False)
        connection = Connection(behind, limits, accepted)
        connection.connection_made(pipe)
        connection.data_received(b"GET")
        connection.begin()

        def fill() -> None:
            with contextlib.suppress(BlockingIOError):
                while is_sent:
                    accepted.send(bytes(2**16))

        fill()
        time.sleep(0.5)  # meanwhile, the kernel of the client takes all that it can
        for now in range(100, 131):
            if reads:
                client.recv(2**20)
                fill()
                time.sleep(0.01)
            connection.look(float(now))
        assert not pipe.was_aborted
        connection.look(131.0)
        assert pipe.was_aborted == ends
        assert (connection.unread_seconds(131.0) > 30) == ends
        connection.pause_writing()
        connection.resume_writing()
        connection.eof_received()
        connection.connection_lost(None)
    assert behind.events == ["data_received", "pause_writing", "resume_writing", "eof_received", "connection_lost"]
    assert connection.ended.is_set()
    assert connection.unread_seconds(200.0) == 0, "the socket is closed"


def test_a_request_of_a_client_that_left_is_not_handled() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        raise AssertionError

    async def work() -> None:
        with pytest.raises(web.HTTPBadRequest):
            await mark_busy(make_mocked_request("GET", "/"), handler)

    run(work())
