"""Bodies of HTTP requests: read within limits of time and memory, and inflated outside the event loop."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import TypeVar

from aiohttp import ClientError, web

from shoal.serving.gateway.callers.access_log import current_entry
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.options import MOST_INFLATION
from shoal.serving.gateway.refusals import RefusalReason, RefusedError, wrong

SMALL = 2**14  # bytes; work on more is done outside the event loop
LARGE = 2**20
CHUNK = 2**18  # bytes that one call passes to a transport, which copies what it cannot send at once: 1 or 2 ms
_FEW = 2**16  # bytes of a body that are read whatever a key's limits are, and inflated bytes allowed at any ratio
_one_core = asyncio.Semaphore(1)  # inflates bodies, and reads large ones
T = TypeVar("T")


async def work_apart(work: Callable[[], T], num_bytes: int, alone: int = LARGE // 8) -> T:
    """Return the result of ``work`` on so many bytes: outside the event loop, and alone if they exceed ``alone``.

    Threads that hold the interpreter's lock in turn keep the event loop waiting for each of them.
    """
    if num_bytes <= SMALL:
        return work()
    async with _one_core if num_bytes > alone else nullcontext():
        return await asyncio.to_thread(work)


async def read_body(request: web.Request, gate: Gate, held: Reservation, most: int = 2**62) -> list[bytes]:
    """Read the whole body, in parts, and inflate it. The memory reservation ``held`` grows as bytes arrive.

    The body may have ``most`` bytes, or as many as the limits say if these are fewer.

    Raises:
        RefusedError: the body is too large, arrives too slowly or has an unknown encoding, the memory for requests is
            full, or the caller's key has used up a limit. A request to stop others, which is small, is always read.
        ConnectionError: the client has disconnected.
    """
    most, encoding = min(most, gate.limits.request_bytes), request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise RefusedError(
            RefusalReason.ENCODING, f"Content-Encoding {encoding[:40]!r} is not known. Use gzip or deflate."
        )
    if (request.content_length or 0) > most:
        raise _too_large(most)
    _check_limits(gate, held, request.content_length or 0)
    parts = await _receive(request, gate, held, most)
    return parts if encoding == "identity" else [await _inflate(await join(parts), encoding, gate, held, most)]


def _check_limits(gate: Gate, held: Reservation, num_bytes: int) -> None:
    if num_bytes > _FEW:
        gate.traffic.check_limits(held.caller, current_entry().model)


def _too_large(most: int) -> RefusedError:
    """Build the refusal of a request with too many bytes."""
    return RefusedError(RefusalReason.LARGE, f"The request is larger than {most} bytes. Send fewer rows at a time.")


async def _receive(request: web.Request, gate: Gate, held: Reservation, most: int) -> list[bytes]:
    limits, parts = gate.limits, list[bytes]()
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(start + limits.body_seconds) as timer:
            while part := await request.content.readany():
                if held.num_bytes + len(part) > most:
                    raise _too_large(most)
                gate.traffic.grow(held, len(part))
                _check_limits(gate, held, held.num_bytes)
                parts.append(part)
                timer.reschedule(start + limits.body_seconds + held.num_bytes / (limits.body_kib * 2**10))
    except TimeoutError:
        raise RefusedError(RefusalReason.SLOW, f"Only {held.num_bytes} bytes of the request came in time.") from None
    except (web.HTTPException, ClientError, ValueError) as error:  # invalid chunks or length
        if isinstance(error, ConnectionError):
            raise
        raise wrong("The body of the request cannot be read.") from None
    return parts


async def _inflate(body: bytes, encoding: str, gate: Gate, held: Reservation, most: int) -> bytes:
    most = min(most, len(body) * MOST_INFLATION + _FEW)
    async with _one_core:
        gate.traffic.grow(held, most)  # the inflated size is known only at the end: reserve the most
        content = await asyncio.to_thread(inflate, body, encoding, most)
        held.grow(len(content) - most - len(body))
    return content


def inflate(body: bytes, encoding: str, most: int) -> bytes:
    """Inflate a ``gzip`` or ``deflate`` body to at most ``most`` bytes.

    Raises:
        RefusedError: the inflated body is larger than ``most`` bytes, or the body is not in this encoding.
    """
    # deflate has a zlib header or, from some clients, none (RFC 1950: method 8, and a checksum divisible by 31)
    has_head = encoding == "gzip" or (len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0)
    window = zlib.MAX_WBITS + 16 * (encoding == "gzip") if has_head else -zlib.MAX_WBITS
    stream = zlib.decompressobj(window)
    try:
        content = stream.decompress(body, most + 1)
    except zlib.error:
        raise wrong(f"The body is not {encoding}, as its Content-Encoding says.") from None
    if len(content) > most:
        raise RefusedError(RefusalReason.LARGE, f"The request is larger than {most} bytes, once inflated.")
    if not stream.eof or stream.unused_data:
        raise wrong(f"The body's {encoding} does not end where the body does.")
    return content


async def cut(content: bytes) -> AsyncIterator[bytes]:
    """Cut bytes into pieces: a transport copies what it cannot send at once, and that would stop the event loop."""
    for at in range(0, len(content), CHUNK):
        yield content[at : at + CHUNK] if len(content) > CHUNK else content


async def join(parts: list[bytes]) -> bytes:
    """Join parts of a body, outside the event loop if they are large."""
    return await asyncio.to_thread(b"".join, parts) if sum(map(len, parts)) > LARGE else b"".join(parts)
