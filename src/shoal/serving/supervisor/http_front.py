"""The front door for HTTP: Triton's own paths, passed on; refusals as 429 and 503, with Retry-After."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from shoal.serving.server import Server
from shoal.serving.supervisor.fronts import clean, is_dead, tell_failure, words
from shoal.serving.supervisor.gate import Gate, LostError, RefusedError, Why

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/(infer|generate|generate_stream)")
_READY = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/ready")
_ID = re.compile(rb'"id"\s*:\s*"([^"]{1,200})"')
_HEAD_BYTES = 65_536
_STATUS = {Why.BUSY: 429, Why.UNAVAILABLE: 503}
# Of one connection alone, or made anew by whoever sends.
_ADDED_HEADERS = "Accept", "Accept-Encoding", "Content-Type", "User-Agent"  # which aiohttp would send unasked
_OWN_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade", "expect"}


class HttpFront:
    """An aiohttp application that asks the server of the day."""

    def __init__(self, gate: Gate, *, most_bytes: int) -> None:
        self._gate, self._most_bytes = gate, most_bytes
        self._session: Any = None  # there while the application runs
        self.app = web.Application(client_max_size=most_bytes)
        self.app.router.add_route("*", "/{path:.*}", self._answer)
        self.app.cleanup_ctx.append(self._hold_session)

    async def _hold_session(self, _: web.Application) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, skip_auto_headers=_ADDED_HEADERS
        ) as session:
            self._session = session
            yield

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        try:
            if path == "/v2/health/live":
                return web.Response()
            if path == "/v2/health/ready":
                return web.Response(status=400 if self._gate.trouble() else 200)
            if (found := _READY.fullmatch(path)) and self._gate.trouble(unquote(found[1])):
                return web.Response(status=400)
            body = await request.read()
            found = _INFER.fullmatch(path)
            model = unquote(found[1]) if found else ""
            if found and found[2] == "generate_stream":
                return await self._stream(request, model, body)
            reply = await self._gate.send(
                model, len(body), lambda server: self._pass(request, server, body), lambda reply: reply.status >= 400
            )
            if reply.status >= 500:
                tell_failure(model, _read_id(body), str(reply.reason))
            return reply
        except RefusedError as refused:
            if refused.is_lost:
                tell_failure(path, "", refused.message)
            return _refusal(refused)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"The request is larger than {self._most_bytes} bytes. Send fewer rows at a time.")

    async def _pass(self, request: web.Request, server: Server, body: bytes) -> web.StreamResponse:
        try:
            async with self._ask(request, server, body) as reply:
                content = await reply.read()
        except aiohttp.ClientConnectionError as error:
            raise LostError(str(error)) from None
        if reply.status >= 400:
            content = _cleaned(content)
        return web.Response(status=reply.status, body=content, headers=_kept(reply.headers))

    def _ask(self, request: web.Request, server: Server, body: bytes) -> Any:
        url = f"http://{server.http_url}{request.raw_path}"
        return self._session.request(
            request.method, _as_sent(url), data=body or None, headers=_kept(request.headers), allow_redirects=False
        )

    async def _stream(self, request: web.Request, model: str, body: bytes) -> web.StreamResponse:
        """Answers as they come; one that was begun cannot be asked for again."""
        response = None
        async with self._gate.stream(model, len(body)) as server:
            try:
                async with self._ask(request, server, body) as reply:
                    response = web.StreamResponse(status=reply.status, headers=_kept(reply.headers))
                    await response.prepare(request)
                    async for part in reply.content.iter_any():
                        await response.write(part)
                await response.write_eof()
                return response
            except aiohttp.ClientConnectionError:
                self._gate.suspected.set()
                lost = RefusedError(Why.UNAVAILABLE, f"The server of {model} ended in the middle of an answer.", 5.0)
                if response is None:
                    raise lost from None
                await response.write(b"data: " + json.dumps({"error": words(lost)}).encode() + b"\n\n")
                await response.write_eof()
                return response


def _as_sent(url: str) -> Any:
    from yarl import URL

    return URL(url, encoded=True)  # Triton does not decode names of models


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


def _cleaned(content: bytes) -> bytes:
    """An error of Triton's, for clients.

    Raises:
        LostError: it says that the model's process has died.
    """
    try:
        message = json.loads(content)["error"]
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
