"""Routes: the paths and methods that are open to clients, each with the scope that a caller needs for it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from shoal.gateway.core.callers import Caller, Scope
from shoal.gateway.core.gate import Gate
from shoal.gateway.core.refusals import RefusedError, Why, keyless

Envelope = Callable[[RefusedError, int], dict[str, Any]]  # makes the JSON of a refusal from it and its status
_STATUS = {
    Why.BUSY: 429, Why.UNAVAILABLE: 503, Why.WRONG: 400, Why.ABSENT: 404, Why.CLOSED: 403, Why.METHOD: 405,
    Why.KEY: 401, Why.LARGE: 413, Why.ENCODING: 415, Why.SLOW: 408,
}  # fmt: skip


def find_status(refused: RefusedError) -> int:
    """Return the HTTP status of a refusal."""
    return _STATUS[refused.why]


def to_error(refused: RefusedError, _: int) -> dict[str, Any]:
    """Return a refusal in Triton's form of errors."""
    return {"error": refused.words}


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
                raise keyless()
            raise RefusedError(
                Why.CLOSED, f"{self.name} is closed to this client: it needs the scope {self.scope.value}."
            )


class HttpRoutes:
    """The HTTP application of a port: finds the route of a request, and its caller.

    A route's ``answer`` gets the request, the caller and the groups of the path. ``refuse_path`` builds the refusal of
    a path that no route has. The path decides as the client sent it: nothing in it is decoded, as Triton does not
    decode it either.
    """

    def __init__(self, gate: Gate, routes: Iterable[Route], refuse_path: Callable[[str], RefusedError]) -> None:
        self._gate, self._refuse_path = gate, refuse_path
        known = [*routes]
        self._fixed = {route.path: route for route in known if "(" not in route.path}
        self._patterns = [(re.compile(route.path), route) for route in known if "(" in route.path]
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        envelope: Envelope = to_error
        try:
            route, groups = self._find(request.rel_url.raw_path)
            envelope = route.envelope
            if request.method not in route.method.split(", "):
                raise RefusedError(Why.METHOD, f"{request.method} is not for this path. Use {route.method}.")
            headers, callers = request.headers, self._gate.callers
            keys = *headers.getall("Authorization", ()), *map("Bearer {}".format, headers.getall("X-Api-Key", ()))
            caller = callers.find(str(request.remote), headers.getall("X-Forwarded-For", ()), keys)
            route.check(caller)
            with callers.watch(caller, partial(_abort, request)):
                response: web.StreamResponse = await route.answer(request, caller, **groups)
        except ConnectionError:  # the client has disconnected: the response is dropped
            return web.Response(status=400)
        except RefusedError as refused:
            return self._refuse(refused, envelope)
        else:
            return response

    def _find(self, path: str) -> tuple[Route, dict[str, str]]:
        if route := self._fixed.get(path):
            return route, {}
        for pattern, route in self._patterns:
            if found := pattern.fullmatch(path):
                return route, found.groupdict(default="")
        raise self._refuse_path(path)

    def _refuse(self, refused: RefusedError, envelope: Envelope) -> web.Response:
        self._gate.note_refusal(refused)
        status = find_status(refused)
        response = web.json_response(envelope(refused, status), status=status)
        if refused.retry_after:
            response.headers["Retry-After"] = str(refused.retry_seconds)
        if refused.why is Why.KEY:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refused.why in (Why.SLOW, Why.BUSY, Why.LARGE, Why.UNAVAILABLE, Why.KEY):
            response.force_close()  # without waiting for the rest of the body
        return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
