"""HTTP front end: forwards requests to Triton if their path is open to clients, and refuses all other requests.

Sections: the front end; bodies, which are read within limits of time and memory, and inflated outside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from aiohttp import ClientError, web
from yarl import URL

from shoal.gateway.core.dispatcher import Dispatcher
from shoal.gateway.core.refusals import (
    EXTENSIONS,
    HEADERS,
    LostError,
    RefusedError,
    Why,
    clean,
    closed,
    is_dead,
    log_failure,
    trim_config,
)
from shoal.gateway.core.stream_requests import Streaming
from shoal.gateway.core.upstream import Upstream
from shoal.gateway.options import MOST_INFLATION, Hold, Limits
from shoal.gateway.v2.generate import Generate, cut
from shoal.gateway.v2.screening import LARGE, PIECE, SMALL, Rules, screen_json

# Model names are not percent-decoded: Triton does not decode them either.
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?P<version>/versions/[^/]+)?(?:/(?P<what>[a-z_]+))?")
_NO_MODEL = "/v2/models//config"  # without a name: the default model's configuration
_ASKED = {"": "GET", "ready": "GET", "config": "GET", "stats": "GET"}  # by what is asked of a model
_ASKED |= {"infer": "POST", "generate": "POST", "generate_stream": "POST"}
_OF_ALL = {"/v2/health/live": "GET", "/v2/health/ready": "GET", "/v2": "GET", "/v2/models/stats": "GET"}
_OF_ALL |= {"/v2/repository/index": "POST"}
_CLOSED = {
    "/v2/repository/": "Model control", "/v2/systemsharedmemory": "Shared memory", "/v2/cudasharedmemory":
    "Shared memory", "/v2/logging": "Logging", "/v2/trace": "Tracing",
}  # fmt: skip
_HEAD_LENGTH = "Inference-Header-Content-Length"
_STATUS = {
    Why.BUSY: 429, Why.UNAVAILABLE: 503, Why.WRONG: 400, Why.ABSENT: 404, Why.CLOSED: 403, Why.METHOD: 405,
    Why.LARGE: 413, Why.ENCODING: 415, Why.SLOW: 408,
}  # fmt: skip
# Errors that Triton reports as its own faults although the request's JSON is at fault.
_UNREADABLE = re.compile(rb'\{"error":\s*"(Unable to (parse|set) |failed to parse )')
# Not Content-Type: if it says that the body is a form, as curl does by default, Triton 24.10 copies the body onto the
# stack, and crashes from 4 MiB on.
_REQUEST_HEADERS = (*HEADERS, _HEAD_LENGTH)
# Answers are not compressed, so that errors can be read.
_ANSWER_HEADERS = ("Content-Type", _HEAD_LENGTH)
_FEW = 2**16  # inflated bytes that are allowed at any ratio
_one_core = asyncio.Semaphore(1)  # inflates bodies, and reads those of megabytes


class _Reply(NamedTuple):
    """Triton's reply to an HTTP request."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class HttpFront:
    """The aiohttp application that passes clients' requests to the active Triton server."""

    def __init__(self, dispatcher: Dispatcher, rules: Mapping[str, Rules], streaming: Streaming) -> None:
        self._dispatcher, self._rules, self._streaming = dispatcher, rules, streaming
        self._generate = Generate(dispatcher, rules, streaming)
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            path = request.rel_url.raw_path
            if wanted := _OF_ALL.get(path):
                _check_method(request, wanted)
                return await self._answer_of_all(path)
            if path == _NO_MODEL:
                self._dispatcher.check_visible(self._dispatcher.default)
                path = f"/v2/models/{self._dispatcher.default}/config"
            found = _MODEL.fullmatch(path)
            what = (found["what"] or "") if found else ""
            if found is None or what not in _ASKED:
                raise _no_path(path)
            _check_method(request, _ASKED[what])
            model = found["model"]
            if what == "ready" and self._dispatcher.is_unready(model):
                return web.Response(status=400)
            if what in ("", "config", "stats"):
                self._dispatcher.check_visible(model)
            else:
                self._dispatcher.check_exposed(model)
            if _ASKED[what] == "GET":
                document = await self._fetch("GET", path)
                return web.json_response(trim_config(document) if what == "config" else document)
            address = self._dispatcher.limits.find_address(
                str(request.remote), request.headers.getall("X-Forwarded-For", ())
            )
            with self._dispatcher.hold(address, model) as held:
                return await self._pass(request, found, address, held)
        except ConnectionError:  # the client has disconnected: the response is dropped
            return web.Response(status=400)
        except RefusedError as refused:
            self._dispatcher.note_refusal(refused)
            response = web.json_response({"error": refused.words}, status=_STATUS[refused.why])
            if refused.retry_after:
                response.headers["Retry-After"] = str(refused.retry_seconds)
            if refused.why in (Why.SLOW, Why.BUSY, Why.LARGE, Why.UNAVAILABLE):
                response.force_close()  # without waiting for the rest of the body
            return response

    # --- questions -----------------------------------------------------------------------------------------------

    async def _answer_of_all(self, path: str) -> web.Response:
        match path:
            case "/v2/health/live":
                return web.Response()
            case "/v2/health/ready":
                return web.Response(status=400 if self._dispatcher.trouble() else 200)
            case "/v2":
                document = await self._fetch("GET", path)
                document["extensions"] = [name for name in document["extensions"] if name in EXTENSIONS]
            case "/v2/models/stats":
                document = await self._fetch("GET", path)
                stats = document["model_stats"]
                document["model_stats"] = [entry for entry in stats if self._dispatcher.is_visible(entry["name"])]
            case _:
                index = await self._fetch("POST", path)
                document = [entry for entry in index if self._dispatcher.is_exposed(entry["name"])]
        return web.json_response(document)

    async def _fetch(self, method: str, path: str) -> Any:
        """Send a request to Triton on behalf of a client, and return the JSON of the reply.

        The request has the administrator's key, which the client does not have.
        """

        async def call(upstream: Upstream) -> _Reply:
            return await _ask(upstream, method, path, {"admin-key": upstream.server.admin_key})

        reply = await self._dispatcher.send("", path.encode(), call, lambda reply: reply.status >= 400)
        if reply.status >= 400:
            try:
                message = str(json.loads(reply.content)["error"])
            except (ValueError, KeyError, TypeError):  # an error that is not Triton's JSON
                message = f"The server answered with status {reply.status} and gave no reason."
            raise RefusedError(Why.ABSENT if reply.status == 404 else Why.WRONG, message)
        return json.loads(reply.content) if reply.content else None

    # --- inference -----------------------------------------------------------------------------------------------

    async def _pass(self, request: web.Request, found: re.Match[str], address: str, held: Hold) -> web.StreamResponse:
        model, what = found["model"], found["what"]
        parts = await _read_body(request, self._dispatcher, held)
        headers = {name: value for name in _REQUEST_HEADERS if (value := request.headers.get(name))}
        lengths = request.headers.getall(_HEAD_LENGTH, [])
        if what == "infer":
            work = partial(_screen, parts, lengths, headers, self._rules[model])
            if held.num_bytes <= (LARGE // 8 if lengths else SMALL):
                body, request_id = work()
            else:
                async with _one_core if held.num_bytes > LARGE else nullcontext():
                    body, request_id = await asyncio.to_thread(work)
            del work
        else:
            body, version = await _join(parts), (found["version"] or "").rpartition("/")[2]
            message, request_id = await self._generate.convert(body, model, version)
            if what == "generate_stream" or self._streaming.is_decoupled(model):
                return await self._generate.answer(
                    request, message, request_id, address, len(body), is_whole=what == "generate"
                )
        del parts  # a copy of the body
        path = request.rel_url.raw_path

        async def call(upstream: Upstream) -> _Reply:
            return await _ask(upstream, "POST", path, headers, body)

        def is_waited_for() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        reply = await self._dispatcher.send(
            model, body, call, lambda reply: reply.status >= 400, is_waited_for, request_id
        )
        is_unreadable = reply.status >= 400 and _UNREADABLE.match(reply.content)
        status, headers = 400 if is_unreadable else reply.status, _kept(reply.headers)
        response: web.StreamResponse = web.Response(status=status, body=reply.content, headers=headers)
        if len(reply.content) > PIECE:
            response = web.StreamResponse(status=status, headers=headers)
            response.content_length = len(reply.content)
        if response.status >= 500:
            log_failure(model, request_id, str(response.reason))
        held.grow(len(reply.content))  # until the client has read it
        await response.prepare(request)
        if len(reply.content) > PIECE:
            async for piece in cut(reply.content):
                await response.write(piece)
        await response.write_eof()
        return response


async def _ask(upstream: Upstream, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> _Reply:
    """Send a request to Triton and return its reply.

    Raises:
        LostError: the server, or a process of the model, died.
    """
    url = URL(f"http://{upstream.server.http_url}{path}", encoded=True)
    data: Any = body or None
    if len(body) > PIECE:
        data, headers = cut(body), {**headers, "Content-Length": str(len(body))}
    try:
        async with upstream.session.request(method, url, data=data, headers=headers, allow_redirects=False) as reply:
            if (reply.content_length or LARGE) < LARGE:
                content = await reply.read()
            else:
                content = await _join([part async for part in reply.content.iter_any()])
    except (ClientError, ConnectionError) as error:
        raise LostError(str(error)) from None
    return _Reply(reply.status, reply.headers, _cleaned(content) if reply.status >= 400 else content)


def _check_method(request: web.Request, wanted: str) -> None:
    if request.method != wanted:
        raise RefusedError(Why.METHOD, f"{request.method} is not for this path. Use {wanted}.")


def _no_path(path: str) -> RefusedError:
    what = next((what for prefix, what in _CLOSED.items() if path.startswith(prefix)), "")
    if not what and path.endswith(("/trace/setting", "/load", "/unload")):
        what = "Model control"
    return closed(what) if what else RefusedError(Why.ABSENT, f"There is no path {path[:100]!r} here.")


def _screen(parts: list[bytes], lengths: list[str], headers: dict[str, str], rules: Rules) -> tuple[bytes, str]:
    """Check the body of an inference request; return the body for Triton and the request's id.

    ``lengths`` are the values of the request's header Inference-Header-Content-Length; the new length is written into
    ``headers``. Bytes are only joined from parts, not copied in other ways: joining releases the interpreter's lock.

    Raises:
        RefusedError: the body would crash Triton, or is not a valid request.
    """
    if not lengths:
        return screen_json(b"".join(parts), 0, rules)
    num_bytes = sum(map(len, parts))
    if len(lengths) > 1 or not re.fullmatch(r"\d{1,12}", lengths[0]) or int(lengths[0]) > num_bytes:
        raise RefusedError(Why.WRONG, f"{_HEAD_LENGTH} {', '.join(lengths)[:40]!r} is not a length within the body.")
    length = left = int(lengths[0])
    if not length:  # the whole body is the model's single tensor
        return b"".join(parts), ""
    heads, rest = list[bytes](), list[bytes]()
    for part in parts:
        heads.append(part[:left])
        rest.append(part[left:])
        left = max(0, left - len(part))
    head, request_id = screen_json(b"".join(heads), num_bytes - length, rules)
    headers[_HEAD_LENGTH] = str(len(head))
    return b"".join([head, *rest]), request_id


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name in _ANSWER_HEADERS if (value := headers.get(name))}


def _cleaned(content: bytes) -> bytes:
    """Remove the traceback from an error reply of Triton, and return the reply for the client.

    Raises:
        LostError: the error is that the model's process has died.
    """
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content
    if is_dead(message):
        raise LostError(message)
    return json.dumps({"error": clean(message)}).encode()


# --- bodies ----------------------------------------------------------------------------------------------------------


async def _read_body(request: web.Request, dispatcher: Dispatcher, held: Hold) -> list[bytes]:
    """Read the whole body, in parts, and inflate it. The memory reservation ``held`` grows as bytes arrive.

    Raises:
        RefusedError: the body is too large, arrives too slowly or has an unknown encoding, or the memory for requests
            is full.
        ConnectionError: the client has disconnected.
    """
    limits, encoding = dispatcher.limits, request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise RefusedError(Why.ENCODING, f"Content-Encoding {encoding[:40]!r} is not known. Use gzip or deflate.")
    if (request.content_length or 0) > limits.request_bytes:
        raise _too_large(limits)
    parts = await _receive(request, dispatcher, held)
    return parts if encoding == "identity" else [await _inflate(await _join(parts), encoding, dispatcher, held)]


async def _join(parts: list[bytes]) -> bytes:
    return await asyncio.to_thread(b"".join, parts) if sum(map(len, parts)) > LARGE else b"".join(parts)


def _too_large(limits: Limits) -> RefusedError:
    """Build the refusal of a request with too many bytes."""
    return RefusedError(
        Why.LARGE, f"The request is larger than {limits.request_bytes} bytes. Send fewer rows at a time."
    )


async def _receive(request: web.Request, dispatcher: Dispatcher, held: Hold) -> list[bytes]:
    limits, parts = dispatcher.limits, list[bytes]()
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(start + limits.body_seconds) as timer:
            while part := await request.content.readany():
                if held.num_bytes + len(part) > limits.request_bytes:
                    raise _too_large(limits)
                dispatcher.grow(held, len(part))
                parts.append(part)
                timer.reschedule(start + limits.body_seconds + held.num_bytes / (limits.body_kib * 2**10))
    except TimeoutError:
        raise RefusedError(Why.SLOW, f"Only {held.num_bytes} bytes of the request came in time.") from None
    except (web.HTTPException, ClientError, ValueError) as error:  # invalid chunks or length
        if isinstance(error, ConnectionError):
            raise
        raise RefusedError(Why.WRONG, "The body of the request cannot be read.") from None
    return parts


async def _inflate(body: bytes, encoding: str, dispatcher: Dispatcher, held: Hold) -> bytes:
    most = min(dispatcher.limits.request_bytes, len(body) * MOST_INFLATION + _FEW)
    async with _one_core:
        dispatcher.grow(held, most)  # the inflated size is known only at the end: reserve the most
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
        raise RefusedError(Why.WRONG, f"The body is not {encoding}, as its Content-Encoding says.") from None
    if len(content) > most:
        raise RefusedError(Why.LARGE, f"The request is larger than {most} bytes, once inflated.")
    if not stream.eof or stream.unused_data:
        raise RefusedError(Why.WRONG, f"The body's {encoding} does not end where the body does.")
    return content
