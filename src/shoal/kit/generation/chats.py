"""Chats as requests have them: JSON lists of messages with roles, and the text that Llama 2 was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from reprlib import repr as shorten
from typing import Any

from shoal.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
_EXAMPLE = '[{"role": "user", "content": "Hello"}]'

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")

Message = dict[str, Any]


def read_messages(text: str, name: str = "messages") -> list[Message]:
    """Read a chat: a JSON list of objects with ``role`` (system, user, assistant or tool) and ``content``, a text.

    A message may have the ``name`` of its participant, which some templates read. The assistant's may have
    ``tool_calls`` as in OpenAI's API, with arguments as JSON, and then no content, and ``reasoning_content``; a tool's
    may have ``tool_call_id``.

    ``name`` is the input's, for error messages.

    Raises:
        InputError: ``text`` is not such a list, or the list or a content is empty; the error has the message's number.
    """
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON ({error}): {shorten(text)}.", f"Send a list: {_EXAMPLE}") from None
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{name} is {shorten(messages)}, expected a list of messages.", f"Send: {_EXAMPLE}")
    called: set[str] = set()  # ids
    for index, message in enumerate(messages):
        fault = _find_fault(message) or _find_fault_of_calls(message, called)
        if fault:
            raise InputError(f"{name}[{index}] {fault}.", f"Send it in the form of {_EXAMPLE}")
        message["content"] = message.get("content") or ""
    return messages


def _find_fault_of_calls(message: Message, called: set[str]) -> str:
    """Return what is wrong with a message's calls, or its answer to one; add the ids of its calls to ``called``."""
    if (answered := message.get("tool_call_id")) is not None and answered not in called:
        return f"has the tool_call_id {shorten(answered)}, and no message before it has this call"
    calls = message.get("tool_calls") or []
    if calls and message["role"] != "assistant":
        return f"has tool_calls, and the role {message['role']}"
    for at, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"has tool_calls[{at}] {shorten(call)}, expected an object with function.name"
        arguments, number = function.get("arguments") or "{}", call.get("id", "")
        try:
            is_object = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object or not isinstance(number, str):
            what = "function.arguments" if not is_object else "id"
            return f"has tool_calls[{at}].{what} {shorten(arguments if not is_object else number)}, expected " + (
                "an object as JSON" if not is_object else "a text"
            )
        called.add(number)
    return ""


def _find_fault(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {shorten(message)}, expected an object"
    calls = bool(message.get("tool_calls"))
    missing = [name for name in ("role", "content") if name not in message and (name == "role" or not calls)]
    if missing:
        return f"has no {missing[0]}"
    other = [name for name in message if name not in _KEYS]
    if other:
        return f"has {shorten(other[0])}, expected role and content, and at most {', '.join(_KEYS[2:])} beside them"
    role, content, own = message["role"], message.get("content"), message.get("name", "")
    content = "" if content is None and calls else content
    if role not in ROLES:
        return f"has the role {shorten(role)}, expected one of {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"has the content {shorten(content)}, expected a text"
    if not isinstance(message.get("reasoning_content", ""), str):
        return f"has the reasoning_content {shorten(message['reasoning_content'])}, expected a text"
    if not isinstance(own, str):
        return f"has the name {shorten(own)}, expected a text"
    if not content and role in ("system", "user"):  # models and tools give empty answers
        return "has an empty content"
    if (content + own).encode(errors="ignore").decode() != content + own:
        return "has a content that UTF-8 cannot hold: half of a surrogate pair"
    return ""


def llama2(messages: Sequence[Message]) -> str:
    """Return a chat as one text, in the form that Llama 2 was trained on.

    The roles are an optional system message, then user and assistant in turn. Spaces around messages are removed,
    except around the system message and the first user message.

    Raises:
        InputError: the roles are not in this order.
    """
    system = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n" if messages[0]["role"] == "system" else ""
    turns = messages[1:] if system else messages
    expected = ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    roles = [turn["role"] for turn in turns]
    if any(turn.get("tool_calls") for turn in turns):
        raise InputError("The chat has calls of tools, which Llama 2 cannot take.", "Leave them out.")
    if roles != expected or len(turns) % 2 == 0:
        raise InputError(
            f"The chat has the roles {shorten([message['role'] for message in messages])}, which Llama 2 cannot take.",
            "Send a system message or none, then user and assistant in turn, with a user's message at the end.",
        )
    texts = [f"<s>[INST] {system}{turns[0]['content']} [/INST]"]
    for answer, question in zip(turns[1::2], turns[2::2], strict=True):
        texts.append(f" {answer['content'].strip()} </s><s>[INST] {question['content'].strip()} [/INST]")
    return "".join(texts)
