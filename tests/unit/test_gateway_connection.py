"""A connection without a socket: clients that read nothing, and requests of clients that left."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from shoal.gateway.core.listener import Connection, mark_busy
from shoal.gateway.options import Limits
from tests.support.virtual_time import run


class Pipe(asyncio.Transport):
    """A transport with so many unsent bytes."""

    unsent, was_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes."""
        return self.unsent

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
    ("unsent", "is_paused", "moves", "ends"),
    [
        (5, False, False, True),
        (5, False, True, False),
        (0, True, False, True),  # with TLS, the buffer is empty
        (0, False, False, False),
    ],
)
def test_a_client_that_reads_nothing(unsent: int, is_paused: bool, moves: bool, ends: bool) -> None:
    behind, pipe, limits = Behind(), Pipe(), Limits(unread_seconds=30.0)
    connection = Connection(behind, limits, socket.socket())
    connection._socket.close()
    connection.connection_made(pipe)
    connection.data_received(b"GET")
    connection.begin()
    if is_paused:
        connection.pause_writing()
    for now in range(100, 131):
        pipe.unsent = unsent + now * moves
        connection.look(float(now))
    assert not pipe.was_aborted
    connection.look(131.0 + moves)
    pipe.unsent = unsent
    assert pipe.was_aborted == ends
    connection.resume_writing()
    connection.eof_received()
    connection.connection_lost(None)
    told = ["data_received", *["pause_writing"] * is_paused, "resume_writing", "eof_received", "connection_lost"]
    assert behind.events == told
    assert connection.ended.is_set()


def test_a_request_of_a_client_that_left_is_not_handled() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        raise AssertionError

    async def work() -> None:
        with pytest.raises(web.HTTPBadRequest):
            await mark_busy(make_mocked_request("GET", "/"), handler)

    run(work())
