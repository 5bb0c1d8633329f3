"""The ports for clients: Triton's inference API over HTTP and gRPC, and OpenAI's API on the port for HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from shoal.authoring.repository.config import ModelConfig
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.http.certificates import Certificates
from shoal.serving.gateway.http.listener import listen
from shoal.serving.gateway.http.routes import HttpRoutes, Route
from shoal.serving.gateway.options import CLOSING_SECONDS, Addresses, Options
from shoal.serving.gateway.v1.front import ApiFront
from shoal.serving.gateway.v2.grpc_front import GrpcFront, make_server
from shoal.serving.gateway.v2.http_front import HttpFront, refuse_path
from shoal.serving.gateway.v2.rules import read_rules


def make_app(
    gate: Gate, routes: Iterable[Route], cors: str = "", say_place: Callable[[str, Caller], str] | None = None
) -> web.Application:
    """Return the application of the port for HTTP, on which all APIs have their routes."""
    return HttpRoutes(gate, routes, refuse_path, cors, say_place).app


@asynccontextmanager
async def open_fronts(
    gate: Gate, configs: Mapping[str, ModelConfig], options: Options, at: Addresses, tls: Certificates | None
) -> AsyncIterator[None]:
    """Listen at the ports for HTTP and gRPC, with ``tls`` if it is given, while the context is open.

    Requests that arrive before Triton is ready are refused with the reason.
    """
    rules = read_rules(configs, is_lenient=options.is_lenient)
    api = ApiFront(gate, configs, options.aliases)
    app = make_app(gate, [*HttpFront(gate, rules).routes, *api.routes], options.cors, api.say_place)
    server = make_server(GrpcFront(gate, rules), at.grpc, options.limits, tls)
    async with listen(app, at.http, options, tls):
        await server.start()
        try:
            yield
        finally:
            await server.stop(CLOSING_SECONDS)
