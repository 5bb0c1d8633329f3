"""Variables of a model's chat template, through a real service: shoal's client, OpenAI's, and the command line."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.errors import InputError
from tests.support.apis import connect, post
from tests.support.service import Service

QUESTION = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_shoals_client_and_openais(model: str, service: Service) -> None:
    with Client(service.grpc) as client, connect(service) as other:
        llm = Llm(client, model)
        plain = llm.generate(QUESTION, max_tokens=4)
        other_words = llm.generate(QUESTION, max_tokens=4, chat_template_kwargs={"enable_thinking": False})
        assert other_words.num_input_tokens > plain.num_input_tokens
        with pytest.raises(InputError, match=r"has 'thinking', which the model's chat template does not read"):
            llm.generate(QUESTION, max_tokens=4, chat_template_kwargs={"thinking": False})
        asked: Any = {"model": model, "messages": QUESTION, "max_tokens": 4, "temperature": 0}
        for variables, count in (({}, plain), ({"enable_thinking": False}, other_words)):
            answer = other.chat.completions.create(**asked, extra_body={"chat_template_kwargs": variables})
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == count.num_input_tokens
        with pytest.raises(openai.BadRequestError) as refused:
            other.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"thinking": False}})
        assert refused.value.param == "chat_template_kwargs"
        assert "It reads enable_thinking" in refused.value.message


def test_token_ids_of_a_chat(service: Service) -> None:
    asked: dict[str, Any] = {"model": "llm", "messages": QUESTION}
    counts = []
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        status, body = post(service, "/tokenize", json.dumps(asked | more).encode())
        assert status == 200
        counts.append(body["count"])
    assert counts[0] < counts[1]
    text = {"model": "llm", "prompt": "a", "chat_template_kwargs": {}}
    status, _ = post(service, "/tokenize", json.dumps(text).encode())
    assert status == 400


def test_the_command_line(service: Service) -> None:
    command = ["chat", service.grpc, "--json", "--max-tokens", "4", "--model", "llm"]
    counts = []
    for more in ([], ["--set", 'chat_template_kwargs={"enable_thinking": false}']):
        result = CliRunner().invoke(app, [*command, *more], input="Hello\n")
        assert result.exit_code == 0, result.output
        counts.append(json.loads(result.stdout)["num_input_tokens"])
    assert counts[0] < counts[1]
    for words, reason in ((["{}", "{}"], "is given twice"), (["[]"], "expected an object"), (["{"], "is not JSON")):
        more = [part for word in words for part in ("--set", f"chat_template_kwargs={word}")]
        assert reason in str(CliRunner().invoke(app, [*command, *more], input="Hello\n").exception)
