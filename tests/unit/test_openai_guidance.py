"""Requests of newcomers: paths, fields and forms of other servers, and a model that is not named."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from shoal.authoring.repository.apis import BODIES
from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.stream_requests import StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.fronts import make_app
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.v1.elsewhere import show_instances
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.front import ApiFront
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v2.http_front import HttpFront
from tests.support.configs import PYTHON, make_configs
from tests.support.fake_upstream import FakeUpstream
from tests.support.openai_requests import KINDS, ask, refuse

TENSORS = """
backend: "python" max_batch_size: 4
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "{}" data_type: TYPE_FP32 dims: [ 3 ] }} ]
"""
EMBEDDER, CLASSIFIER = TENSORS.format("embeddings"), TENSORS.format("PROBS")
RANKER = """
backend: "python" max_batch_size: 4
input [ { name: "A" data_type: TYPE_STRING dims: [ 1 ] }, { name: "B" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
MODELS = {"minilm": EMBEDDER, "sentiment": CLASSIFIER, "ranker": RANKER, "numbers": PYTHON}
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def post(
    path: str,
    body: Any,
    models: dict[str, str] = MODELS,
    aliases: Mapping[str, str] | None = None,
    caller: Caller | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """Send a request to a gateway of some models; return the status and the answer's JSON."""
    configs, active = make_configs(Path(), **models), ActiveServer()
    active.upstream, active.closed = FakeUpstream(), ""
    traffic = Traffic(active, configs, Limits(), max_wait=1.0)
    gate = Gate(active, traffic, Exposure(configs), StreamRequests(configs), Limits(), resends=False)
    if caller is not None:
        gate.callers.find = lambda *_: caller  # type: ignore[method-assign]
    api = ApiFront(gate, configs, aliases or {})

    async def work() -> tuple[int, Any]:
        app = make_app(gate, [*HttpFront(gate, {}).routes, *api.routes], "", api.say_place)
        sent = {"Content-Type": JSON, **(headers or {})}
        content = body if isinstance(body, str) else json.dumps(body)
        async with TestClient(TestServer(app)) as client:
            reply = await client.post(path, data=content, headers=sent)
            return reply.status, await reply.json()

    return asyncio.run(work())


def say(path: str, body: Any, models: dict[str, str] = MODELS, **given: Any) -> str:
    """Return the message of a refusal."""
    error = post(path, body, models, **given)[1]["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Models and inputs that were asked; each row's answer is ones."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def infer(self: ModelRequest, values: dict[str, Any]) -> dict[str, Any]:
        asked.append((self.model, values))
        (output,) = self._spec.outputs
        return {output.name: np.ones((len(next(iter(values.values()))), *output.dims), np.float32)}

    monkeypatch.setattr(ModelRequest, "infer", infer)
    return asked


@pytest.mark.parametrize(
    ("path", "place", "model"),
    [
        ("/embed", "/v1/embeddings", "minilm"), ("/embed/", "/v1/embeddings", "minilm"),
        ("/api/embed", "/v1/embeddings", "minilm"), ("/api/embeddings", "/v1/embeddings", "minilm"),
        ("/v2/embed", "/v1/embeddings", "minilm"), ("/v1/embed", "/v1/embeddings", "minilm"),
        ("/v2/rerankers", "/v1/rerank", "ranker"),
        ("/v1/rerankers", "/v1/rerank", "ranker"), ("/similarity", "/v1/score", "ranker"),
        ("/classify", "/v1/classify", "sentiment"), ("/predict", "/v1/classify", "sentiment"),
        ("/invocations", "/v1/classify", "sentiment"), ("/models/sentiment", "/v1/classify", "sentiment"),
        ("/models/minilm", "/v1/embeddings", "minilm"), ("/models/bert-base", "/v1/classify", "sentiment"),
        ("/predictions/minilm", "/v1/embeddings", "minilm"),
        ("/predictions/numbers", "/v1/models/numbers:predict", None),
        ("/models/minilm/invoke", "/v1/embeddings", "minilm"),
    ],
)  # fmt: skip
def test_paths_of_other_servers_name_a_request_that_works(path: str, place: str, model: str | None) -> None:
    head, _, body = say(path, {"inputs": "What is Deep Learning?"}).partition(" and send: ")
    assert head.startswith(f"There is no path '{path}' here. ")
    assert head.endswith(f"Use POST {place}, with Content-Type: application/json,")
    sent = json.loads(body)
    assert sent.get("model") == model
    assert post(place, sent)[0] == 200


def test_paths_of_other_servers_without_a_model_for_them() -> None:
    for path, place in (
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/chat/completions", "/v1/chat/completions"),
    ):
        body = json.dumps({"model": "NAME", **BODIES[place]})
        assert say(path, {}).endswith(f"Use POST {place}, with Content-Type: application/json, and send: {body}")
    assert "POST /v1/models/NAME:predict" in say("/predict", {}, {})
    assert "POST /v1/embeddings" in say("/predict", {}, {"minilm": EMBEDDER})
    assert "POST /v1/models/numbers:predict" in say("/predict", {}, {"numbers": PYTHON})
    for path, place in (("/metrics", "GET /metrics on the metrics port"), ("/api/tags", "GET /v1/models")):
        assert say(path, {}).endswith(f"GET / lists the paths. Use {place}.")
    for path in ("/v2/nothing", "/docs", "/embedder", "/models/"):
        assert "POST" not in say(path, {})


def test_paths_of_other_servers_name_models_of_the_caller_alone() -> None:
    nobody = Caller("x", scopes=frozenset({Scope.OPEN}), is_known=False)
    assert '"model": "NAME"' in say("/embed", {}, caller=nobody)
    assert '"model": "NAME"' in say("/v1/embed", {}, caller=nobody)
    assert '"model": "NAME"' in say("/embed", {}, caller=Caller("x", models=frozenset({"ranker"})))
    assert '"model": "minilm"' in say("/embed", {}, caller=Caller("x", models=frozenset({"minilm"})))


@pytest.mark.parametrize("value", ["NaN", "x" * 5000, "%0A", "a/b"])
def test_odd_paths_are_answered(value: str) -> None:
    assert post(f"/models/{value}", {})[0] == 404


# --- a request without a model --------------------------------------------------------------------------------------


def test_the_only_model_of_a_path_needs_no_name(answers: list[tuple[str, dict[str, Any]]]) -> None:
    """Other names of it do not count, nor do models that the caller may not ask."""
    two = {**MODELS, "other": EMBEDDER}
    for models, given in (
        (MODELS, {}),
        (MODELS, {"aliases": {"text-embedding-3-small": "minilm"}}),
        (two, {"caller": Caller("x", models=frozenset({"minilm", "ranker"}))}),
    ):
        status, answer = post("/v1/embeddings", {"input": "a"}, models, **given)
        assert (status, answer["model"]) == (200, "minilm")
    assert post("/v1/rerank", {"query": "a", "documents": ["b"]})[1]["model"] == "ranker"
    assert {model for model, _ in answers} == {"minilm", "ranker"}
    for models, names in ((two, "minilm, numbers, other, ranker, sentiment"), ({}, "none")):
        status, answer = post("/v1/embeddings", {"input": "a"}, models)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (
            400,
            "missing_required_parameter",
            "model",
        )
        assert answer["error"]["message"] == f"The request has no model. Models: {names}."
    assert say("/v1/embeddings", {"input": "a", "model": ""}) == "model: Expected string of length >= 1."


def test_names_as_hubs_have_them() -> None:
    """With a slash and a colon, in a path as it is or encoded."""
    name = "org/tiny:8b"
    given: dict[str, Any] = {"aliases": {name: "minilm"}}
    assert post("/v1/embeddings", {"model": name, "input": "a"}, **given)[1]["model"] == name
    for written in (name, "org%2Ftiny:8b"):
        assert post(f"/v1/models/{written}:predict", {"instances": ["a"]}, **given)[0] == 200


# --- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("rerank", "texts", "documents"), ("rerank", "passages", "documents"), ("rerank", "document", "documents"),
        ("embeddings", "inputs", "input"), ("embeddings", "text", "input"), ("embeddings", "texts", "input"),
        ("embeddings", "sentences", "input"), ("embeddings", "prompt", "input"), ("classify", "inputs", "input"),
        ("classify", "instances", "input"), ("completion", "inputs", "prompt"), ("completion", "text", "prompt"),
        ("completion", "message", "prompt"), ("chat", "prompt", "messages"), ("chat", "message", "messages"),
        ("chat", "inputs", "messages"), ("response", "messages", "input"), ("message", "prompt", "messages"),
        ("predict", "input", "inputs"), ("predict", "data", "instances"), ("tokenize", "message", "messages"),
        ("tokenize", "text", "prompt"), ("chat", "temprature", "temperature"),
    ],
)  # fmt: skip
def test_a_field_of_another_server_names_the_one_here(kind: str, name: str, meant: str) -> None:
    refused = refuse(kind, {name: "a"})
    assert (refused.message, refused.param) == (f"Unknown parameter: {name!r}. Did you mean {meant}?", name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["a", 5, 1.5, True, None, [], {}, ["a", 5, None, []]])
def test_no_refusal_has_types_of_python(kind: str, value: Any) -> None:
    for name in KINDS[kind][0].__struct_fields__:
        with suppress(ApiError):
            ask(kind, {name: value})
            continue
        assert not re.search(r"`|(?<!')\b(str|int|float|bool|dict|None|True)\b", refuse(kind, {name: value}).message)


# --- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"model": "minilm", "input": "a"}), ("/v1/models/minilm:predict", {"instances": ["a"]})],
)
def test_curl_needs_no_content_type(path: str, body: dict[str, Any]) -> None:
    """A page could send such a form without asking first. Its browser says so, by either header."""
    form = {"Content-Type": FORM}
    assert post(path, body, headers=form)[0] == 200
    assert post(path, body, headers={"Origin": "http://127.0.0.1:8000"})[0] == 200
    for headers in ({"Origin": "null"}, {"origin": "http://localhost"}, {"sec-fetch-site": "same-origin"}):
        status, answer = post(path, body, headers=form | headers)
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    for kind in ("text/plain", "multipart/form-data; boundary=a"):
        assert post(path, body, headers={"Content-Type": kind})[0] == 415
    assert post(path, "input=a", headers=form)[1]["error"]["message"] == "The body is not JSON."


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["instances", "inputs"])
def test_a_text_alone_is_a_row(field: str, answers: list[tuple[str, dict[str, Any]]]) -> None:
    for text in ("I like you.", ""):
        assert post("/v1/models/sentiment:predict", {field: text}) == (200, {"predictions": [{"PROBS": [1.0] * 3}]})
        assert answers[-1] == ("sentiment", {"TEXT": [text]})
    path = "/v1/models/numbers:predict"
    message = say(path, {field: "I like you."})
    assert message == (
        'The model has no input for texts alone: give values by input, such as {"instances": [{"X": 0.5}]}'
    )
    assert post(path, json.loads(message.partition("such as ")[2]))[0] == 200
    assert say("/v1/models/ranker:predict", {field: "a"}).endswith('{"instances": [{"A": "text", "B": "text"}]}')
    assert say(path, {field: 5}).startswith(f"{field}: Expected ")


def test_examples_of_rows() -> None:
    inputs = 'input [ { name: "X" data_type: TYPE_%s dims: [ %s ] %s } ]'
    for form, shown in (
        (("INT64", "-1, 3", ""), '{"X": [[1, 1, 1], [1, 1, 1]]}'),
        (("BOOL", "2", ""), '{"X": [true, true]}'),
        (("FP32", "1000", ""), '{"X": [0.5, ...]}'),
        (("STRING", "2", ""), '{"X": ["text", "text"]}'),
        (("BF16", "1", "optional: true"), '{"X": 0.5}'),
    ):
        spec = make_configs(a=f'backend: "python" max_batch_size: 4 {inputs % form}')["a"].spec
        assert show_instances(spec) == f'{{"instances": [{shown}]}}'
