"""Requests of OpenAI's API and its neighbours: what their types take and refuse, and the refusals' documents."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from shoal.authoring.repository.apis import Api, Served
from shoal.kit.generation.pieces import Piece
from shoal.kit.text import tokens
from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.callers.quotas import Quota, Reservation
from shoal.serving.gateway.http.routes import find_status
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from shoal.serving.gateway.v1 import counts, schema
from shoal.serving.gateway.v1.chat import _Completion, describe_places
from shoal.serving.gateway.v1.counts import Texts
from shoal.serving.gateway.v1.errors import ApiError, to_envelope
from shoal.serving.gateway.v1.messages import to_anthropic
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.prediction_requests import PredictRequest
from shoal.serving.gateway.v1.predictions import answer_embeddings, answer_rerank, answer_score
from tests.support.configs import make_configs
from tests.support.once import ROOT
from tests.support.openai_requests import BOUNDS, CHAT, KINDS, USER, ask, messages, parts, refuse

WRONG, UNKNOWN, NOT_SERVED = "invalid_value", "unknown_parameter", "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "within", "beyond", "place"), BOUNDS, ids=[f"{name} {place}" for name, _, _, place in BOUNDS]
)
def test_bounds(name: str, within: list[Any], beyond: list[Any], place: str) -> None:
    kind, field = name.split()
    for value in within:
        ask(kind, {field: value})
    for value in beyond:
        refused = refuse(kind, {field: value})
        assert (refused.param, refused.reason) == (place, RefusalReason.WRONG), (value, refused)
        assert refused.code in (WRONG, NOT_SERVED), refused


def test_contents() -> None:
    ask("chat", messages(1, parts(1024)))
    assert refuse("chat", messages(1, parts(1025))).param == "messages[0].content"
    assert refuse("chat", messages(1, [])).param == "messages[0].content"
    assert refuse("chat", messages(1, None)).param == "messages[0].content"
    assert refuse("chat", {"messages": [USER, {"role": "robot", "content": "a"}]}).param == "messages[1].role"
    for kind, field, roles in (
        ("chat", "messages", "'assistant', 'developer', 'system', 'tool', 'user'"),
        ("message", "messages", "'assistant', 'user'"),
        ("response", "input", "'assistant', 'developer', 'system', 'user'"),
    ):
        refused = refuse(kind, {field: [{"role": "usr", "content": "a"}]})
        assert refused.message == f"{field}[0].role: Invalid enum value 'usr'. Valid: {roles}."
    found = ask("chat", {"messages": [{"role": "developer", "content": parts(2)}]}).messages[0].to_plain()
    assert found == {"role": "system", "content": "a\na"}


NOT_MADE: list[tuple[str, dict[str, Any], str]] = [  # what OpenAI and Anthropic have, and where it is
    ("chat", {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ("chat", {"functions": []}, "functions"),
    ("chat", {"modalities": ["audio"]}, "modalities[0]"),
    ("chat", {"audio": {"voice": "a"}}, "audio"),
    ("chat", {"prediction": {"type": "content"}}, "prediction"),
    ("chat", {"store": True}, "store"),
    ("chat", {"web_search_options": {}}, "web_search_options"),
    ("chat", {"messages": [{"role": "function", "content": "a", "name": "b"}]}, "messages[0].role"),
    ("chat", messages(1, [{"type": "image_url", "image_url": {"url": "http://a/b"}}]), "messages[0].content[0].type"),
    ("completion", {"suffix": "a"}, "suffix"),
    ("completion", {"best_of": 2}, "best_of"),
    ("response", {"previous_response_id": "a"}, "previous_response_id"),
    ("response", {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ("response", {"background": True}, "background"),
    ("response", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("response", {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ("response", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ("response", {"context_management": [{"type": "compaction"}]}, "context_management"),
    ("response", {"background_options": {}}, "background_options"),
    ("response", {"image": {}}, "image"),
    ("chat", {"moderation": {"model": "a"}}, "moderation"),
    ("message", {"container": "a"}, "container"),
    ("message", {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("message", {"output_format": {"type": "json_schema"}}, "output_format"),
    ("message", {"mcp_servers": []}, "mcp_servers"),
    ("message", {"speed": "fast"}, "speed"),
    ("message", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.type"),
    ("message", {"tools": [{"name": "a", "input_schema": {}, "type": "web_search_20250305"}]}, "tools[0].type"),
]


@pytest.mark.parametrize(("kind", "changed", "place"), NOT_MADE, ids=[f"{kind}-{at}" for kind, _, at in NOT_MADE])
def test_what_is_not_served_is_refused_by_name(kind: str, changed: dict[str, Any], place: str) -> None:
    refused = refuse(kind, changed)
    assert (refused.code, refused.param) == (NOT_SERVED, place), refused
    assert f"{place} is not supported: " in refused.message


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMS: list[tuple[str, dict[str, Any], Any]] = [  # of answers, and the setting of language models
    ("chat", {"response_format": {"type": "text"}}, None),
    ("chat", {"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"json": SCHEMA},
    ),
    ("chat", {"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ("completion", {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ("response", {"text": {"format": {"type": "text"}}}, None),
    ("response", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, {"json": SCHEMA}),
    ("message", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"json": SCHEMA}),
]


@pytest.mark.parametrize(("kind", "given", "guide"), FORMS)
def test_forms_of_answers_are_guides(kind: str, given: dict[str, Any], guide: Any) -> None:
    assert ask(kind, given).settings().get("guide") == guide


@pytest.mark.parametrize(
    ("given", "place", "message"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "Invalid value 'xml'. Valid: 'text', 'json_object', 'json_schema'.",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "has no"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}}, None, "schema"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark", "lark"),
    ],
)
def test_forms_that_cannot_be_read(given: dict[str, Any], place: str | None, message: str) -> None:
    refused = refuse("chat", given)
    assert message in refused.message
    assert place in (None, refused.param)


def test_two_forms_are_refused() -> None:
    asked = ask("chat", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}})
    with pytest.raises(ApiError, match="The request has response_format and structured_outputs"):
        asked.settings()


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_and_missing_parameters(kind: str) -> None:
    _, least = KINDS[kind]
    refused = refuse(kind, {"temprature": 1})
    assert (refused.code, refused.param) == (UNKNOWN, "temprature")
    if kind in ("chat", "completion", "response", "message"):
        assert "Did you mean temperature?" in refused.message
    assert len(refuse(kind, {"x" * 9999: 1}).message) < 2000
    for name in least.keys() - {"model"}:  # which the only model of a path needs not
        missing = {each: value for each, value in least.items() if each != name}
        with pytest.raises(ApiError) as found:
            schema.decode(KINDS[kind][0], json.dumps(missing).encode())
        assert (found.value.code, found.value.param) == ("missing_required_parameter", name)


def test_parameters_that_matter_to_openai_alone() -> None:
    given: dict[str, Any] = {"metadata": {"a": "b"}, "prompt_cache_options": {"ttl": "30m"}, "store": False}
    values = {name: given.get(name, "a") for name in schema.IDLE}
    for kind in ("chat", "completion", "embeddings", "response", "classify"):
        ask(kind, values)
        ask(kind, dict.fromkeys(schema.IDLE))
    assert ask("chat", values).settings() == {}


def test_a_stored_prompt_is_refused() -> None:
    refused = refuse("response", {"prompt": {"id": "a"}})
    assert (refused.code, refused.message) == (NOT_SERVED, "prompt is not supported. Leave it out.")


CLIENTS = {  # types of the requests of OpenAI's and Anthropic's Python clients
    "chat": ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
    "completion": ("openai.types.completion_create_params", "CompletionCreateParamsBase"),
    "embeddings": ("openai.types.embedding_create_params", "EmbeddingCreateParams"),
    "response": ("openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    "message": ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
    "count": ("anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
}
KNOWN = {"openai": (3, 57), "anthropic": (2, 14)}  # newest versions whose fields are sorted


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_field_of_the_clients_is_known(kind: str) -> None:
    """Each is obeyed, does nothing, or is refused by name."""
    module, name = CLIENTS[kind]
    package = module.partition(".")[0]
    pytest.importorskip(package)
    if tuple(map(int, version(package).split(".")[:2])) > KNOWN[package]:
        pytest.skip(f"{package} is newer than the fields that are sorted here")
    fields = [*getattr(import_module(module), name).__annotations__]
    assert "model" in fields
    if kind == "message":  # those of its beta
        fields += import_module("anthropic.types.beta.message_create_params").MessageCreateParamsBase.__annotations__
    known, _ = KINDS[kind]
    unknown = {*fields} - {field.name for field in msgspec.structs.fields(known)} - {"betas"}  # a header
    assert {refuse(kind, {field: []}).code for field in unknown} <= {NOT_SERVED}


def test_the_page_names_what_is_not_served_and_what_does_nothing() -> None:
    page = (ROOT / "docs" / "openai-reference.md").read_text(encoding="utf-8")
    nothing, refused = page.split("## What does nothing")[1].split("## Errors")[0].split("| refused |")
    assert [name for name in schema.IDLE if f"`{name}`" not in nothing] == []
    assert [name for name in schema._UNSUPPORTED if "." not in name and f"`{name}`" not in refused] == []


def test_places_of_a_models_refusals() -> None:
    """The route's own fields, whatever models call them."""
    spec = make_configs(a='backend: "python" max_batch_size: 4')["a"].spec
    nobody: Any = None

    def refuse_as(kind: str, changed: dict[str, Any], message: str) -> tuple[str | None, str]:
        model_request = ModelRequest(
            nobody, nobody, nobody, spec, nobody, getattr(ask(kind, changed), "field_names", schema.FieldNames(""))
        )
        refused = model_request._to_error(message)
        return refused.param, refused.message.partition(" ")[0]

    empty, long = "messages[1] has an empty content.", "The prompt has 9 tokens; the model's context is 5."
    assert refuse_as("chat", {}, empty) == ("messages[1].content", "messages[1]")
    assert refuse_as("chat", {}, long) == ("messages", "The")
    assert refuse_as("response", {"input": [USER]}, empty) == ("input[1].content", "input[1]")
    assert refuse_as("response", {"input": [USER], "instructions": "a"}, empty) == ("input[0].content", "input[0]")
    assert refuse_as("response", {"instructions": "a"}, empty) == ("input", "input")
    assert refuse_as("response", {"instructions": "a"}, empty.replace("1", "0")) == ("instructions", "instructions")
    assert refuse_as("response", {}, long) == ("input", "The")
    assert refuse_as("message", {"system": "a"}, empty) == ("messages[0].content", "messages[0]")
    assert refuse_as("completion", {}, long) == ("prompt", "The")
    assert refuse_as("completion", {}, "text_input is no text.") == ("prompt", "prompt")
    assert refuse_as("completion", {}, "in ensemble 'llm', top_logprobs is 21.")[0] == "logprobs"
    assert refuse_as("message", {}, "stop_words has 5000 bytes.")[0] == "stop_sequences"
    unread = "chat_template_kwargs has 'reasoning_effort', which the model's chat template does not read. Leave it out."
    for kind, changed, place in (
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("response", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ):
        assert refuse_as(kind, changed, unread) == (place, place)
    assert refuse_as("response", {"chat_template_kwargs": {"a": 1}}, unread) == ("chat_template_kwargs",) * 2
    beyond = "max_tokens is 10, and the context has 5."
    for kind, place in (("chat", "max_tokens"), ("response", "max_output_tokens"), ("message", "max_tokens")):
        assert refuse_as(kind, {place: 10}, beyond)[0] == place
    assert refuse_as("chat", {"max_completion_tokens": 10}, beyond)[0] == "max_completion_tokens"
    assert refuse_as("predict", {}, "prompt is no text.") == (None, "prompt")


BODIES = {  # bodies that no client sends
    "": "invalid_json", "{": "invalid_json", '{"model": NaN}': "invalid_json", '{"model": Infinity}': "invalid_json",
    "[]": WRONG, '"a"': WRONG, "null": WRONG, "5": WRONG,
    '{"model": "\\ud800", "messages": []}': "invalid_json",
    '{"model": "m", "messages": [{"role": "user", "content": "\\udfff\\ud800"}]}': "invalid_json",
    '{"model": "m", "temperature": 1e999, "messages": []}': WRONG,
    '{"messages":' + "[" * 32 + "]" * 32 + "}": "invalid_json", '{"messages":' + "[" * 31 + "]" * 31 + "}": WRONG,
    '{"messages":' + "[" * 10**6: "invalid_json",
    '{"messages":' * 33 + "1" + "}" * 33: "invalid_json",
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies(body: str) -> None:
    with pytest.raises(ApiError) as refused:
        schema.decode(schema.ChatRequest, body.encode())
    assert refused.value.code == BODIES[body], refused.value
    with pytest.raises(ApiError, match="not JSON"):
        schema.decode(schema.ChatRequest, b'{"model": "\xff"}')


def test_settings() -> None:
    assert ask("chat", {"max_completion_tokens": 5, "stop": "a"}).settings() == {"max_tokens": 5, "stop_words": ["a"]}
    assert ask("chat", {"max_completion_tokens": 5, "max_tokens": 5}).settings() == {"max_tokens": 5}
    assert ask("chat", {"max_completion_tokens": 5, "ignore_eos": True}).settings() == {
        "max_tokens": 5, "min_tokens": 5,
    }  # fmt: skip
    assert ask("completion", {"max_tokens": 5, "ignore_eos": False, "min_tokens": 2}).settings()["min_tokens"] == 2
    for odd in ({"ignore_eos": True}, {"ignore_eos": True, "max_tokens": 5, "stop": "a"}):
        with pytest.raises(ApiError, match=r"ignore_eos needs max_tokens, and no stop\."):
            ask("completion", odd).settings()
    assert ask("chat", {"logprobs": True}).settings() == {"return_logprobs": True, "top_logprobs": 0}
    assert ask("completion", {"logprobs": 2, "echo": False}).settings() == {
        "return_logprobs": True, "top_logprobs": 2, "echo": None,
    }  # fmt: skip
    assert ask("response", {"max_output_tokens": 3, "top_p": 0.5}).settings() == {"max_tokens": 3, "top_p": 0.5}
    assert ask("message", {"stop_sequences": ["a"]}).settings() == {"max_tokens": 5, "stop_words": ["a"]}
    for changed, place in (({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"), (
        {"top_logprobs": 2}, "top_logprobs",
    ), ({"stream_options": {"include_usage": True}}, "stream_options")):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            ask("chat", changed).settings()
        assert refused.value.param == place
    for first, second in ((["a", "b"], ["c"] * 3), (["a"] * 3, "b")):
        with pytest.raises(ApiError, match="text_1 has"):
            ask("score", {"text_1": first, "text_2": second}).pairs  # noqa: B018
    for odd in ({}, {"prompt": "a", **CHAT}, {"prompt": "a", "add_special_tokens": False}, {
        **CHAT, "add_special_tokens": True,
    }):  # fmt: skip
        with pytest.raises(ApiError, match=r"either prompt or messages|Leave add_special_tokens out"):
            ask("tokenize", odd).inputs  # noqa: B018
    assert ask("tokenize", {"prompt": "a", "add_special_tokens": True}).inputs == {"text_input": ["a"]}
    assert ask("tokenize", CHAT).inputs == {"messages": [json.dumps([USER])]}
    assert ask("score", {"text_1": "a", "text_2": ["b", "c"]}).pairs == (["a", "a"], ["b", "c"])


@pytest.mark.parametrize("reason", RefusalReason)
def test_envelopes(reason: RefusalReason) -> None:
    """Each refusal has OpenAI's form and Anthropic's; a message says when to try again, and a server's fault is one."""
    refused = RefusedError(reason, "No.", 5.0)
    status = find_status(refused)
    error = to_envelope(refused, status)["error"]
    assert error["message"] == "No. Try again in 5 s."
    assert (error["type"] == "server_error") == (status >= 500)
    assert error["param"] is None
    assert error["code"]
    other = to_anthropic(refused, status)
    assert (other["type"], other["error"]["message"]) == ("error", "No. Try again in 5 s.")
    assert other["error"]["type"].endswith(("_error", "request_too_large"))
    named = to_envelope(ApiError("No.", "input[3]", "some_code", reason), status)["error"]
    assert (named["param"], named["code"]) == ("input[3]", "some_code")


def test_a_body_of_too_many_values_is_refused_before_it_is_decoded() -> None:
    """Commas in texts do not count; a body of the greatest number of tokens is read."""
    for values in ("[]", "1", '""', "{}"):
        body = f'{{"instances": [{{"X": [{",".join([values] * (schema.MOST_VALUES + 2))}]}}]}}'.encode()
        with pytest.raises(ApiError, match=f"The JSON has {schema.MOST_VALUES + 1} values; at most 263168") as refused:
            schema.decode(PredictRequest, body)
        assert (refused.value.reason, refused.value.code) == (RefusalReason.LARGE, "request_too_large")
    assert len(ask("detokenize", {"tokens": [1] * 2**18}).tokens) == 2**18
    assert ask("embeddings", {"input": "," * 10**6}).texts == ["," * 10**6]


def test_seeds_below_0_are_seeds_of_models() -> None:
    for given, sent in ((-1, 2**63 - 1), (-(2**63), 0), (5, 5), (0, 0)):
        assert ask("chat", {"seed": given}).settings()["seed"] == ask("completion", {"seed": given}).settings()["seed"]
        assert ask("chat", {"seed": given}).settings()["seed"] == sent


def test_the_last_message_of_the_assistant_is_continued() -> None:
    said = {"role": "assistant", "content": "the tide"}
    for kind in ("message", "count"):
        assert ask(kind, {"messages": [USER, said]}).variables == {"continue_final_message": True}
        assert ask(kind, {"messages": [USER, said, USER]}).variables == {}
    assert ask("message", {"messages": [USER, said]}).settings()["chat_template_kwargs"]
    assert "chat_template_kwargs" not in ask("message", {"messages": [USER]}).settings()


def test_log_probabilities_of_parts_of_characters() -> None:
    """As OpenAI's completions have them, so that none is lost; the offsets are those in the text."""
    spelled = [[0xF0, 0x9F], [0x92], [0xB0], None]
    texts = ["\ufffd", "\ufffd", "\ufffd", "!"]
    places = [
        {"5": {"logprob": -0.5, "rank": 1, "decoded_token": text, **({"bytes": part} if part else {})}}
        for text, part in zip(texts, spelled, strict=True)
    ]
    form = _Completion(ask("completion", {"logprobs": 1}))
    found = form.whole([Piece("💰!", "length", 1, 4, None, places)])["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x92", "bytes:\\xb0", "!"]
    assert found["text_offset"] == [0, 0, 0, 1]
    assert [*found["top_logprobs"][1]] == ["bytes:\\x92"]


def test_the_default_length_is_the_tokenizers() -> None:
    assert counts.MAX_LENGTH == tokens.MAX_LENGTH


@pytest.mark.parametrize(
    ("dimensions", "wanted"), [(None, [3, 4, 12]), (3, [3, 4, 12]), (2, [7.8, 10.4]), (1, None), (4, None)]
)
def test_embeddings_are_cut_to_their_models_sizes(dimensions: int | None, wanted: list[float] | None) -> None:
    """They keep their length, so that those of length 1 are cut to others of length 1."""

    async def infer(_: Any) -> Any:
        return {"Y": np.array([[3, 4, 12]], np.float32)}

    texts = Texts(Served(Api.EMBEDDINGS, "TEXT", "Y"), dimensions=frozenset({2, 4}))
    made = answer_embeddings(
        ask("embeddings", {"dimensions": dimensions}), cast("Any", SimpleNamespace(infer=infer)), texts
    )
    if wanted:
        (found,) = json.loads(cast("bytes", asyncio.run(made).body))["data"]
        assert found["embedding"] == pytest.approx(wanted)
    else:
        with pytest.raises(ApiError, match=f"dimensions is {dimensions}, and m gives embeddings of 2, 3") as refused:
            asyncio.run(made)
        assert (refused.value.param, refused.value.code) == ("dimensions", NOT_SERVED)


def test_bytes_of_tokens() -> None:
    """Without bytes, as of NVIDIA's vLLM backend, those of a part of a character are not known."""
    for place, wanted in (
        ({"decoded_token": "\ufffd", "bytes": [0xF0, 0x9F]}, [0xF0, 0x9F]),
        ({"decoded_token": "é"}, [0xC3, 0xA9]),
        ({"decoded_token": "a", "bytes": [32, 97]}, [32, 97]),
        ({"decoded_token": "\ufffd"}, None),
    ):
        piece = Piece("", "", 1, 1, logprobs=[{"5": {"logprob": -1.0, "rank": 1, **place}}])
        (found,) = describe_places(piece, 1)
        assert found["bytes"] == found["top_logprobs"][0]["bytes"] == wanted


def test_answers_that_are_kept_count_as_memory_of_the_request() -> None:
    spec = make_configs(
        a="""
        backend: "python" max_batch_size: 2
        input { name: "TEXT" data_type: TYPE_STRING dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }
    """
    )["a"].spec
    message = service_pb2.ModelInferResponse(model_name="a", raw_output_contents=[np.zeros((2, 1), "<f4").tobytes()])
    message.outputs.add(name="Y", datatype="FP32", shape=[2, 1])
    content: bytes = message.SerializeToString()

    async def answer(*_: Any, **__: Any) -> bytes:
        return content

    gate: Any = SimpleNamespace(ask=answer)
    request: Any = SimpleNamespace(transport=SimpleNamespace(is_closing=lambda: False))
    quota = Quota(2**20, 1.0)
    with Reservation(quota, ANYONE) as held:
        held.grow(100)
        model_request = ModelRequest(gate, request, ANYONE, spec, held, schema.FieldNames(""))
        assert asyncio.run(model_request.infer({"TEXT": ["a"] * 6}))["Y"].shape == (6, 1)
        assert held.num_bytes == quota.taken == 100 + 3 * len(content)
    assert quota.taken == 0


def test_a_text_beside_many_others_is_bounded() -> None:
    """Its copies are, which no limit of the body counts."""
    query, documents = "x" * 2**19, ["a"] * 16
    rerank = ask("rerank", {"query": query, "documents": documents})
    score = ask("score", {"text_1": query, "text_2": documents})
    texts = Texts(Served(Api.RERANK, "first", "SCORE", second="second"))
    nobody: Any = None
    for answering in (answer_rerank(rerank, nobody, texts), answer_score(score, nobody, texts)):
        with pytest.raises(ApiError, match="once for each second one, has more than 4194304 bytes") as refused:
            asyncio.run(answering)
        assert refused.value.reason is RefusalReason.LARGE


def test_rows_of_a_prediction() -> None:
    assert ask("predict", {}).rows == ["a"]
    columns = schema.decode(PredictRequest, b'{"inputs": {"X": [[1, 2], [3, 4]], "N": [5, 6.5]}}')
    assert columns.rows == [{"X": [1, 2], "N": 5}, {"X": [3, 4], "N": 6.5}]
    for body, message in (
        ({"instances": [1], "inputs": [1]}, "Leave one out"),
        ({"inputs": {"X": [1], "Y": [1, 2]}}, "different numbers of rows"),
        ({"inputs": {}}, "different numbers of rows, or none"),
    ):
        with pytest.raises(ApiError, match=message):
            schema.decode(PredictRequest, json.dumps(body).encode())
