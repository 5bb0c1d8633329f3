"""Answers in a form, by the clients' own ways: OpenAI's `parse`, Anthropic's `output_config`, vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.apis import chat, connect
from tests.support.service import Service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with connect(service) as connected:
        yield connected


class Animal(BaseModel):
    """Form of an answer."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=6)
    legs: int = Field(ge=0, le=8)
    kind: Literal["cat", "fish"]


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_answers_in_a_form(model: str, service: Service, client: openai.OpenAI) -> None:
    """OpenAI's and Anthropic's own ways to a form; the tiny model knows nothing about animals."""
    asked: dict[str, Any] = {"model": model, **chat("An animal, please."), "max_tokens": 99, "temperature": 1}
    found = client.chat.completions.parse(**asked, response_format=Animal).choices[0]
    assert found.finish_reason == "stop"
    assert isinstance(found.message.parsed, Animal)
    with client.chat.completions.stream(**asked, response_format=Animal) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)
    answer = client.responses.parse(model=model, input="An animal.", text_format=Animal)
    assert isinstance(answer.output_parsed, Animal)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    choices = {"structured_outputs": {"choice": ["a cat", "a fish"]}}
    text = client.completions.create(model=model, prompt="An animal:", extra_body=choices).choices[0].text
    assert text in ("a cat", "a fish")
    with anthropic.Anthropic(base_url=f"http://{service.http}", api_key="none", max_retries=0) as other:
        form = {"output_config": {"format": {"type": "json_schema", "schema": Animal.model_json_schema()}}}
        said = other.messages.create(
            model=model, messages=[{"role": "user", "content": "An animal."}], max_tokens=99, extra_body=form
        )
    assert said.content[0].type == "text"
    Animal.model_validate_json(said.content[0].text)
    with pytest.raises(openai.BadRequestError, match=r"guide\.regex is refused: .*unclosed group"):
        client.completions.create(model=model, prompt="a", extra_body={"structured_outputs": {"regex": "(a"}})
