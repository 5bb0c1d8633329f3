"""Bodies of OpenAI's API that would take long, or much memory, and keys that are there twice: refused before."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shoal.serving.gateway.fronts import make_app
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.refusals import RefusalReason
from shoal.serving.gateway.v1 import schema
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.front import ApiFront
from shoal.serving.gateway.v2.http_front import HttpFront
from tests.support.gates import make_gate
from tests.support.openai_requests import CHAT, KINDS, ask, refuse

KEYS = '"chat_template_kwargs": {%s}'
BOUNDED: list[tuple[str, str]] = [  # fields of a chat, and the words of the refusal
    (KEYS % ", ".join(f'"k{n}": 1' for n in range(2**16)), "has 65541 keys; at most 65536"),
    (KEYS % f'"a": [{",".join(["[[[[]]]]"] * 2**14)}]', "lists and objects; at most 65536"),
    (KEYS % f'"a": [{"9" * 4300}]', "has 4300 digits in a number; at most 512"),
    (f'"seed": {"9" * 513}', "has 513 digits in a number; at most 512"),
    (f'"metadata": {{{", ".join([f"{chr(34)}k{chr(34)}: {chr(34)}{chr(34)}"] * 2**17)}}}', "keys; at most 65536"),
]


@pytest.mark.parametrize(("field", "words"), BOUNDED, ids=[words for _, words in BOUNDED])
def test_what_takes_long_to_decode_is_refused_before(field: str, words: str) -> None:
    body = f"{json.dumps(CHAT)[:-1]}, {field}}}".encode()
    with pytest.raises(ApiError, match=words) as refused:
        schema.decode(schema.ChatRequest, body)
    assert refused.value.reason is RefusalReason.LARGE


@pytest.mark.parametrize("kind", ["chat", "tokenize"])
@pytest.mark.parametrize("value", ["a" * 2**14, [0] * 2**13, {"b": ["é"] * 4096}])
def test_variables_of_a_chat_template_are_few(kind: str, value: Any) -> None:
    assert refuse(kind, {"chat_template_kwargs": {"a": value}}).param == "chat_template_kwargs"
    ask(kind, {"chat_template_kwargs": {"a": "b" * 2**13}})


@pytest.mark.parametrize("name", ["x" * 2**22, "x - at `$.messages`", "`", ""])
def test_a_long_or_odd_name_is_refused_quickly(name: str) -> None:
    start = time.thread_time()
    refused = refuse("chat", {name: 1})
    assert refused.code == "unknown_parameter"
    assert len(str(refused)) < 1000
    assert time.thread_time() - start < 0.5  # 0.02 s; with a lazy expression, it was 0.4 s for the message alone


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        ("embeddings", '{"model": "m", "input": "a", "input": "b"}', "input"),
        ("chat", '{"model": "m", "messages": [{"role": "user", "content": "a", "role": "user"}]}', "role"),
        ("chat", '{"model": "m", "messages": [], "mod\\u0065l": "n", "metadata": {"a": "b"}}', "model"),
        ("predict", '{"instances": [{"X": 1}, {"X": 1, "X": 2}]}', "X"),
        ("response", '{"model": "m", "input": "a", "metadata": {"a": "b", "a": "b"}}', "a"),
        (
            "message",
            '{"model": "m", "model": "n", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]}',
            "model",
        ),
    ],
)
def test_a_key_twice_is_refused(kind: str, body: str, name: str) -> None:
    """In whatever object; Triton would take the first, and most parsers the last one."""
    if "[]" in body:
        body = body.replace("[]", json.dumps(CHAT["messages"]))
    with pytest.raises(ApiError, match=f"^'{name}' is given twice. Give it once.$") as refused:
        schema.decode(KINDS[kind][0], body.encode())
    assert refused.value.reason is RefusalReason.WRONG


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/clasify", "There is no path '/v1/clasify' here. Did you mean /v1/classify?"),
        ("/v1/chat/completion/", "There is no path '/v1/chat/completion/' here. Did you mean /v1/chat/completions?"),
        ("/v1/moderations", "There is no path '/v1/moderations' here: audio, "),
        ("/v1/v1/messages", "There is no path '/v1/v1/messages' here: leave /v1 out of the client's base URL."),
        ("/v1/responses/abc", "There is no path '/v1/responses/abc' here: audio, "),
        ("/v1/embeddings", "The request has no model. Models: none."),
    ],
)
def test_paths_and_models_that_may_be_meant(path: str, message: str) -> None:
    gate = make_gate(Limits())

    async def post() -> str:
        app = make_app(gate, [*HttpFront(gate, {}).routes, *ApiFront(gate, {}, {}).routes])
        async with TestClient(TestServer(app)) as client:
            reply = await client.post(path, json={"input": "a"})
            return str((await reply.json())["error"]["message"])

    assert asyncio.run(post()).startswith(message)


@pytest.mark.parametrize("size", [2**10, 2**15, 2**17])
def test_copies_of_a_body_are_reserved_before_it_is_decoded(size: int) -> None:
    """And nothing of it stays: it is refused in the end, because there is no such model."""
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "a" * size}]})
    gate = make_gate(Limits(memory_mib=1, client_share=1.0))

    async def post() -> int:
        app = make_app(gate, [*HttpFront(gate, {}).routes, *ApiFront(gate, {}, {}).routes])
        async with TestClient(TestServer(app)) as client:
            reply = await client.post("/v1/chat/completions", data=body, headers={"Content-Type": "application/json"})
            return reply.status

    assert asyncio.run(post()) == (404 if len(body) * 9 <= 2**20 else 413)
    assert gate.traffic.memory.taken == 0
