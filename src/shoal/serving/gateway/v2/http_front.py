"""HTTP front end of Triton's inference API: its routes, and the requests and answers that pass them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from shoal.kit.component.spec import STOP
from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.upstream import Reply, Upstream
from shoal.serving.gateway.http.bodies import CHUNK, LARGE, cut, join, read_body, work_apart
from shoal.serving.gateway.http.client_stream import find_metadata
from shoal.serving.gateway.http.routes import Route
from shoal.serving.gateway.refusals import FailedError, RefusalReason, RefusedError, closed, no_path, wrong
from shoal.serving.gateway.v2.generate import Generate
from shoal.serving.gateway.v2.questions import MODEL, PRIVATE, QUESTIONS, READY, Question
from shoal.serving.gateway.v2.rules import Rules
from shoal.serving.gateway.v2.screening import screen_json

_CLOSED = {
    "/v2/repository/": "Model control",
    "/v2/systemsharedmemory": "Shared memory",
    "/v2/cudasharedmemory": "Shared memory",
    "/v2/logging": "Logging",
    "/v2/trace": "Tracing",
}
_HEAD_LENGTH = "Inference-Header-Content-Length"
# Answers are not compressed, so that errors can be read.
_ANSWER_HEADERS = ("Content-Type", _HEAD_LENGTH)


class HttpFront:
    """Passes clients' HTTP requests to the active Triton server."""

    def __init__(self, gate: Gate, rules: Mapping[str, Rules]) -> None:
        self._gate, self._rules = gate, rules
        self._generate = Generate(gate, rules)
        everybody, infer = Scope.OPEN, Scope.INFER
        self.routes = [
            Route("Liveness", everybody, "/v2/health/live", self._answer_live, "GET"),
            Route("Readiness", everybody, "/v2/health/ready", self._answer_ready, "GET"),
            Route("Readiness", everybody, "/health", self._answer_health, "GET"),
            *(Route(q.name, q.scope, path, partial(self._answer, q), q.verb) for q in QUESTIONS for path in q.paths),
            Route("Inference", infer, f"{MODEL}/infer", self._answer_infer, "POST"),
            Route("Generation", infer, f"{MODEL}/generate", self._answer_generate, "POST"),
            Route("Generation", infer, f"{MODEL}/generate_stream", self._answer_generate_stream, "POST"),
        ]

    # --- questions -----------------------------------------------------------------------------------------------

    async def _answer_live(self, *_: Any) -> web.Response:
        return web.Response()

    async def _answer_ready(self, *_: Any) -> web.Response:
        return web.Response(status=400 if self._gate.active.trouble() else 200)

    async def _answer_health(self, *_: Any) -> web.Response:
        """Answer vLLM's question, which its clients ask first."""
        return web.Response(status=503 if self._gate.active.trouble() else 200)

    async def _answer(
        self, question: Question, request: web.Request, caller: Caller, model: str = "", **_: str
    ) -> web.Response:
        exposure, path = self._gate.exposure, request.rel_url.raw_path
        if question.is_config and not model:
            path = f"/v2/models/{exposure.find_default(caller)}/config"
        model = question.find_model(exposure, model, caller)
        if question is READY and self._gate.is_unready(model, caller):
            return web.Response(status=400)
        document = await self._fetch(request.method, path, caller)
        if question.entries:
            entries = document if isinstance(document, list) else document[question.entries]
            entries[:] = question.select(entries, lambda e: e if isinstance(e, str) else e["name"], exposure, caller)
        if question.is_config:
            document = {name: value for name, value in document.items() if name not in PRIVATE}
        return web.json_response(document)

    async def _fetch(self, method: str, path: str, caller: Caller) -> Any:
        """Send a request to Triton on behalf of a client, with the administrator's key, and return the reply's JSON."""

        async def call(upstream: Upstream, _: str) -> Reply:
            return await upstream.http.ask(method, path, {}, is_admin=True)

        try:
            reply = await self._gate.ask(caller, "", path.encode(), call)
        except FailedError as error:
            raise RefusedError(
                RefusalReason.ABSENT if error.status == 404 else RefusalReason.WRONG, error.message
            ) from None
        return json.loads(reply.content) if reply.content else None

    # --- inference -----------------------------------------------------------------------------------------------

    async def _answer_infer(self, request: web.Request, caller: Caller, model: str, **_: str) -> web.StreamResponse:
        self._gate.exposure.check_exposed(model, caller)
        with self._gate.reserve_memory(caller, model) as held:
            parts = await read_body(request, self._gate, held)
            headers = _request_headers(request)
            lengths = request.headers.getall(_HEAD_LENGTH, [])
            work = partial(_screen, parts, lengths, headers, self._rules[model])
            is_quick = lengths and held.num_bytes <= LARGE // 8
            body, request_id = work() if is_quick else await work_apart(work, held.num_bytes, LARGE)
            del work, parts  # a copy of the body
            if self._gate.requests.may_stop(model, body) and _is_stop(body, headers):
                self._gate.stop(caller, model, request_id)
                return web.json_response({"id": request_id, "model_name": model, "outputs": []})
            return await self._pass(request, caller, model, headers, body, request_id, held)

    async def _answer_generate(
        self, request: web.Request, caller: Caller, model: str, version: str, *, is_whole: bool = True
    ) -> web.StreamResponse:
        self._gate.exposure.check_exposed(model, caller)
        with self._gate.reserve_memory(caller, model) as held:
            body = await join(await read_body(request, self._gate, held))
            message, request_id = await self._generate.convert(body, model, version)
            requests = self._gate.requests
            if is_whole and requests.may_stop(model, body) and requests.is_stop(model, message.SerializeToString()):
                self._gate.stop(caller, model, request_id)
                return web.json_response({"id": request_id, "model_name": model})
            if not is_whole or requests.is_decoupled(model):
                return await self._generate.answer(request, caller, message, request_id, len(body), is_whole=is_whole)
            headers = {name: value for name, value in _request_headers(request).items() if name != _HEAD_LENGTH}
            return await self._pass(request, caller, model, headers, body, request_id, held)

    async def _answer_generate_stream(
        self, request: web.Request, caller: Caller, model: str, version: str
    ) -> web.StreamResponse:
        return await self._answer_generate(request, caller, model, version, is_whole=False)

    async def _pass(
        self,
        request: web.Request,
        caller: Caller,
        model: str,
        headers: dict[str, str],
        body: bytes,
        request_id: str,
        held: Reservation,
    ) -> web.StreamResponse:
        """Send a request that was checked to Triton, and its reply to the client."""
        path = request.rel_url.raw_path

        async def call(upstream: Upstream, own_id: str) -> Reply:
            if not own_id:
                return await upstream.http.ask("POST", path, headers, body)
            reply = await upstream.http.ask("POST", path, *_mark(headers, body, own_id))
            return _restore(reply, own_id, request_id)

        def is_waited_for() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        try:
            reply = await self._gate.ask(caller, model, body, call, is_waited_for=is_waited_for, request_id=request_id)
        except FailedError as error:
            content = json.dumps({"error": error.message}).encode()
            return web.Response(status=error.status, body=content, content_type="application/json")
        self._gate.callers.check_valid(caller)
        response: web.StreamResponse = web.Response(body=reply.content, headers=_kept(reply.headers))
        if len(reply.content) > CHUNK:
            response = web.StreamResponse(headers=_kept(reply.headers))
            response.content_length = len(reply.content)
        held.grow(len(reply.content))  # until the client has read it
        await response.prepare(request)
        if len(reply.content) > CHUNK:
            async for piece in cut(reply.content):
                await response.write(piece)
        await response.write_eof()
        return response


def _request_headers(request: web.Request) -> dict[str, str]:
    """Return the headers for Triton.

    Content-Type is not among them: if it says that the body is a form, as curl does by default, Triton 24.10 copies the
    body onto the stack, and crashes from 4 MiB on.
    """
    length = request.headers.get(_HEAD_LENGTH)
    return dict(find_metadata(request)) | ({_HEAD_LENGTH: length} if length else {})


def refuse_path(path: str) -> RefusedError:
    """Build the refusal of a path that no route has."""
    what = next((what for prefix, what in _CLOSED.items() if path.startswith(prefix)), "")
    if not what and path.startswith("/v2/") and path.endswith(("/trace/setting", "/load", "/unload")):
        what = "Model control"
    return closed(what) if what else no_path(path)


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
        raise wrong(f"{_HEAD_LENGTH} {', '.join(lengths)[:40]!r} is not a length within the body.")
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


def _is_stop(body: bytes, headers: Mapping[str, str]) -> bool:
    """Whether an inference request that was checked has an input ``stop`` that is true."""
    at = int(headers.get(_HEAD_LENGTH, len(body)))
    for tensor in json.loads(body[:at])["inputs"]:
        end = at + tensor.get("parameters", {}).get("binary_data_size", 0)
        if tensor["name"] == STOP and (any(body[at:end]) or "true" in json.dumps(tensor.get("data"))):
            return True
        at = end
    return False


def _mark(headers: dict[str, str], body: bytes, own_id: str) -> tuple[dict[str, str], bytes]:
    """Put an id before the client's id in a request's JSON: of two equal keys, Triton takes the first one."""
    added = json.dumps({"id": own_id}).encode()[:-1] + b","
    return _lengthen(headers, len(added) - 1), added + body.lstrip()[1:]


def _restore(reply: Reply, own_id: str, request_id: str) -> Reply:
    """Replace the id in a reply's JSON, whose first occurrence is the reply's own, by the client's."""
    own, given = (json.dumps(each, ensure_ascii=False).encode() for each in (own_id, request_id))
    return Reply(_lengthen(reply.headers, len(given) - len(own)), reply.content.replace(own, given, 1))


def _lengthen(headers: Mapping[str, str], number: int) -> dict[str, str]:
    length = headers.get(_HEAD_LENGTH)
    return {**headers, **({_HEAD_LENGTH: str(int(length) + number)} if length else {})}


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name in _ANSWER_HEADERS if (value := headers.get(name))}
