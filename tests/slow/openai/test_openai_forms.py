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


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_several_answers(model: str, client: openai.OpenAI) -> None:
    """With `n`, those of requests with the following seeds, whole and streamed; the prompt counts once."""
    asked: dict[str, Any] = {"model": model, **chat("An animal?"), "max_tokens": 8, "temperature": 1.0}
    alone = [client.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in (5, 6, 7)]
    found = client.chat.completions.create(**asked, seed=5, n=3)
    assert [(each.index, each.message.content) for each in found.choices] == [*enumerate(alone)]
    assert found.usage is not None
    one = client.chat.completions.create(**asked, seed=5).usage
    assert one is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens <= 24) == (one.prompt_tokens, True)
    texts = ["", "", ""]
    roles = []
    for piece in client.chat.completions.create(**asked, seed=5, n=3, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
    assert (texts, sorted(roles)) == (alone, [0, 1, 2])
    completions = client.completions.create(model=model, prompt=["A", "B"], n=2, max_tokens=4, temperature=1, seed=1)
    assert [choice.index for choice in completions.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_biased_tokens(model: str, client: openai.OpenAI) -> None:
    """OpenAI's bias by token id: 100 makes a token certain, -100 excludes it."""
    asked: dict[str, Any] = {"model": model, **chat("An animal?"), "max_tokens": 4}
    text = client.chat.completions.create(**asked, logit_bias={"70": 100}).choices[0].message.content
    assert len({*(text or "")}) == 1
    plain = client.chat.completions.create(**asked, logprobs=True, top_logprobs=0).choices[0]
    assert plain.message.content != text
    with pytest.raises(openai.BadRequestError, match="logit_bias has the token 9999999") as refused:
        client.chat.completions.create(**asked, logit_bias={"9999999": 1})
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_an_answer_with_its_prompt(model: str, service: Service) -> None:
    """As lm-evaluation-harness asks: token ids, echo, log probabilities, one new token or none."""
    client = openai.OpenAI(base_url=f"http://{service.http}/v1", api_key="none", max_retries=0)  # its types lack null
    asked: dict[str, Any] = {"model": model, "logprobs": 1, "echo": True}
    whole = client.completions.create(**asked, prompt="An animal?", max_tokens=2).choices[0]
    alone = client.completions.create(**asked, prompt="An animal?", max_tokens=0)
    assert alone.choices[0].text == "An animal?"
    assert whole.text.startswith("An animal?")
    assert (alone.choices[0].finish_reason, alone.usage and alone.usage.completion_tokens) == ("length", 0)
    given, found = alone.choices[0].logprobs, whole.logprobs
    assert given
    assert found
    assert given.token_logprobs
    assert found.token_logprobs
    assert given.token_logprobs[0] is given.top_logprobs[0] is None
    assert found.token_logprobs[:-2] == given.token_logprobs
    assert None not in found.token_logprobs[1:]
    several = client.completions.create(**asked, prompt=[[70, 71, 72], [73]], max_tokens=1).choices
    assert [len(each.logprobs.tokens or ()) for each in several if each.logprobs] == [4, 2]
    parts = client.completions.create(**asked, prompt=[70, 71, 72], max_tokens=2, stream=True)
    assert sum(len(part.choices[0].logprobs.tokens or ()) for part in parts if part.choices[0].logprobs) == 5
    for wrong, message, place in (
        ({"prompt": ["a", [5]]}, "prompt has texts and token ids", "prompt"),
        ({"prompt": [[5]] * 129}, "The request has 129 answers", "prompt"),
        ({"prompt": "a", "max_tokens": 0, "echo": False}, "max_tokens is 0", "max_tokens"),
        ({"prompt": [9999999]}, "prompt has the token 9999999", "prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.completions.create(**{**asked, **wrong})
        assert refused.value.param == place


def test_a_message_that_goes_on(client: openai.OpenAI) -> None:
    """The answer of a request that was cut, and the rest of it, are the whole answer."""
    asked: dict[str, Any] = {"model": "llm", **chat("An animal?"), "max_tokens": 12}
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    messages = [*asked["messages"], {"role": "assistant", "content": whole[:3]}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    rest = client.chat.completions.create(model="llm", messages=messages, max_tokens=12, extra_body=goes_on)
    assert rest.choices[0].message.content is not None
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        client.chat.completions.create(**asked, extra_body=goes_on)


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_reasoning(model: str, client: openai.OpenAI) -> None:
    """The prompt ends with the mark of reasoning; whole and streamed, and back in the history."""
    more = {
        "structured_outputs": {"regex": "[a-z]{5}</think>\n[a-z]{5}"},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    asked: dict[str, Any] = {"model": model, **chat("An animal?"), "max_tokens": 40, "extra_body": more}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content is not None
    assert message.model_extra is not None
    assert [len(message.content), len(message.model_extra["reasoning_content"])] == [5, 5]
    deltas = [piece.choices[0].delta for piece in client.chat.completions.create(**asked, stream=True)]
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert reasoning == message.model_extra["reasoning_content"]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    asked["messages"] = [*asked["messages"], message.model_dump(exclude_none=True), *asked["messages"]]
    assert client.chat.completions.create(**asked).choices[0].message.content
