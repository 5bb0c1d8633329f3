"""Routes: the paths and methods that are open to clients, each with the scope that a caller needs for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shoal.errors import forget_frames
from shoal.serving.gateway.callers.access_log import begin_entry, current_entry
from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.refusals import FAULT, RefusalReason, RefusedError, keyless

Envelope = Callable[[RefusedError, int], dict[str, Any]]  # makes the JSON of a refusal from it and its status
_STATUSES = 429, 503, 400, 404, 403, 401, 429, 405, 413, 415, 408, 500
_STATUS = dict(zip(RefusalReason, _STATUSES, strict=True))
_CLOSING = {RefusalReason(kind) for kind in ("slow", "busy", "large", "unavailable", "key", "limit")}
# for web pages: what they may read of an answer, and what they may send, besides the headers that they ask for
_KINDS, _FACTS = ("Requests", "Tokens", "At-Once"), ("Limit", "Remaining", "Reset")  # of the limits of keys
_LIMITS = [f"X-RateLimit-{fact}-{kind}" for kind in _KINDS for fact in _FACTS]
_CORS = {
    "Access-Control-Expose-Headers": ", ".join(
        ["Inference-Header-Content-Length", "Retry-After", "Retry-After-Ms", "X-Request-Id", *_LIMITS]
    )
}
_PREFLIGHT = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
_SENT = "Authorization, Content-Type, Inference-Header-Content-Length, X-Api-Key, X-Request-Id"
_ASKED = re.compile(r"[A-Za-z0-9-]{1,64}( ?, ?[A-Za-z0-9-]{1,64}){0,63}", re.ASCII)  # the clients of OpenAI add many


def find_status(refused: RefusedError) -> int:
    """Return the HTTP status of a refusal."""
    return _STATUS[refused.reason]


def to_error(refused: RefusedError, _: int) -> dict[str, Any]:
    """Return a refusal in Triton's form of errors."""
    return {"error": refused.client_message}


@dataclass(frozen=True)
class Route:
    """Something that clients may ask for, by HTTP or gRPC.

    For HTTP, ``method`` is GET or POST (or several: ``GET, HEAD``), and ``path`` is a path or, if it has groups, a
    regular expression for paths.
    For gRPC, ``path`` is the full name of the method. ``envelope`` makes the JSON of a refusal from it and its status.

    Raises:
        TypeError: the route has no scope.
    """

    name: str
    scope: Scope
    path: str
    answer: Callable[..., Awaitable[Any]]
    method: str = ""
    envelope: Envelope = to_error

    def __post_init__(self) -> None:
        if not isinstance(self.scope, Scope):
            raise TypeError(f"The route {self.name} ({self.path}) has no scope: nobody may use it.")

    def check(self, caller: Caller) -> None:
        """Raise ``RefusedError`` if the caller lacks the route's scope."""
        if self.scope not in caller.scopes:
            if not caller.is_known:
                raise keyless(caller.retry_after)
            raise RefusedError(
                RefusalReason.CLOSED, f"{self.name} is closed to this client: it needs the right {self.scope.value}."
            )


def _show(route: Route) -> str:
    """Return a route's method and path, with names for its groups; empty for a pattern, or another form of a path."""
    path = re.sub(r"\(\?:.*\)\?", "", re.sub(r"\(\?P<(\w+)>[^()]*\)", r"{\1}", route.path))
    return "" if "(" in path or "//" in path else f"{route.method} {path}"


async def _expect(request: web.Request) -> None:
    """Ask for the body, if the client waits for that. aiohttp's own handler fails on values that are not UTF-8."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun


class HttpRoutes:
    """The HTTP application of a port: finds the route of a request, and its caller.

    A route's ``answer`` gets the request, the caller and the groups of the path. ``refuse_path`` builds the refusal of
    a path that no route has; ``say_place`` says what a caller may send instead. GET / lists the paths. The path decides
    as the client sent it: nothing in it is decoded, as Triton does not decode it either. Web pages of the origin
    ``cors`` may read answers.
    """

    def __init__(
        self,
        gate: Gate,
        routes: Iterable[Route],
        refuse_path: Callable[[str], RefusedError],
        cors: str = "",
        say_place: Callable[[str, Caller], str] | None = None,
    ) -> None:
        self._gate, self._refuse_path, self._cors, self._say_place = gate, refuse_path, cors, say_place
        known = [*routes]
        self._listing = sorted(filter(None, (_show(route) for route in known)))
        known.append(Route("Paths", Scope.OPEN, "/", self._answer_root, "GET"))
        self._fixed = {route.path: route for route in known if "(" not in route.path}
        self._patterns = [(re.compile(route.path), route) for route in known if "(" in route.path]
        # before those of the listener, so that what these refuse is noted too
        self.app = web.Application(middlewares=[self._note])
        self.app.on_response_prepare.append(self._add_headers)
        path = r"/{path:[\s\S]*}"  # a name may have a newline
        self.app.router.add_route("*", path, self._answer, expect_handler=_expect)

    @web.middleware
    async def _note(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Give a request its entry of the access log, and end that."""
        given = request.headers.getall("X-Request-Id", [])
        entry, status = begin_entry(self._gate.audit, str(request.remote), given), 500
        try:
            try:
                response = await handler(request)
            except RefusedError as refused:  # by the listener
                response = self._refuse(refused, self._find_envelope(request.rel_url.raw_path))
            status, entry.sent = response.status, response.body_length or response.content_length or 0
            return response
        finally:
            entry.received = request.content.total_bytes
            entry.end(status, is_answered=status < 400 and not entry.reason)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        entry = current_entry()
        entry.has_begun = True
        response.headers.update(entry.headers())
        if self._cors:
            response.headers["Vary"] = "Origin"
            if self._is_of_page(request):
                response.headers.update(_CORS | {"Access-Control-Allow-Origin": self._cors})

    def _is_of_page(self, request: web.Request) -> bool:
        """Whether a page of the origin that is allowed sends a request."""
        return bool(self._cors) and request.headers.getall("Origin", []) == [self._cors]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "OPTIONS" and self._is_of_page(request):  # a browser's question, which has no key
            asked = request.headers.get("Access-Control-Request-Headers", "")
            sent = f"{_SENT}, {asked}" if _ASKED.fullmatch(asked) else _SENT
            return web.Response(status=204, headers=_PREFLIGHT | {"Access-Control-Allow-Headers": sent})
        entry = current_entry()
        envelope: Envelope = to_error
        try:
            try:
                route, groups = self._find(request.rel_url.raw_path)
            except RefusedError as refused:
                caller = entry.caller = self._find_caller(request)
                if refused.reason is RefusalReason.CLOSED and not caller.is_known:
                    raise keyless(caller.retry_after) from None
                if self._say_place and (place := self._say_place(request.rel_url.raw_path, caller)):
                    refused.message += f" {place}"
                raise
            entry.route, envelope = route.name, route.envelope
            if request.method not in route.method.split(", "):
                message = f"{request.method} is not for this path. Use {route.method}."
                response: web.StreamResponse = self._refuse(RefusedError(RefusalReason.METHOD, message), envelope)
                response.headers["Allow"] = route.method
                return response
            caller = entry.caller = self._find_caller(request)
            route.check(caller)
            response = await route.answer(request, caller, **groups)
            if not response.prepared:
                self._gate.callers.check_valid(caller)
        except ConnectionError:  # the client has disconnected: the response is dropped
            entry.reason = "disconnected"
            return web.Response(status=400)
        except RefusedError as refused:
            return self._refuse(refused, envelope)
        except Exception:
            if entry.has_begun:  # the end of the connection is all that can be said
                raise
            log.exception("A request for %s failed", entry.route)
            return self._refuse(RefusedError(RefusalReason.FAULT, FAULT), envelope)
        else:
            return response

    async def _answer_root(self, *_: Any) -> web.Response:
        return web.json_response({"paths": self._listing})

    def _find_caller(self, request: web.Request) -> Caller:
        headers = request.headers
        keys, others = headers.getall("Authorization", []), headers.getall("X-Api-Key", [])
        keys += [key for key in map("Bearer {}".format, others) if [key] != keys]  # some clients send both
        return self._gate.callers.find(str(request.remote), headers.getall("X-Forwarded-For", ()), keys)

    def _find(self, path: str) -> tuple[Route, dict[str, str]]:
        if route := self._fixed.get(path):
            return route, {}
        for pattern, route in self._patterns:
            if found := pattern.fullmatch(path):
                return route, found.groupdict(default="")
        raise self._refuse_path(path)

    def _find_envelope(self, path: str) -> Envelope:
        with contextlib.suppress(RefusedError):
            return self._find(path)[0].envelope
        return to_error

    def _refuse(self, refused: RefusedError, envelope: Envelope) -> web.Response:
        self._gate.note_refusal(refused)
        forget_frames(refused)  # or what they hold of the request stays until the next full collection
        current_entry().refuse(refused)
        status = find_status(refused)
        response = web.json_response(envelope(refused, status), status=status)
        response.headers.extend(refused.headers)
        if refused.reason is RefusalReason.KEY:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refused.reason in _CLOSING:
            response.force_close()  # without waiting for the rest of the body
        return response
