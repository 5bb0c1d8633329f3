"""Calls of tools by OpenAI's and Anthropic's own clients, whole and streamed, in conversations of several turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from tests.support.apis import chat, connect
from tests.support.service import Service

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with connect(service) as connected:
        yield connected


@pytest.fixture(scope="module")
def other(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{service.http}", api_key="none", max_retries=0) as connected:
        yield connected


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {"maxProperties": 0})


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_chats(model: str, client: Any) -> None:
    """Whole and streamed; the call and its result go back; the tiny model knows nothing about weather."""
    asked: dict[str, Any] = {"model": model, **chat("Weather?"), "max_tokens": 200, "tools": TOOLS, "temperature": 1}
    for choice in ("required", NAMED):
        for seed in range(9):  # some answers have more calls than fit
            found = client.chat.completions.create(**asked, tool_choice=choice, seed=seed).choices[0]
            if found.finish_reason == "tool_calls":
                break
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        assert found.message.tool_calls
        for call in found.message.tool_calls:
            assert choice == "required" or call.function.name == "get_weather"
            check(call.function.name, call.function.arguments)
        with client.chat.completions.stream(**asked, tool_choice=choice, seed=seed) as stream:
            whole = stream.get_final_completion().choices[0]
        assert whole.finish_reason == "tool_calls"
        given = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
        assert given == [(call.function.name, call.function.arguments) for call in found.message.tool_calls]
    single = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(single.message.tool_calls or ()) == 1
    messages = [
        *chat("Weather?")["messages"],
        found.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "Sun."} for call in found.message.tool_calls),
    ]
    for more in ({"tool_choice": "none"}, {"tool_choice": "auto"}, {}):
        said = client.chat.completions.create(**{**asked, "messages": messages, **more}).choices[0]
        assert said.message.content is not None or said.message.tool_calls
    first = next(iter(client.chat.completions.create(**asked, tool_choice=NAMED, stream=True))).choices[0].delta
    assert first.role == "assistant"


def test_pieces_have_the_name_first(client: Any) -> None:
    asked: dict[str, Any] = {"model": "llm", **chat("Weather?"), "max_tokens": 200, "tools": TOOLS}
    asked |= {"parallel_tool_calls": False, "stream": True}
    stream = client.chat.completions.create(**asked, tool_choice=NAMED)
    deltas = [piece.choices[0].delta.tool_calls for piece in stream if piece.choices[0].delta.tool_calls]
    (first,), *rest = deltas
    assert first.function is not None
    assert (first.index, first.function.name, first.function.arguments) == (0, "get_weather", "")
    assert first.id
    assert len(rest) > 3
    assert all(piece.id is None and piece.function and piece.function.name is None for (piece,) in rest)
    check("get_weather", "".join(piece.function.arguments for (piece,) in rest if piece.function))


def test_a_call_that_is_cut_is_text(client: Any) -> None:
    asked: dict[str, Any] = {"model": "llm", **chat("Weather?"), "max_tokens": 12, "tools": TOOLS}
    found = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0]
    assert (found.finish_reason, found.message.tool_calls) == ("length", None)
    assert found.message.content
    assert found.message.content.startswith("<tool_call>")


def test_responses(client: Any) -> None:
    """Items of calls, whole and streamed; the conversation goes on with what the tools returned."""
    tools: Any = [{"type": "function", **FUNCTION}, {"type": "function", "name": "now", "parameters": {}}]
    asked: dict[str, Any] = {"model": "llm", "max_output_tokens": 200, "tools": tools, "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        answer = client.responses.create(**asked, input="Weather?", tool_choice=choice)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert calls == answer.output
        for call in calls:
            check(call.name, call.arguments)
        with client.responses.stream(**asked, input="Weather?", tool_choice=choice) as stream:
            events = list(stream)
            last = stream.get_final_response()
        given = [(item.name, item.arguments) for item in last.output if item.type == "function_call"]
        assert given == [(call.name, call.arguments) for call in calls]
        kinds = [event.type for event in events]
        assert kinds.index("response.output_item.added") < kinds.index("response.function_call_arguments.delta")
        assert "response.output_text.delta" not in kinds
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."} for call in calls]
    turns: Any = [{"role": "user", "content": "Weather?"}, *calls, *results]
    assert client.responses.create(**{**asked, "tools": tools, "input": turns}).output
    with pytest.raises(openai.BadRequestError, match=r"input\[1\].*no message before it has this call") as refused:
        client.responses.create(**asked, input=[turns[0], {**results[0], "call_id": "none"}])
    assert refused.value.param == "input[1].content"


def test_messages(other: Any) -> None:
    """Anthropic's blocks, whole and streamed, and its counts of tokens."""
    tools: Any = [
        {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA},
        {"name": "now", "input_schema": {"type": "object"}},
    ]
    user: Any = {"role": "user", "content": "Weather?"}
    asked: dict[str, Any] = {"model": "llm", "max_tokens": 200, "tools": tools}
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    answer = other.messages.create(**asked, messages=[user], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    block = answer.content[0]
    assert block.type == "tool_use"
    check(block.name, json.dumps(block.input))
    with other.messages.stream(**asked, messages=[user], tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "tool_use"
    assert [each.input for each in streamed.content if each.type == "tool_use"] == [
        each.input for each in answer.content if each.type == "tool_use"
    ]
    one = other.messages.create(
        **asked, messages=[user], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert len(one.content) == 1
    results = [
        {"type": "tool_result", "tool_use_id": each.id, "content": "Sun.", "is_error": False}
        for each in answer.content
        if each.type == "tool_use"
    ]
    turns: Any = [user, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert other.messages.create(**asked, messages=turns).content
    counted = [
        other.messages.count_tokens(model="llm", messages=turns, **more).input_tokens for more in ({}, {"tools": tools})
    ]
    assert counted[0] + 40 < counted[1]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].*has no tool_use"):
        other.messages.create(**asked, messages=[{"role": "user", "content": [block]}])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "which another tool has"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}},
        "tool_choice",
        "expected one of",
    ),
    ({"tools": TOOLS * 65}, "tools", "<= 128"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs", "Send"),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True, "parameters": {"not": {}}}}]},
        "tools",
        "is refused",
    ),
]


@pytest.mark.parametrize(("given", "param", "message"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_tools_that_are_refused(given: dict[str, Any], param: str, message: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="llm", **chat("Weather?"), extra_body=given)
    assert refused.value.param == param, refused.value
    assert message in str(refused.value)
