"""Routes and the gate behind them: scopes, paths, callers, exposure, outcomes and the facts about models."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request
from tritonclient.grpc import service_pb2

from shoal.errors import ArtifactError
from shoal.serving.gateway.callers.callers import ANYONE, Caller, Scope
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.control.canary import Canary
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.core.models import (
    STREAM_SECONDS,
    count_processes,
    find_default,
    find_exposed,
    find_slots,
    read_hang_seconds,
)  # fmt: skip
from shoal.serving.gateway.core.upstream import SERVICE, Upstream
from shoal.serving.gateway.fronts import make_app
from shoal.serving.gateway.http.routes import Route
from shoal.serving.gateway.refusals import FailedError, LostError, RefusalReason, RefusedError
from shoal.serving.gateway.v1.errors import to_envelope
from shoal.serving.gateway.v2.grpc_front import GrpcFront
from shoal.serving.gateway.v2.http_front import HttpFront, refuse_path
from tests.support.configs import DECOUPLED, ENGINE, PYTHON, chain, make_configs, parameter
from tests.support.fake_upstream import FakeUpstream
from tests.support.gates import MINE, ask, make_gate
from tests.support.virtual_time import run


def route(answer: Callable[..., Awaitable[Any]], path: str = "/v2", scope: Scope = Scope.READ) -> Route:
    return Route("Metadata", scope, path, answer, "GET")


async def say(_: web.Request, caller: Caller, **groups: str) -> web.Response:
    return web.Response(text=f"{caller.id} {groups}")


@pytest.mark.parametrize("scope", [None, "read", ""])
def test_a_route_needs_a_scope(scope: Any) -> None:
    with pytest.raises(TypeError, match=r"The route Metadata \(/v2\) has no scope"):
        Route("Metadata", scope, "/v2", say, "GET")


def test_every_route_of_the_fronts_has_a_scope_and_a_path_of_its_own() -> None:
    async def work() -> None:
        gate = make_gate()
        for routes in (HttpFront(gate, {}).routes, GrpcFront(gate, {}).routes):
            assert all(isinstance(each.scope, Scope) for each in routes)
            assert len({each.path for each in routes}) == len(routes)
            assert {each.scope for each in routes} == set(Scope) - {Scope.METRICS}

    run(work())


@pytest.mark.parametrize("scope", list(Scope))
def test_a_caller_without_the_scope_is_refused(scope: Scope) -> None:
    one = route(say, scope=scope)
    one.check(MINE)
    one.check(Caller("x", scopes=frozenset({scope})))
    with pytest.raises(RefusedError, match=f"needs the right {scope.value}") as caught:
        one.check(Caller("x", scopes=frozenset(set(Scope) - {scope})))
    assert caught.value.reason is RefusalReason.CLOSED

    async def work() -> None:
        gate = make_gate()
        gate.callers.find = lambda *_: Caller("x", scopes=frozenset())  # type: ignore[method-assign]
        assert (await ask([one], "GET", "/v2", gate)).status == 403
        assert gate.refusals == {"closed": 1}

    run(work())


def test_the_root_lists_the_paths() -> None:
    async def work() -> None:
        gate = make_gate()
        found = json.loads((await ask(HttpFront(gate, {}).routes, "GET", "/", gate)).text)["paths"]
        assert {"GET /v2", "POST /v2/models/{model}/infer", "POST /v2/repository/index"} <= {*found}
        assert not [path for path in found if "(" in path]
        assert refuse_path("/docs").message == "There is no path '/docs' here. GET / lists the paths."

    run(work())


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2", 200, "None {}"),
        ("/v2?x=1", 200, "None {}"),
        ("/v2/models/a", 200, "None {'model': 'a', 'version': ''}"),
        ("/v2/models/a/versions/1", 200, "None {'model': 'a', 'version': '1'}"),
        ("/v2/models/%61", 200, "None {'model': '%61', 'version': ''}"),  # nothing is decoded
        ("/v2/", 404, "no /v2/"),
        ("//v2", 404, "no"),
        ("/%76%32", 404, "no /%76%32"),
        ("/v2/models/a/", 404, "no"),
        ("/v2/models/a%2Fb/c", 404, "no"),
        ("/v2/models/..", 200, "None {'model': '..', 'version': ''}"),
        ("/V2", 404, "no"),
        ("/v2/a%0Ab", 404, '{"error": "no /v2/a%0Ab"}'),
    ],
)
def test_one_form_of_the_path_decides(path: str, status: int, text: str) -> None:
    async def work() -> None:
        pattern = r"/v2/models/(?P<model>[^/]+)(/versions/(?P<version>\d+))?"
        response = await ask([route(say), route(say, pattern)], "GET", path)
        assert response.status == status
        assert text in str(response.text)

    run(work())


def test_methods_callers_and_clients_that_left() -> None:
    async def gone(*_: Any) -> Any:
        raise ConnectionResetError

    async def work() -> None:
        gate = make_gate()
        other = await ask([route(say)], "POST", "/v2", gate)
        assert (other.status, other.headers["Allow"]) == (405, "GET")
        assert gate.refusals == {"method": 1}
        gate.callers.trusted_proxies = {"None"}  # the address of a mocked request
        response = await ask([route(say)], "GET", "/v2", gate, X_Forwarded_For="1.2.3.4")
        assert response.text == "1.2.3.4 {}"
        assert (await ask([route(gone)], "GET", "/v2", gate)).status == 400

    run(work())


@pytest.mark.parametrize(
    ("kind", "retry_after", "status", "keeps"),
    [
        ("busy", 1.4, 429, False),
        ("unavailable", 5.0, 503, False),
        ("slow", 0.0, 408, False),
        ("large", 0.0, 413, False),
        ("limit", 59.2, 429, False),
        ("wrong", 0.0, 400, True),
        ("encoding", 0.0, 415, True),
    ],
)
def test_refusals_over_http(kind: str, retry_after: float, status: int, keeps: bool) -> None:
    async def refuse(*_: Any) -> Any:
        raise RefusedError(RefusalReason(kind), "no.", retry_after)

    async def work() -> None:
        gate = make_gate()
        response = await ask([route(refuse)], "GET", "/v2", gate)
        assert response.status == status
        assert response.headers.get("Retry-After", "") == (str(math.ceil(retry_after)) if retry_after else "")
        assert response.headers.get("retry-after-ms", "") == (f"{1000 * retry_after:.0f}" if retry_after else "")
        assert (response.keep_alive is not False) == keeps
        assert gate.refusals == ({} if kind in ("busy", "unavailable") else {kind: 1})

    run(work())


def test_a_fault_of_the_gateway_is_a_refusal_without_a_word_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """In the form of the route's errors; the log has the traceback."""

    async def fail(*_: Any) -> Any:
        raise KeyError("/secret/path")

    async def work() -> None:
        gate = make_gate()
        response = await ask([replace(route(fail), envelope=to_envelope)], "GET", "/v2", gate)
        assert response.status == 500
        error = json.loads(response.text)["error"]
        assert error["message"] == "The server failed on this request, and its log says why."
        assert (error["type"], error["code"]) == ("server_error", "server_error")
        assert gate.refusals == {"fault": 1}

    with caplog.at_level("ERROR"):
        run(work())
    assert "/secret/path" in caplog.text


# --- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "raised", "outcome"),
    [
        (None, None, "answered"),
        (FailedError(400, "wrong"), FailedError, "failed"),
        (FailedError(500, "fault", is_fault=True), FailedError, "failed"),
        (LostError(), RefusedError, "lost"),
    ],
)
def test_outcomes_of_requests(
    error: Exception | None, raised: Any, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        gate = make_gate()
        before = gate.active.answered

        async def call(_: Upstream, own_id: str) -> str:
            assert not own_id
            assert gate.traffic.in_flight("plain") == 1
            await asyncio.sleep(1)
            if error:
                raise error
            return "answer"

        if raised:
            with pytest.raises(raised):
                await gate.ask(MINE, "plain", b"x", call, request_id="7")
        else:
            assert await gate.ask(MINE, "plain", b"x", call) == "answer"
        assert gate.traffic.outcomes == {("plain", outcome): 1}
        assert (gate.traffic.in_flight("plain"), gate.traffic._models["plain"]._work) == (0, 0)
        assert (gate.active.answered > before) == (outcome != "lost")

    run(work())
    assert ("A request to plain failed" in caplog.text) == (outcome == "lost" or "fault" in str(error))


def test_a_request_that_can_be_stopped_has_an_id_of_its_own() -> None:
    """Not one without an id, nor one to a model that has no input stop."""

    async def work() -> None:
        gate, found = make_gate(), list[str]()

        async def call(_: Upstream, own_id: str) -> str:
            found.append(own_id)
            assert [*gate.requests.open] == ([own_id] if own_id else [])
            raise FailedError(400, f"[request id: {own_id}] it is wrong")

        for model, request_id in [("llm", "mine"), ("both", "mine"), ("llm", ""), ("plain", "mine")]:
            words = r"request id: mine\]" if (model, request_id) in [("llm", "mine"), ("both", "mine")] else r"id: \]"
            with pytest.raises(FailedError) as caught:
                await gate.ask(MINE, model, b"x", call, request_id=request_id)
            assert re.search(words, caught.value.message)
        assert [bool(each) for each in found] == [True, True, False, False]
        assert len({*found}) == 3
        assert not gate.requests.open

    run(work())


def test_quarantined_bytes_are_refused() -> None:
    async def work() -> None:
        gate = make_gate()
        gate.resending.quarantine.add("plain", b"x")

        async def call(_: Upstream, own_id: str) -> str:
            assert not own_id
            return "answer"

        with pytest.raises(RefusedError, match="The process of plain ended"):
            await gate.ask(MINE, "plain", b"x", call)
        assert await gate.ask(MINE, "plain", b"y", call) == "answer"
        assert gate.traffic.outcomes == {("plain", "refused"): 1, ("plain", "answered"): 1}

    run(work())


def test_requests_while_it_starts() -> None:
    async def work() -> None:
        gate = make_gate(is_open=False)
        for begin in (lambda: gate.reserve_memory(MINE, "plain"), lambda: gate.open_stream(MINE, "plain")):
            with pytest.raises(RefusedError, match="it is starting"):
                begin()
        assert gate.is_unready("plain", MINE)
        gate = make_gate()
        assert not gate.is_unready("plain", MINE)
        assert gate.is_unready("llm", MINE)
        with gate.reserve_memory(MINE) as held:
            held.grow(5)
            assert gate.traffic.memory.taken == 5
        assert gate.traffic.memory.taken == 0
        assert gate.open_stream(MINE).caller is MINE

    run(work())


def test_exposure() -> None:
    exposure, limited = Exposure({"a", "b"}, {"step"}), Caller("x", models=frozenset({"a", "other"}))
    names = ("a", "b", "step", "other")
    assert [exposure.is_exposed(name) for name in names] == [True, True, False, False]
    assert [exposure.is_visible(name) for name in names] == [True, True, True, False]
    assert [exposure.is_exposed(name, limited) for name in names] == [True, False, False, False]
    assert [exposure.is_visible(name, limited) for name in names] == [True, False, False, False]
    exposure.check_exposed("a", ANYONE)
    exposure.check_visible("step", ANYONE)
    with pytest.raises(RefusedError, match=r"'step' is a step, and closed to clients\. Models: a, b\.$") as caught:
        exposure.check_exposed("step", ANYONE)
    assert caught.value.reason is RefusalReason.ABSENT
    assert exposure.find_default(limited) == "a"
    exposure.default = "b"
    assert (exposure.find_default(ANYONE), exposure.find_default(limited)) == ("b", "a")
    assert exposure.find_default(Caller("x", models=frozenset())) == ""
    for name in ("b", "step", "no model"):  # the same words, whether there is such a model or not
        with pytest.raises(RefusedError, match=rf"This key is not for the model '{name}'\. Models: a\.$") as caught:
            exposure.check_visible(name, limited)
        assert caught.value.reason is RefusalReason.CLOSED


# --- facts about models, and their metrics ---------------------------------------------------------------------------


def test_facts_about_models() -> None:
    configs = make_configs(
        a=PYTHON + parameter("slots", "8") + "instance_group [ { count: 3 } ]",
        b=PYTHON + parameter("slots", "4") + parameter("hang_seconds", "7.5"),
        llm=ENGINE,
        llm2=PYTHON + DECOUPLED + parameter("hang_seconds", "9"),
        onnx='platform: "onnxruntime_onnx"',
        both=chain("a", "b"),
        none=chain("llm", "onnx"),
    )
    assert find_slots(configs) == {"a": 8, "b": 4, "both": 4}
    assert read_hang_seconds(configs) == {"b": 7.5, "llm": STREAM_SECONDS, "llm2": 9.0}
    assert count_processes(configs) == {"a": 3, "b": 1, "llm": 1, "llm2": 1}
    assert find_exposed(configs, []) == {"both", "none"}
    assert find_default(configs, {"both"}, []) == "both"
    assert find_default(configs, {"both", "none"}, []) == ""
    with pytest.raises(ArtifactError, match="slots"):
        find_slots(make_configs(a=PYTHON + parameter("slots", "0")))


def test_health_and_metrics() -> None:
    async def work(stack: ExitStack) -> None:
        gate = make_gate(is_open=False)
        health = Health(gate, {"plain": Canary("plain", {}, latency=0.5)})

        async def get(path: str) -> web.Response:
            request = make_mocked_request("GET", path)
            response = await (await health.app.router.resolve(request)).handler(request)
            assert isinstance(response, web.Response)
            return response

        assert (await get("/health/live")).status == 200
        assert (await get("/health/ready")).status == 503
        assert "shoal_ready 0.0" in str((await get("/metrics")).text)
        gate.active.upstream, gate.active.closed = FakeUpstream(), ""
        assert (await get("/health/ready")).status == 200
        stack.enter_context(gate.traffic.admit("plain", 1, MINE))
        gate.traffic.count("plain", "answered")
        gate.note_refusal(RefusedError(RefusalReason.LARGE, "no"))
        health.restarts["died"] += 1
        gate.active.block(["llm"], "it died")
        text = str((await get("/metrics")).text)  # and Triton does not answer
        for line in (
            "shoal_ready 0.0", 'shoal_model_ready{model="plain"} 1.0', 'shoal_model_ready{model="llm"} 0.0',
            'shoal_in_flight{model="plain"} 1.0', 'shoal_streams{model="both"} 0.0',
            'shoal_restarts_total{kind="died"} 1.0', 'shoal_refusals_total{kind="large"} 1.0',
            'shoal_requests_total{model="plain",outcome="answered"} 1.0', "shoal_resent_total 0.0",
            'shoal_canary_seconds{model="plain"} 0.5', 'shoal_queue_seconds_count{model="plain"} 0.0',
            'shoal_restarts_total{kind="memory"} 0.0', 'shoal_refusals_total{kind="limit"} 0.0',
            'shoal_requests_total{model="plain",outcome="lost"} 0.0',
        ):  # fmt: skip
            assert line in text.splitlines()
        assert 'shoal_streams{model="llm"}' not in text, "it is not exposed"

    with ExitStack() as stack:
        asyncio.run(work(stack))


@pytest.mark.parametrize("value", [b"100-continue", b"\x8f", b"other", b"x" * 4000])
def test_expectations(value: bytes) -> None:
    """A client that waits is asked for the body; others are answered, whatever bytes the header has."""

    async def look() -> bytes:
        async with TestServer(make_app(gate := make_gate(), HttpFront(gate, {}).routes)) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            head = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: %s\r\n\r\n"
            writer.write(head % value)
            answer = await reader.read()
            writer.close()
            return answer

    begin = b"HTTP/1.1 100 Continue\r\n\r\n" if value == b"100-continue" else b""
    assert asyncio.run(look()).startswith(begin + b"HTTP/1.1 200 OK")


def test_clients_see_a_part_of_answers_about_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP and gRPC alike: no private fields, no closed extensions, no models that are not theirs."""
    index = service_pb2.RepositoryIndexResponse(models=[{"name": "plain"}, {"name": "hidden"}])
    config = service_pb2.ModelConfigResponse(config={"name": "plain", "metric_tags": {"a": "b"}})
    metadata = service_pb2.ServerMetadataResponse(name="triton", extensions=["statistics", "trace"])
    answers = {"RepositoryIndex": index, "ModelConfig": config, "ServerMetadata": metadata}
    documents = {
        "/v2/repository/index": [{"name": "plain"}, {"name": "hidden"}],
        "/v2/models/plain/config": {"name": "plain", "metric_tags": {"a": "b"}},
        "/v2": {"name": "triton", "extensions": ["statistics", "trace"]},
    }

    async def fetch_grpc(_: GrpcFront, method: str, *__: Any) -> bytes:
        return bytes(answers[method].SerializeToString())

    async def fetch_http(_: HttpFront, __: str, path: str, *___: Any) -> Any:
        return documents[path.replace("both", "plain")]  # the default model

    async def work() -> None:
        gate = make_gate()
        http, rpc = HttpFront(gate, {}), {route.path: route for route in GrpcFront(gate, {}).routes}
        found = [
            json.loads((await ask(http.routes, verb, path, gate)).text or "")
            for verb, path in (("POST", "/v2/repository/index"), ("GET", "/v2/models/plain/config"), ("GET", "/v2"))
        ]
        assert found == [[{"name": "plain"}], {"name": "plain"}, {"name": "triton", "extensions": ["statistics"]}]
        assert json.loads((await ask(http.routes, "GET", "/v2/models//config", gate)).text or "") == {"name": "plain"}
        for method, right in (
            ("RepositoryIndex", service_pb2.RepositoryIndexResponse(models=[{"name": "plain"}])),
            ("ModelConfig", service_pb2.ModelConfigResponse(config={"name": "plain"})),
            ("ServerMetadata", service_pb2.ServerMetadataResponse(name="triton", extensions=["statistics"])),
        ):
            assert await rpc[f"{SERVICE}{method}"].answer(b"", ANYONE, None) == right.SerializeToString()

    monkeypatch.setattr(GrpcFront, "_fetch", fetch_grpc)
    monkeypatch.setattr(HttpFront, "_fetch", fetch_http)
    run(work())
