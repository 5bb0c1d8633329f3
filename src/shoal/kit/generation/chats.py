"""Chats as requests have them: JSON lists of messages with roles, and the text that Llama 2 was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from reprlib import repr as shorten
from typing import Any

from shoal.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
_EXAMPLE = '[{"role": "user", "content": "Hello"}]'

Message = dict[str, str]


def read_messages(text: str, name: str = "messages") -> list[Message]:
    """Read a chat: a JSON list of objects with ``role`` (system, user, assistant or tool) and ``content``, a text.

    A message may have the ``name`` of its participant, which some templates read.

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
    for index, message in enumerate(messages):
        fault = _find_fault(message)
        if fault:
            raise InputError(f"{name}[{index}] {fault}.", f"Send it in the form of {_EXAMPLE}")
    return messages


def _find_fault(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {shorten(message)}, expected an object"
    missing = [name for name in ("role", "content") if name not in message]
    if missing:
        return f"has no {missing[0]}"
    other = [name for name in message if name not in ("role", "content", "name")]
    if other:
        return f"has {shorten(other[0])}, expected role and content, and at most a name beside them"
    role, content, own = message["role"], message["content"], message.get("name", "")
    if role not in ROLES:
        return f"has the role {shorten(role)}, expected one of {', '.join(ROLES)}"
    if not isinstance(content, str):
        return f"has the content {shorten(content)}, expected a text"
    if not isinstance(own, str):
        return f"has the name {shorten(own)}, expected a text"
    if not content and role != "assistant":  # models give empty answers, and clients send them back
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
    if roles != expected or len(turns) % 2 == 0:
        raise InputError(
            f"The chat has the roles {shorten([message['role'] for message in messages])}, which Llama 2 cannot take.",
            "Send a system message or none, then user and assistant in turn, with a user's message at the end.",
        )
    texts = [f"<s>[INST] {system}{turns[0]['content']} [/INST]"]
    for answer, question in zip(turns[1::2], turns[2::2], strict=True):
        texts.append(f" {answer['content'].strip()} </s><s>[INST] {question['content'].strip()} [/INST]")
    return "".join(texts)
