"""HTTP front: forwards requests to those of Triton's paths that are open to clients, and refuses all others."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc  # type: ignore[import-untyped]
from aiohttp import web
from yarl import URL

from shoal.gateway.bodies import read_body
from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.fronts import (
    EXTENSIONS,
    HEADERS,
    absent,
    clean,
    closed,
    is_dead,
    note,
    tell_failure,
    trim_config,
    words,
)
from shoal.gateway.generate import to_json, to_message
from shoal.gateway.grpc_messages import WITH_END, find_last, is_cut, parse
from shoal.gateway.limits import Hold
from shoal.gateway.refusals import LostError, RefusedError, Why, lost
from shoal.gateway.screening import LARGE, check_json, screen_json, screen_message, screen_nesting
from shoal.gateway.stops import METHOD, Stops
from shoal.gateway.upstream import Stream
from shoal.repository.config import ModelConfig
from shoal.server.launch import Server

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
_REQUEST_HEADERS = (*HEADERS, "Content-Type", _HEAD_LENGTH)
# Answers are not compressed, so that errors can be read.
_ANSWER_HEADERS = ("Content-Type", _HEAD_LENGTH)
_ADDED_HEADERS = "Accept", "Accept-Encoding", "Content-Type", "User-Agent"  # which aiohttp would add
_EVENTS = "text/event-stream; charset=utf-8"
_LOOK_SECONDS = 0.05  # between two looks whether a stream's client has left
# Triton's words.
_UNKNOWN = "Request for unknown model"
_NOT_ONE = "generate expects model to produce exactly 1 response, use generate stream for models that produce more."
_BROKEN = (aiohttp.ClientError, ConnectionError)


@dataclass
class _Answer:
    """A client's part of a stream: its events as they come, or with ``is_whole`` its only one."""

    request: web.Request
    model: str
    is_whole: bool
    own_id: str
    given_id: str
    response: web.StreamResponse | None = None
    is_done: bool = False
    num_events: int = 0
    first: bytes = b""
    status: int = 200
    began: float = field(default_factory=time.monotonic)

    @property
    def has_left(self) -> bool:
        """Whether the client has closed its connection."""
        return self.request.transport is None or self.request.transport.is_closing()

    def read(self, message: Any) -> tuple[bytes, bool]:
        """Return a message's JSON, empty for the one that only marks the end; and whether it is the last."""
        answer = message.infer_response
        is_last = find_last(message)
        if message.error_message:
            if is_dead(message.error_message):
                raise LostError(message.error_message)
            text = clean(message.error_message.replace(self.own_id, self.given_id or "<id_unknown>"))
            if not self.num_events:
                self.status = 404 if text.startswith(_UNKNOWN) else 400
            return json.dumps({"error": text}).encode(), is_last
        return b"" if is_last and not answer.outputs else to_json(answer, self.given_id), is_last

    async def take(self, document: bytes) -> None:
        """Pass on an answer, or keep the first."""
        self.num_events += 1
        if self.is_whole or self.status >= 400:
            self.first = self.first or document
            return
        response = await self._begin()
        # Triton 24.10 can crash when a stream is abandoned: the rest of it is read and discarded
        if not self.has_left:
            await _write(response, b"data: " + document + b"\n\n")

    async def _begin(self) -> web.StreamResponse:
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": _EVENTS})
            await self.response.prepare(self.request)
        return self.response

    async def finish(self) -> web.StreamResponse:
        """End the answer."""
        if self.is_whole and self.num_events != 1:
            raise RefusedError(Why.WRONG, f"{_NOT_ONE} {self.model} gave {self.num_events} answers.")
        if self.is_whole or self.status >= 400:
            return web.Response(status=self.status, body=self.first, content_type="application/json")
        response = await self._begin()
        if not self.has_left:
            await response.write_eof()
        return response


class HttpFront:
    """aiohttp application backed by the active server."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        configs: Mapping[str, ModelConfig],
        stops: Stops,
        channel: Callable[[Server], Any],
    ) -> None:
        self._dispatcher, self._configs, self._stops, self._channel = dispatcher, configs, stops, channel
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            path = request.rel_url.raw_path
            if wanted := _OF_ALL.get(path):
                _check_method(request, wanted)
                return await self._answer_of_all(path)
            if path == _NO_MODEL:
                if not self._dispatcher.default:
                    raise absent("", self._dispatcher)
                path = f"/v2/models/{self._dispatcher.default}/config"
            found = _MODEL.fullmatch(path)
            what = (found["what"] or "") if found else ""
            if found is None or what not in _ASKED:
                raise _no_path(path)
            _check_method(request, _ASKED[what])
            model = found["model"]
            if what == "ready" and self._dispatcher.is_unready(model):
                return web.Response(status=400)
            is_known = self._dispatcher.is_told if what in ("", "config", "stats") else self._dispatcher.is_exposed
            if not is_known(model):
                raise absent(model, self._dispatcher)
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
            note(self._dispatcher, refused)
            response = web.json_response({"error": words(refused)}, status=_STATUS[refused.why])
            if refused.retry_after:
                response.headers["Retry-After"] = str(max(1, round(refused.retry_after)))
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
                document["model_stats"] = [entry for entry in stats if self._dispatcher.is_told(entry["name"])]
            case _:
                index = await self._fetch("POST", path)
                document = [entry for entry in index if self._dispatcher.is_exposed(entry["name"])]
        return web.json_response(document)

    async def _fetch(self, method: str, path: str) -> Any:
        """Ask Triton with the administrator's key, on behalf of a client."""

        async def call(server: Server) -> tuple[int, bytes]:
            try:
                headers = {"admin-key": server.admin_key}
                async with self._ask(server, method, path, headers, b"") as reply:
                    return reply.status, await reply.read()
            except _BROKEN as error:
                raise LostError(str(error)) from None

        status, content = await self._dispatcher.send("", path.encode(), call, lambda reply: reply[0] >= 400)
        if status >= 400:
            try:
                message = str(json.loads(_cleaned(content))["error"])
            except (ValueError, KeyError, TypeError):  # an error that is not Triton's JSON
                message = f"The server answered with status {status} and gave no reason."
            raise RefusedError(Why.ABSENT if status == 404 else Why.WRONG, message)
        return json.loads(content) if content else None

    # --- inference -----------------------------------------------------------------------------------------------

    async def _pass(self, request: web.Request, found: re.Match[str], address: str, held: Hold) -> web.StreamResponse:
        model, what = found["model"], found["what"]
        body = await read_body(request, self._dispatcher, held)
        headers = {name: value for name in _REQUEST_HEADERS if (value := request.headers.get(name))}
        lengths = request.headers.getall(_HEAD_LENGTH, [])
        if len(body) > LARGE:
            body, request_id = await asyncio.to_thread(_screen, body, lengths, what, headers)
        else:
            body, request_id = _screen(body, lengths, what, headers)
        if what == "generate_stream" or (what == "generate" and self._stops.is_decoupled(model)):
            return await self._stream(request, found, address, body)
        path = request.rel_url.raw_path

        async def call(server: Server) -> web.Response:
            try:
                async with self._ask(server, "POST", path, headers, body) as reply:
                    content = await reply.read()
            except _BROKEN as error:
                raise LostError(str(error)) from None
            status = reply.status
            if status >= 400:
                content = _cleaned(content)
                status = 400 if _UNREADABLE.match(content) else status
            return web.Response(status=status, body=content, headers=_kept(reply.headers))

        def is_waited_for() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        try:
            reply = await self._dispatcher.send(model, body, call, lambda reply: reply.status >= 400, is_waited_for)
        except RefusedError as refused:
            if refused.is_lost:
                tell_failure(model, request_id, refused.message)
            raise
        if reply.status >= 500:
            tell_failure(model, request_id, str(reply.reason))
        held.grow(len(reply.body or b""))  # type: ignore[arg-type]  # until the client has read it
        await reply.prepare(request)
        await reply.write_eof()
        return reply

    @asynccontextmanager
    async def _ask(
        self, server: Server, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if server.http_url not in self._sessions:
            self._sessions[server.http_url] = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                skip_auto_headers=_ADDED_HEADERS,
            )
        url = URL(f"http://{server.http_url}{path}", encoded=True)
        async with self._sessions[server.http_url].request(
            method, url, data=body or None, headers=headers, allow_redirects=False
        ) as reply:
            yield reply

    async def _stream(
        self, request: web.Request, found: re.Match[str], address: str, body: bytes
    ) -> web.StreamResponse:
        """Stream answers as they arrive, or collect the only one; a stream that has begun cannot be resent."""
        model = found["model"]
        message, given_id = to_message(body, self._configs[model].spec, (found["version"] or "").rpartition("/")[2])
        screen_message(message, model)
        own_id = message.id = self._stops.next_id()
        message.parameters[WITH_END].bool_param = True
        answer = _Answer(request, model, found["what"] == "generate", own_id, given_id)
        task = asyncio.current_task()
        assert task is not None
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            has_ended = True
            task.cancel()

        try:
            with self._dispatcher.place(address):
                self._dispatcher.enter(model, len(body))
                try:
                    async with self._dispatcher.stream(model, address, end) as (server, stream):
                        leaving = asyncio.create_task(self._leave(server, answer))
                        try:
                            await self._relay(server, message, stream, answer)
                        finally:
                            answer.is_done = True
                            leaving.cancel()
                finally:
                    self._dispatcher.leave(model, len(body), is_done=answer.is_done)
            return await answer.finish()
        except LostError:
            self._dispatcher.suspected.set()
        except asyncio.CancelledError:
            if not has_ended:
                raise
            task.uncancel()
        tell_failure(model, given_id, lost(model).message)
        if answer.response is None:
            raise lost(model)
        await _write(answer.response, b"data: " + json.dumps({"error": words(lost(model))}).encode() + b"\n\n")
        await answer.response.write_eof()
        return answer.response

    async def _relay(self, server: Server, message: Any, stream: Stream, answer: _Answer) -> None:
        headers = [(name.lower(), value) for name in HEADERS if (value := answer.request.headers.get(name))]
        call = self._channel(server).stream_stream(METHOD)(iter([message.SerializeToString()]), metadata=headers)
        stream.note_request()
        meter = self._dispatcher.tokens.meter(answer.model)
        is_last = False
        try:
            async for content in call:
                if is_last:
                    continue
                parsed = parse("ModelStreamInferResponse", content)
                if meter is not None:
                    meter.read(parsed.infer_response)
                document, is_last = answer.read(parsed)
                stream.note_answer(is_last=is_last)
                self._dispatcher.answered = time.monotonic()
                if answer.num_events == 0:
                    self._dispatcher.note_first(answer.model, time.monotonic() - answer.began)
                if document:
                    await answer.take(document)
        except grpc.aio.AioRpcError as error:
            if is_cut(error.code(), error.details() or ""):
                raise LostError(error.details() or "") from None
            raise RefusedError(Why.WRONG, clean(error.details() or "")) from None
        finally:
            if not call.done():
                call.cancel()

    async def _leave(self, server: Server, answer: _Answer) -> None:
        """Wait until the client has left, and tell the engine."""
        while not answer.has_left:
            await asyncio.sleep(_LOOK_SECONDS)
        if self._stops.is_decoupled(answer.model):
            await self._stops.leave(server, answer.model, answer.own_id, lambda: answer.is_done)

    async def forget(self, server: Server) -> None:
        """Close the connections to a server that is about to stop: it would wait for them."""
        session = self._sessions.pop(server.http_url, None)
        if session is not None:
            await session.close()


def _check_method(request: web.Request, wanted: str) -> None:
    if request.method != wanted:
        raise RefusedError(Why.METHOD, f"{request.method} is not for this path. Use {wanted}.")


def _no_path(path: str) -> RefusedError:
    what = next((what for prefix, what in _CLOSED.items() if path.startswith(prefix)), "")
    if not what and path.endswith(("/trace/setting", "/load", "/unload")):
        what = "Model control"
    return closed(what) if what else RefusedError(Why.ABSENT, f"There is no path {path[:100]!r} here.")


def _screen(body: bytes, lengths: list[str], what: str, headers: dict[str, str]) -> tuple[bytes, str]:
    """Screen a body; returns the body for Triton and the request's id, and updates the header with the JSON's length.

    Raises:
        RefusedError: it would crash Triton, or is not a request.
    """
    if what != "infer":
        screen_nesting(body)
        check_json(body)
        return body, ""
    if not lengths:
        return screen_json(body, 0)
    if len(lengths) > 1 or not re.fullmatch(r"\d{1,12}", lengths[0]) or int(lengths[0]) > len(body):
        raise RefusedError(Why.WRONG, f"{_HEAD_LENGTH} {', '.join(lengths)[:40]!r} is not a length within the body.")
    length = int(lengths[0])
    if not length:  # the whole body is the model's single tensor
        return body, ""
    head, request_id = screen_json(body[:length], len(body) - length)
    headers[_HEAD_LENGTH] = str(len(head))
    return head + body[length:], request_id


async def _write(response: web.StreamResponse, part: bytes) -> bool:
    """Write a part; returns whether the client is still connected."""
    try:
        await response.write(part)
    except ConnectionError:
        return False
    return True


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name in _ANSWER_HEADERS if (value := headers.get(name))}


def _cleaned(content: bytes) -> bytes:
    """Clean an error of Triton's for clients.

    Raises:
        LostError: it reports that the model's process has died.
    """
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content
    if is_dead(message):
        raise LostError(message)
    return json.dumps({"error": clean(message)}).encode()
