"""Streams to Triton on behalf of an HTTP client, which end when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from aiohttp import web

from shoal.serving.gateway.callers.access_log import current_entry
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.relay import Relay
from shoal.serving.gateway.core.triton_errors import HEADERS, forwarded_metadata
from shoal.serving.gateway.http.listener import Connection


@contextmanager
def open_for(gate: Gate, request: web.Request, caller: Caller, model: str, *, is_whole: bool) -> Iterator[Relay]:
    """Return a stream to Triton for an HTTP request; when the client disconnects, the models are asked to stop.

    If the caller's key is revoked, its connection is closed; if the client gets a whole answer, it gets 401 at its end.

    Raises:
        RefusedError: the model is unavailable, or there are too many streams.
    """

    def end() -> None:
        current_entry().reason = "revoked or expired key"
        drop()

    def drop() -> None:
        if request.transport is not None:
            request.transport.abort()

    with (
        nullcontext() if is_whole else gate.callers.watch(caller, end),
        gate.traffic.reserve_stream(caller),
        gate.open_stream(caller, model, find_metadata(request)) as relay,
    ):
        relay.drop = drop
        connection = request.transport.get_protocol() if request.transport is not None else None
        if isinstance(connection, Connection):
            relay.unread_seconds = partial(connection.unread_seconds, is_by_choice=True)
        leaving = asyncio.create_task(_wait_left(connection, relay))
        try:
            yield relay
        finally:
            leaving.cancel()


def find_metadata(request: web.Request) -> tuple[tuple[str, str], ...]:
    """Return those headers of a request that are passed on to Triton: tracing headers and request id."""
    return forwarded_metadata((name, value) for name in HEADERS if (value := request.headers.get(name)))


def has_left(request: web.Request) -> bool:
    """Whether the client has closed its connection."""
    return request.transport is None or request.transport.is_closing()


async def _wait_left(connection: object, relay: Relay) -> None:
    if isinstance(connection, Connection):
        await connection.ended.wait()
    relay.leave()
