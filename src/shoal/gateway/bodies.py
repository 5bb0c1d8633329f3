"""The body of a request over HTTP: read within limits of time and memory, and inflated away from the event loop."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import ClientError, web

from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.limits import Hold, Limits
from shoal.gateway.refusals import RefusedError, Why

_PIECE = 2**20  # bytes inflated at a time
_FEW = 2**16  # inflated bytes that are allowed at any ratio
_inflating = asyncio.Semaphore(1)  # one core is enough for what comes deflated


async def read_body(request: web.Request, dispatcher: Dispatcher, held: Hold) -> bytes:
    """All of it, inflated; ``held`` grows with what arrives.

    Raises:
        RefusedError: it is too large, too slow, or no such encoding, or there is no room for it.
        ConnectionError: the client has left.
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
        raise RefusedError(Why.SLOW, f"{held.num_bytes} bytes of a request came, and no more in time.") from None
    except (web.HTTPException, ClientError, ValueError) as error:  # chunks or a length that are none
        if isinstance(error, ConnectionError):
            raise
        raise RefusedError(Why.WRONG, "The body of the request cannot be read.") from None
    return b"".join(parts)


async def _inflate(body: bytes, encoding: str, dispatcher: Dispatcher, held: Hold) -> bytes:
    most = min(dispatcher.limits.request_bytes, int(len(body) * dispatcher.limits.max_inflation) + _FEW)
    async with _inflating:
        dispatcher.grow(held, most)  # for how much comes out only the end tells
        content = await asyncio.to_thread(inflate, body, encoding, most)
        held.grow(len(content) - most - len(body))
    return content


def inflate(body: bytes, encoding: str, most: int) -> bytes:
    """The content of a body that is ``gzip`` or ``deflate``, of at most so many bytes.

    Raises:
        RefusedError: it is larger, or no such body.
    """
    # what is called deflate has zlib's head or, from some clients, none
    has_head = encoding == "gzip" or (len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0)
    window = zlib.MAX_WBITS + 16 * (encoding == "gzip") if has_head else -zlib.MAX_WBITS
    stream, parts, num_bytes = zlib.decompressobj(window), list[bytes](), 0
    try:
        while not stream.eof and body:
            parts.append(stream.decompress(body, _PIECE))
            num_bytes += len(parts[-1])
            if num_bytes > most:
                raise RefusedError(Why.LARGE, f"The request is larger than {most} bytes, once inflated.")
            body = stream.unconsumed_tail
    except zlib.error:
        raise RefusedError(Why.WRONG, f"The body is not {encoding}, as its Content-Encoding says.") from None
    if not stream.eof or stream.unused_data:
        raise RefusedError(Why.WRONG, f"The body's {encoding} does not end where the body does.")
    return b"".join(parts)
