"""HTTP port for operators: liveness, readiness and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, get_args

import aiohttp
from aiohttp import web

from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.key_ring import KeyRing
from shoal.serving.gateway.control.canary import Canary
from shoal.serving.gateway.control.process_monitor import FaultKind
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.stream_requests import KINDS
from shoal.serving.gateway.core.traffic import OUTCOMES
from shoal.serving.gateway.http.routes import HttpRoutes, Route
from shoal.serving.gateway.refusals import CLIENT_ERRORS, no_path

_SUFFIXES = {"gauge": ("",), "counter": ("_total",), "summary": ("_count", "_sum")}  # of samples' names


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
        from prometheus_client import generate_latest

        return generate_latest(self).decode()

    def collect(self) -> Iterator[Any]:
        """Yield the service's metrics, without those of Triton (prometheus_client's interface)."""
        from prometheus_client import Metric

        for kind, name, says, labels, values in self._read():
            family = Metric(f"shoal_{name}", says, kind)
            for key, value in values.items():
                labelled = dict(zip(labels.split(), (key,) if isinstance(key, str) else key, strict=True))
                for suffix, number in zip(_SUFFIXES[kind], value if kind == "summary" else (value,), strict=True):
                    family.add_sample(family.name + suffix, labelled, float(number))
            yield family

    def _read(self) -> Iterator[tuple[str, str, str, str, Mapping[Any, Any]]]:
        """Yield type, name, help and labels of each metric, and its values by those of its labels."""
        gate, active, traffic, requests = self._gate, self._gate.active, self._gate.traffic, self._gate.requests
        exposed, streamed = ([*filter(gate.exposure.is_exposed, each.models)] for each in (traffic, requests))
        counted = filter(gate.exposure.is_exposed, requests.tokens.models)
        yield "gauge", "ready", "Whether requests are accepted", "", {(): not active.trouble()}
        ready = {name: not active.trouble(name) for name in traffic.models}
        yield "gauge", "model_ready", "Whether requests to a model are accepted", "model", ready
        in_flight = {name: traffic.in_flight(name) for name in traffic.models}
        yield "gauge", "in_flight", "Requests in flight", "model", in_flight
        streams = {name: in_flight[name] for name in streamed}
        yield "gauge", "streams", "Requests in flight that are answered in pieces", "model", streams
        waits = {name: traffic.queue(name).waits for name in exposed}
        yield "summary", "queue_seconds", "Time that a request waits in the service for its turn", "model", waits
        firsts = {name: requests.first_answers.get(name, (0, 0.0)) for name in streamed}
        yield "summary", "first_answer_seconds", "Time to the first answer of those in pieces", "model", firsts
        tokens = {key: requests.tokens.counts[key] for key in product(counted, KINDS)}
        yield "counter", "tokens", "Tokens of prompts (input) and answers (output)", "model kind", tokens
        canaries = {name: canary.latency for name, canary in self._canaries.items()}
        yield "gauge", "canary_seconds", "Latency of a model's last canary request", "model", canaries
        # 0 of what has not happened: Prometheus sees no increase in a counter that appears with 1
        restarts = {kind: self.restarts[kind] for kind in get_args(FaultKind)}
        yield "counter", "restarts", "Servers started because of a fault", "kind", restarts
        outcomes = {**dict.fromkeys(product(exposed, OUTCOMES), 0), **traffic.outcomes}
        yield "counter", "requests", "Requests by outcome", "model outcome", outcomes
        refusals = {kind: gate.refusals[kind] for kind in CLIENT_ERRORS}
        yield "counter", "refusals", "Client errors by kind", "kind", refusals
        yield "counter", "resent", "Requests resent to the next server", "", {(): gate.resending.num_resent}
        if isinstance(keys := gate.callers.keys, KeyRing):
            is_damaged, accounts = {(): keys.is_damaged}, keys.accounts.values()
            yield "gauge", "keys_damaged", "Whether the file of keys is damaged or missing", "", is_damaged
            asked = {(a.name, each): a.outcomes[each] for a in accounts for each in ("answered", "failed", "refused")}
            yield "counter", "key_requests", "Requests by key and outcome", "key outcome", asked
            used = {(a.name, kind): a.tokens[kind] for a in accounts for kind in KINDS}
            yield "counter", "key_tokens", "Tokens by key and kind", "key kind", used
