"""Requests of OpenAI's API and its neighbours whose parts become others: answers, documents, calls in histories."""

from __future__ import annotations

from typing import Any

from shoal.kit.generation.pieces import Piece
from shoal.serving.gateway.v1 import schema
from shoal.serving.gateway.v1.messages import to_anthropic
from shoal.serving.gateway.v1.responses import _Response
from tests.support.openai_requests import ask, refuse


def test_several_answers_and_messages_that_go_on() -> None:
    assert ask("chat", {"n": schema.MOST_ANSWERS}).n == schema.MOST_ANSWERS
    assert refuse("chat", {"n": schema.MOST_ANSWERS + 1}).param == "n"
    assert refuse("completion", {"n": 65, "prompt": ["a", "b"]}).message.startswith("The request has 130 answers")
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert ask("chat", goes_on).settings() == {"chat_template_kwargs": {"continue_final_message": True}}
    assert ask("chat", {"continue_final_message": False, "add_generation_prompt": True}).settings() == {}
    for name in goes_on:
        assert refuse("chat", {name: goes_on[name]}).param == "add_generation_prompt"


def test_the_effort_of_reasoning_is_the_templates() -> None:
    for effort, variables in (("none", {}), ("high", {"chat_template_kwargs": {"reasoning_effort": "high"}})):
        assert ask("chat", {"reasoning_effort": effort}).settings() == variables
        assert ask("response", {"reasoning": {"effort": effort}}).settings() == variables
    assert ask("chat", {"reasoning_effort": "high"}).field_names.settings["chat_template_kwargs"] == "reasoning_effort"


def test_documents_and_their_number() -> None:
    asked = ask("rerank", {"documents": ["a", {"text": "b"}], "top_k": 1})
    assert (asked.texts, asked.top_k) == (["a", "b"], 1)
    assert refuse("rerank", {"top_n": 1, "top_k": 1}).param == "top_k"


def test_messages_of_tools() -> None:
    """Anthropic's blocks and the items of Responses, as language models take them; the places of refusals."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "So", "tool_calls": [call]},
        {"role": "tool", "content": "Sun", "tool_call_id": "a"},
    ]
    use: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Sun"}]}
    turns = [
        chat[0],
        {"role": "assistant", "content": [{"type": "text", "text": "So"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    message = ask("message", {"messages": turns})
    assert message.conversation == [*chat, {"role": "user", "content": "And?"}]
    assert [message.field_names.find(at) for at in range(4)] == [f"messages[{at}].content" for at in (0, 1, 2, 2)]
    items: list[dict[str, Any]] = [
        chat[0],
        {"role": "assistant", "content": "So"},
        {
            "type": "function_call",
            "call_id": "a",
            "name": "f",
            "arguments": '{"x":1}',
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "a", "output": "Sun"},
    ]
    response = ask("response", {"input": items})
    assert response.messages == chat
    assert [response.field_names.find(at) for at in range(3)] == [f"input[{at}].content" for at in (0, 1, 3)]
    assert [each.to_plain() for each in ask("chat", {"messages": chat}).messages] == chat
    for kind, changed, param, message in (
        ("message", {"messages": [{"role": "user", "content": [use]}]}, "messages[0]", "has no tool_use"),
        (
            "message",
            {"messages": [{"role": "user", "content": [{**use, "text": "a"}]}]},
            "messages[0].content[0]",
            "has",
        ),
        ("response", {"input": [{**items[2], "output": "a"}]}, "input[0]", "has call_id and name and arguments"),
        ("chat", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "has no"),
        ("chat", {"messages": [{**chat[2], "role": "user"}]}, "messages[0].tool_call_id", "Unknown parameter"),
        ("chat", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "Send it beside"),
    ):
        refused = refuse(kind, changed)
        assert (refused.param, message in refused.message) == (param, True), refused.message


def test_anthropics_client_is_told_that_there_are_no_threads() -> None:
    """Its tool runner sends one, and asks without it after this refusal."""
    error = to_anthropic(refuse("message", {"thread": {"type": "create"}}), 400)["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in to_anthropic(refuse("message", {"speed": "fast"}), 400)["error"]


def test_log_probabilities_of_text_that_is_held_back() -> None:
    """Those of tokens that are a part of a character, or might begin a call, come with the text; none is lost."""
    place = {"70": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}
    tools = [{"type": "function", "name": "f"}]
    for given in ({}, {"tools": tools}):
        form = _Response(ask("response", {"top_logprobs": 1, **given}))
        texts = ["", '{"a', '": 1}', ""]
        pieces = [
            Piece(text, "stop" if text == texts[-1] and at else "", 3, at + 1, None, [place])
            for at, text in enumerate(texts)
        ]
        events = [event.document for piece in pieces for event in form.events(0, piece)] + [
            event.document for event in form.last_events()
        ]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in deltas) == '{"a": 1}'
        assert sum(len(event["logprobs"]) for event in deltas) == len(
            events[-1]["response"]["output"][0]["content"][0]["logprobs"]
        )
        assert sum(len(event["logprobs"]) for event in deltas) >= 3
