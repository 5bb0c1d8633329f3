"""HTTP port for operators: liveness, readiness and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
from aiohttp import web

from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.key_ring import KeyRing
from shoal.serving.gateway.control.canary import Canary
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.stream_requests import KINDS
from shoal.serving.gateway.http.routes import HttpRoutes, Route
from shoal.serving.gateway.refusals import no_path


class Health:
    """HTTP application with ``/health/live``, ``/health/ready``, and the metrics of Triton and the service."""

    def __init__(self, gate: Gate, canaries: dict[str, Canary]) -> None:
        self._gate, self._canaries = gate, canaries
        self.restarts: Counter[str] = Counter()  # by what went wrong
        self.routes = [
            Route("Liveness", Scope.OPEN, "/health/live", self._answer_live, "GET, HEAD"),
            Route("Readiness", Scope.OPEN, "/health/ready", self._answer_ready, "GET, HEAD"),
            Route("Metrics", Scope.METRICS, "/metrics", self._answer_metrics, "GET, HEAD"),
        ]
        self.app = HttpRoutes(gate, self.routes, no_path).app

    async def _answer_live(self, *_: Any) -> web.Response:
        return web.json_response({"live": True})

    async def _answer_ready(self, _: web.Request, caller: Caller) -> web.Response:
        trouble = self._gate.active.trouble()
        if Scope.METRICS not in caller.scopes:  # names and states of models are not for everybody
            return web.json_response({"ready": not trouble}, status=503 if trouble else 200)
        models = {name: self._gate.active.trouble(name) or "ready" for name in sorted(self._gate.traffic.models)}
        body = {"ready": not trouble, "why": trouble, "models": models}
        return web.json_response(body, status=503 if trouble else 200)

    async def _answer_metrics(self, *_: Any) -> web.Response:
        return web.Response(text=await self._triton() + self._own(), content_type="text/plain", charset="utf-8")

    async def _triton(self) -> str:
        upstream = self._gate.active.upstream
        if upstream is None:
            return ""
        try:
            timeout = aiohttp.ClientTimeout(total=2)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://{upstream.server.metrics_url}/metrics") as reply,
            ):
                return await reply.text()
        except (aiohttp.ClientError, TimeoutError):  # Triton does not answer, and is about to be replaced
            return ""

    def _own(self) -> str:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Any]:
        """Yield the service's metrics, without those of Triton (prometheus_client's interface)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        active, traffic, requests = self._gate.active, self._gate.traffic, self._gate.requests
        yield GaugeMetricFamily("shoal_ready", "Whether requests are accepted", value=not active.trouble())
        ready = GaugeMetricFamily("shoal_model_ready", "Whether requests to a model are accepted", labels=["model"])
        in_flight = GaugeMetricFamily("shoal_in_flight", "Requests in flight", labels=["model"])
        for name in traffic.models:
            ready.add_metric([name], not active.trouble(name))
            in_flight.add_metric([name], traffic.in_flight(name))
        streams = GaugeMetricFamily("shoal_streams", "Requests in flight that are answered in pieces", labels=["model"])
        first = SummaryMetricFamily(
            "shoal_first_answer_seconds",
            "Time from a request that is answered in pieces to its first answer",
            labels=["model"],
        )
        for name in filter(self._gate.exposure.is_exposed, requests.models):
            streams.add_metric([name], traffic.in_flight(name))
            first.add_metric([name], *requests.first_answers.get(name, (0, 0.0)))
        tokens = CounterMetricFamily(
            "shoal_tokens", "Tokens of prompts (input) and answers (output)", labels=["model", "kind"]
        )
        for name in filter(self._gate.exposure.is_exposed, requests.tokens.models):
            for kind in KINDS:
                tokens.add_metric([name, kind], requests.tokens.counts[name, kind])
        yield from (streams, first, tokens)
        latency = GaugeMetricFamily(
            "shoal_canary_seconds", "Latency of a model's last canary request", labels=["model"]
        )
        for name, canary in self._canaries.items():
            latency.add_metric([name], canary.latency)
        restarts = CounterMetricFamily("shoal_restarts", "Servers started because of a fault", labels=["kind"])
        for kind, number in self.restarts.items():
            restarts.add_metric([kind], number)
        outcomes = CounterMetricFamily("shoal_requests", "Requests by outcome", labels=["model", "outcome"])
        for key, number in traffic.outcomes.items():
            outcomes.add_metric(key, number)
        yield from (ready, in_flight, latency, restarts, outcomes)
        refusals = CounterMetricFamily("shoal_refusals", "Client errors by kind", labels=["kind"])
        for kind, number in self._gate.refusals.items():
            refusals.add_metric([kind], number)
        yield refusals
        if isinstance(keys := self._gate.callers.keys, KeyRing):
            damaged = "Whether the file of keys is damaged or missing"
            yield GaugeMetricFamily("shoal_keys_damaged", damaged, value=keys.is_damaged)
            asked = CounterMetricFamily("shoal_key_requests", "Requests by key and outcome", labels=["key", "outcome"])
            used = CounterMetricFamily("shoal_key_tokens", "Tokens by key and kind", labels=["key", "kind"])
            for account in keys.accounts.values():
                for outcome in ("answered", "failed", "refused"):
                    asked.add_metric([account.name, outcome], account.outcomes[outcome])
                for kind in KINDS:
                    used.add_metric([account.name, kind], account.tokens[kind])
            yield from (asked, used)
        yield CounterMetricFamily(
            "shoal_resent", "Requests that were resent to the next server", value=self._gate.resending.num_resent
        )
