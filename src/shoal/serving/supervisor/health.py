"""The port for those who look after the service: is it live, is it ready, what are its figures."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from shoal.serving.supervisor.canary import Canary
from shoal.serving.supervisor.gate import Gate


class Health:
    """``/health/live``, ``/health/ready`` and ``/metrics``: Triton's metrics, and the service's own."""

    def __init__(self, gate: Gate, canaries: dict[str, Canary]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._gate, self._canaries = gate, canaries
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry}
        self.restarts = Counter("shoal_restarts", "Servers started because of a fault", ["kind"], **own)
        self._ready = Gauge("shoal_ready", "Whether requests are let in", **own)
        self._blocked = Gauge("shoal_model_ready", "Whether requests to a model are let in", ["model"], **own)
        self._in_flight = Gauge("shoal_in_flight", "Requests under way", ["model"], **own)
        self._latency = Gauge("shoal_canary_seconds", "What the last canary of a model took", ["model"], **own)
        self._outcomes = Gauge("shoal_turned_away_total", "Requests refused or lost", ["model", "kind"], **own)
        self._resent = Gauge("shoal_resent_total", "Requests sent once more, to the next server", **own)
        self.app = web.Application()
        self.app.router.add_get("/health/live", self._answer_live)
        self.app.router.add_get("/health/ready", self._answer_ready)
        self.app.router.add_get("/metrics", self._answer_metrics)

    async def _answer_live(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _answer_ready(self, _: web.Request) -> web.Response:
        trouble = self._gate.trouble()
        models = {name: self._gate.trouble(name) or "ready" for name in sorted(self._gate.in_flight())}
        body = {"ready": not trouble, "why": trouble, "models": models}
        return web.json_response(body, status=503 if trouble else 200)

    async def _answer_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=await self._triton() + self._own(), content_type="text/plain", charset="utf-8")

    async def _triton(self) -> str:
        upstream = self._gate.upstream
        if upstream is None:
            return ""
        try:
            timeout = aiohttp.ClientTimeout(total=2)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://{upstream.server.metrics_url}/metrics") as reply,
            ):
                return await reply.text()
        except (aiohttp.ClientError, TimeoutError):  # it is about to be replaced
            return ""

    def _own(self) -> str:
        from prometheus_client import generate_latest

        self._ready.set(not self._gate.trouble())
        for name, number in self._gate.in_flight().items():
            self._in_flight.labels(name).set(number)
            self._blocked.labels(name).set(not self._gate.trouble(name))
        for name, canary in self._canaries.items():
            self._latency.labels(name).set(canary.latency)
        for (name, kind), number in self._gate.outcomes.items():
            self._outcomes.labels(name, kind).set(number)
        self._resent.set(self._gate.num_resent)
        return generate_latest(self._registry).decode()
