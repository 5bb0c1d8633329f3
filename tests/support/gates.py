"""Gates of the gateway for tests, and requests to its routes."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from yarl import URL

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.stream_requests import StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.http.routes import HttpRoutes, Route
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from tests.support.configs import ENGINE, PYTHON, chain, make_configs
from tests.support.fake_upstream import FakeUpstream

CONFIGS = make_configs(llm=ENGINE, plain=PYTHON, both=chain("plain", "llm"))
MINE = Caller("mine")


def make_gate(limits: Limits | None = None, *, is_open: bool = True, resends: bool = False) -> Gate:
    active, limits = ActiveServer(), limits or Limits()
    if is_open:
        active.upstream, active.closed = FakeUpstream(), ""
    traffic = Traffic(active, CONFIGS, limits, max_wait=1.0)
    exposure = Exposure({"both", "plain"}, {"llm"}, "both")
    return Gate(active, traffic, exposure, StreamRequests(CONFIGS), limits, resends=resends)


async def ask(routes: list[Route], method: str, path: str, gate: Gate | None = None, **headers: str) -> Any:
    """Ask the application of some routes; the answer is a response, or an error of the server's own."""
    app = HttpRoutes(gate or make_gate(), routes, lambda path: RefusedError(RefusalReason.ABSENT, f"no {path}")).app
    request = make_mocked_request(method, "/", CIMultiDict({k.replace("_", "-"): v for k, v in headers.items()}))
    raw_path, _, query = path.partition("?")
    request = request.clone(rel_url=URL.build(path=raw_path, query_string=query, encoded=True))  # as aiohttp's parser
    found = await app.router.resolve(request)
    return await found.handler(request)
