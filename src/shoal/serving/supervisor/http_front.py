"""The front door for HTTP: Triton's own paths, passed on; refusals as 429 and 503, with Retry-After."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from shoal.serving.server import Server
from shoal.serving.supervisor.fronts import clean, is_dead, tell_failure, words
from shoal.serving.supervisor.gate import Gate, LostError, RefusedError, Why, lost

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/(infer|generate|generate_stream)")
_READY = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/ready")
_METHODS = ("GET", "POST")  # Triton answers HEAD with a body, which is no HTTP
_ID = re.compile(rb'"id"\s*:\s*"([^"]{1,200})"')
_HEAD_BYTES = 65_536
_ESCAPED_TRACE = re.compile(rb'(?:\\n)+At:\\n[^"]*')  # within JSON
_STATUS = {Why.BUSY: 429, Why.UNAVAILABLE: 503}
# Of one connection alone, or made anew by whoever sends. Bodies are inflated on their way in, so that their size is
# known, and answers are not deflated, so that errors can be read.
_OWN_HEADERS = {
    "connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade", "expect", "trailer",
    "content-encoding", "accept-encoding",
}  # fmt: skip
_ADDED_HEADERS = "Accept", "Accept-Encoding", "Content-Type", "User-Agent"  # which aiohttp would send unasked
_BROKEN = (aiohttp.ClientError, ConnectionError)


class HttpFront:
    """An aiohttp application that asks the server of the day."""

    def __init__(self, gate: Gate, *, most_bytes: int) -> None:
        self._gate, self._most_bytes = gate, most_bytes
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self.app = web.Application(client_max_size=most_bytes)
        self.app.router.add_route("*", "/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if request.method not in _METHODS or not path.startswith("/"):
            return _error(405, f"{request.method} is not for Triton. Use GET or POST.")
        try:
            if path == "/v2/health/live":
                return web.Response()
            if path == "/v2/health/ready":
                return web.Response(status=400 if self._gate.trouble() else 200)
            if (found := _READY.fullmatch(path)) and self._gate.trouble(unquote(found[1])):
                return web.Response(status=400)
            length = request.content_length
            if length is not None and length > self._most_bytes:
                return self._too_large()
            # how long a body is that comes in chunks, only its end tells
            with self._gate.room(length if length is not None else self._most_bytes * request.can_read_body):
                return await self._pass(request, path, await request.read())
        except RefusedError as refused:
            return _refusal(refused)
        except web.HTTPRequestEntityTooLarge:
            return self._too_large()

    def _too_large(self) -> web.Response:
        return _error(413, f"The request is larger than {self._most_bytes} bytes. Send fewer rows at a time.")

    async def _pass(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        found = _INFER.fullmatch(path)
        model = unquote(found[1]) if found else ""
        if found and found[2] == "generate_stream":
            return await self._stream(request, model, body)
        try:
            reply = await self._gate.send(
                model, len(body), lambda server: self._call(request, server, body), lambda reply: reply.status >= 400
            )
        except RefusedError as refused:
            if refused.is_lost:
                tell_failure(model, _read_id(body), refused.message)
            raise
        if reply.status >= 500:
            tell_failure(model, _read_id(body), str(reply.reason))
        return reply

    async def _call(self, request: web.Request, server: Server, body: bytes) -> web.Response:
        try:
            async with self._ask(request, server, body) as reply:
                content = await reply.read()
        except _BROKEN as error:
            raise LostError(str(error)) from None
        if reply.status >= 400:
            content = _cleaned(content)
        return web.Response(status=reply.status, body=content, headers=_kept(reply.headers))

    @asynccontextmanager
    async def _ask(self, request: web.Request, server: Server, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        if server.http_url not in self._sessions:
            self._sessions[server.http_url] = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                skip_auto_headers=_ADDED_HEADERS,
            )
        # the path as it came: Triton does not decode names of models
        url = URL(f"http://{server.http_url}{request.rel_url.raw_path_qs}", encoded=True)
        async with self._sessions[server.http_url].request(
            request.method, url, data=body or None, headers=_kept(request.headers), allow_redirects=False
        ) as reply:
            yield reply

    async def _stream(self, request: web.Request, model: str, body: bytes) -> web.StreamResponse:
        """Answers as they come; one that was begun cannot be asked for again."""
        response: web.StreamResponse | None = None
        task = asyncio.current_task()
        assert task is not None
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            has_ended = True
            task.cancel()

        try:
            async with self._gate.stream(model, end) as (server, stream), self._ask(request, server, body) as reply:
                stream.note(is_answer=False)
                if reply.status >= 400:
                    return web.Response(
                        status=reply.status, body=_cleaned(await reply.read()), headers=_kept(reply.headers)
                    )
                response = web.StreamResponse(status=reply.status, headers=_kept(reply.headers))
                await response.prepare(request)
                async for part, _ in reply.content.iter_chunks():
                    stream.note(is_answer=True)
                    await _write(response, _ESCAPED_TRACE.sub(b"", part))
            await response.write_eof()
            return response
        except (*_BROKEN, LostError):
            self._gate.suspected.set()
        except asyncio.CancelledError:
            if not has_ended:
                raise
            task.uncancel()
        tell_failure(model, _read_id(body), lost(model).message)
        if response is None:
            raise lost(model)
        await response.write(b"data: " + json.dumps({"error": words(lost(model))}).encode() + b"\n\n")
        await response.write_eof()
        return response

    async def forget(self, server: Server) -> None:
        """Close the connections to a server that is about to end; it waits for them."""
        session = self._sessions.pop(server.http_url, None)
        if session is not None:
            await session.close()


async def _write(response: web.StreamResponse, part: bytes) -> None:
    try:
        await response.write(part)
    except ConnectionError:  # the client's, not the server's
        raise asyncio.CancelledError from None


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


def _cleaned(content: bytes) -> bytes:
    """An error of Triton's, for clients.

    Raises:
        LostError: it says that the model's process has died.
    """
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content
    if is_dead(message):
        raise LostError(message)
    return json.dumps({"error": clean(message)}).encode()


def _read_id(body: bytes) -> str:
    """The name that its client gave a request; with binary tensors it stands before them."""
    found = _ID.search(body, 0, _HEAD_BYTES)
    return found[1].decode("utf-8", "replace") if found else ""


def _refusal(refused: RefusedError) -> web.Response:
    response = _error(_STATUS[refused.why], words(refused))
    response.headers["Retry-After"] = str(max(1, round(refused.retry_after)))
    return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
