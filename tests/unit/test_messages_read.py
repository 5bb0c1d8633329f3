"""Chats as requests have them: what is refused of their messages."""

from __future__ import annotations

import pytest

from shoal.errors import InputError
from shoal.kit.generation.chats import read_messages

CALL = '{"function": {"name": "f", "arguments": "%s"}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"messages is not JSON \(Expecting value.*\): ''"),
        ("[" * 100_000, "messages is not JSON"),
        ("9" * 5000, "messages is not JSON"),
        ("[]", r"messages is \[\], expected a list of messages"),
        ('{"role": "user", "content": "x"}', "expected a list of messages"),
        ('["hello"]', r"messages\[0\] is 'hello', expected an object"),
        ('[{"content": "x"}]', r"messages\[0\] has no role"),
        ('[{"role": "user"}]', r"messages\[0\] has no content"),
        ('[{"role": "developer", "content": "x"}]', r"has the role 'developer', expected one of system, user"),
        ('[{"role": ["user"], "content": "x"}]', r"has the role \['user'\], expected one of"),
        ('[{"role": "user", "content": "x"}, {"role": "user", "content": ""}]', r"messages\[1\] has an empty content"),
        ('[{"role": "user", "content": null}]', "has the content None, expected a text"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', r"has the content \[\{'type': 'text'\}\], expected"),
        ('[{"role": "user", "content": "x", "calls": []}]', "has 'calls', expected role and content, and at most name"),
        ('[{"role": "user", "content": "x", "tool_calls": [1]}]', "has tool_calls, and the role user"),
        ('[{"role": "assistant", "tool_calls": [1]}]', r"has tool_calls\[0\] 1, expected an object with function.name"),
        (
            f'[{{"role": "assistant", "tool_calls": [{CALL % "[]"}]}}]',
            r"tool_calls\[0\]\.function\.arguments '\[\]', exp",
        ),
        (
            f'[{{"role": "assistant", "tool_calls": [{CALL % "{"}]}}]',
            r"tool_calls\[0\]\.function\.arguments '\{', expec",
        ),
        (
            '[{"role": "tool", "content": "x", "tool_call_id": "a"}]',
            "tool_call_id 'a', and no message before it has this",
        ),
        ('[{"role": "user", "content": "x", "name": 5}]', "has the name 5, expected a text"),
        (r'[{"role": "user", "content": "a\ud83d"}]', "half of a surrogate pair"),
    ],
)
def test_other_messages_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        read_messages(text)
    assert len(str(refused.value)) < 300
