"""Bodies of HTTP requests: read within limits of time and memory, and inflated outside the event loop."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import ClientError, web

from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.limits import MOST_INFLATION, Hold, Limits
from shoal.gateway.refusals import RefusedError, Why

_FEW = 2**16  # inflated bytes that are allowed at any ratio
_inflating = asyncio.Semaphore(1)  # at most one core inflates bodies


async def read_body(request: web.Request, dispatcher: Dispatcher, held: Hold) -> bytes:
    """Read and inflate the whole body; ``held`` grows as bytes arrive.

    Raises:
        RefusedError: it is too large, too slow, in an unknown encoding, or the memory is full.
        ConnectionError: the client has disconnected.
    """
    limits, encoding = dispatcher.limits, request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise RefusedError(Why.ENCODING, f"Content-Encoding {encoding[:40]!r} is not known. Use gzip or deflate.")
    if (request.content_length or 0) > limits.request_bytes:
        raise too_large(limits)
    body = await _receive(request, dispatcher, held)
    return body if encoding == "identity" else await _inflate(body, encoding, dispatcher, held)


def too_large(limits: Limits) -> RefusedError:
    """Build the refusal of a request with too many bytes."""
    return RefusedError(
        Why.LARGE, f"The request is larger than {limits.request_bytes} bytes. Send fewer rows at a time."
    )


async def _receive(request: web.Request, dispatcher: Dispatcher, held: Hold) -> bytes:
    limits, parts = dispatcher.limits, list[bytes]()
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(start + limits.body_seconds) as timer:
            while part := await request.content.readany():
                if held.num_bytes + len(part) > limits.request_bytes:
                    raise too_large(limits)
                dispatcher.grow(held, len(part))
                parts.append(part)
                timer.reschedule(start + limits.body_seconds + held.num_bytes / (limits.body_kib * 2**10))
    except TimeoutError:
        raise RefusedError(Why.SLOW, f"Only {held.num_bytes} bytes of the request came in time.") from None
    except (web.HTTPException, ClientError, ValueError) as error:  # invalid chunks or length
        if isinstance(error, ConnectionError):
            raise
        raise RefusedError(Why.WRONG, "The body of the request cannot be read.") from None
    return b"".join(parts)


async def _inflate(body: bytes, encoding: str, dispatcher: Dispatcher, held: Hold) -> bytes:
    most = min(dispatcher.limits.request_bytes, len(body) * MOST_INFLATION + _FEW)
    async with _inflating:
        dispatcher.grow(held, most)  # the inflated size is known only at the end: reserve the most
        content = await asyncio.to_thread(inflate, body, encoding, most)
        held.grow(len(content) - most - len(body))
    return content


def inflate(body: bytes, encoding: str, most: int) -> bytes:
    """Inflate a ``gzip`` or ``deflate`` body to at most ``most`` bytes.

    Raises:
        RefusedError: the content is larger, or not in that encoding.
    """
    # deflate has a zlib header or, from some clients, none (RFC 1950: method 8, and a checksum divisible by 31)
    has_head = encoding == "gzip" or (len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0)
    window = zlib.MAX_WBITS + 16 * (encoding == "gzip") if has_head else -zlib.MAX_WBITS
    stream = zlib.decompressobj(window)
    try:
        content = stream.decompress(body, most + 1)
    except zlib.error:
        raise RefusedError(Why.WRONG, f"The body is not {encoding}, as its Content-Encoding says.") from None
    if len(content) > most:
        raise RefusedError(Why.LARGE, f"The request is larger than {most} bytes, once inflated.")
    if not stream.eof or stream.unused_data:
        raise RefusedError(Why.WRONG, f"The body's {encoding} does not end where the body does.")
    return content
