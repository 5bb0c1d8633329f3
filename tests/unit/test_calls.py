"""Calls of tools in texts: each form, cut anywhere; texts that are none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence

import pytest

from shoal.kit.generation.calls import CallPiece, CallReader

NAMES = ("get_weather", "add")
# Arguments with whatever ends a call in one of the forms.
HARD: dict[str, object] = {
    "city": 'Paris "x" \\ </tool_call> ]; }) [TOOL_CALLS] ü\n',
    "n": [1, {"a": None, "b": [True, -1.5]}],
    "s": "'",
}
EASY: dict[str, object] = {}


def write(form: str, calls: Sequence[tuple[str, dict[str, object]]]) -> str:
    """Return calls as a model writes them."""
    texts = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    named = [(name, text) for (name, _), text in zip(calls, texts, strict=True)]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in named]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form == "reversed":  # the name at the end
        return "".join(f'<tool_call>{{"arguments":{text},"name":"{name}"}}</tool_call>' for name, text in named)
    if form == "llama3":
        return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in named)
    if form == "tagged":
        return "<|python_tag|>" + "; ".join(
            f'{{"type": "function", "name": "{name}", "parameters": {text}}}' for name, text in named
        )
    if form == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if form == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in named)
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


FORMS = ("hermes", "reversed", "llama3", "tagged", "mistral", "mistral_args", "pythonic")
WITH_TEXT = ("hermes", "reversed", "mistral", "mistral_args")


def read(pieces: Iterable[str], most: int | None = None) -> tuple[str, list[tuple[str, str]], bool]:
    """Return the text and the calls of an answer in pieces; each call is named once, and first."""
    reader = CallReader(NAMES, most)
    found = [part for piece in pieces for part in reader.step(piece)] + reader.step("", last=True)
    calls: list[list[str]] = []
    for part in found:
        if isinstance(part, CallPiece):
            if part.name:
                calls.append([part.name, ""])
            assert part.number == len(calls) - 1
            calls[-1][1] += part.arguments
    text = "".join(part for part in found if isinstance(part, str))
    return text, [(name, arguments) for name, arguments in calls], reader.has_calls


def cut(text: str, seed: int) -> Iterator[str]:
    """Divide a text: at every character with the seed 0, else at random."""
    numbers, at = random.Random(seed), 0
    while at < len(text):
        size = numbers.randint(1, 9) if seed else 1
        yield text[at : at + size]
        at += size


@pytest.mark.parametrize("form", FORMS)
def test_pieces_joined_are_the_call(form: str) -> None:
    """However the answer is divided: text before, one call or three, hard and easy arguments."""
    for before in ("", "I look.\n\n") if form in WITH_TEXT else ("",):
        several: list[tuple[str, dict[str, object]]] = [("add", EASY), ("get_weather", HARD), ("add", {"a": 1})]
        for given in (several, [("get_weather", HARD)]):
            text = before + write(form, given)
            reader = CallReader(NAMES)
            whole = reader.step(text, last=True)
            calls = [part for part in whole if isinstance(part, CallPiece)]
            assert [(part.name, json.loads(part.arguments)) for part in calls] == given
            assert "".join(part for part in whole if isinstance(part, str)) == before.rstrip()
            expected = before.rstrip(), [(part.name, part.arguments) for part in calls], True
            for seed in range(40):
                assert read(cut(text, seed)) == expected
            assert read([text], most=1)[1] == expected[1][:1]


TEXTS = (
    'Hello {"name": "x"} [1] and <tool is it?> \n\n',
    '{"name": "get_we", "parameters": {"a": 1}}',
    '{"answer": 4}',
    '{"name": "other", "parameters": {}}',
    "[1, 2]",
    "[get_weathe(1)]",
    "[other(a=1)]",
    "<tool_call>what</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    "<|python_tag|>print(1)",
    "[TOOL_CALLS] none",
    "[get_weather(1)]",
    "[get_weather(**{})]",
    "[get_weather(a=b)]",
    "[get_weather(a=1",
    " \n ",
    "<tool_call>",
    "<tool_call",
)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_no_calls(text: str) -> None:
    """They are the answer, to the last character; what follows them may still be a call."""
    for seed in range(10):
        assert read(cut(text, seed))[0] == text
    if "call" in text or text[0].isalpha():
        again = f"{text} {write('hermes', [('add', EASY)])}"
        assert [read(cut(again, seed))[1] for seed in range(5)] == [[("add", "{}")]] * 5


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_are_cut(form: str) -> None:
    """At the end of the tokens a whole answer has them as text; a stream may have begun them."""
    text = write(form, [("get_weather", HARD)])
    for end in range(1, len(text)):
        reader = CallReader(NAMES)
        whole = reader.step(text[:end], last=True)
        if reader.has_calls:  # the mark at its end is missing alone
            assert json.loads("".join(part.arguments for part in whole if isinstance(part, CallPiece))) == HARD
            continue
        assert "".join(part for part in whole if isinstance(part, str)) == text[:end]
        found, calls, has_calls = read(cut(text[:end], 0))
        assert not has_calls
        assert (found == text[:end]) is not bool(calls)


def test_rests_of_calls_behind_a_call_are_left_out() -> None:
    """The answer is cut within its second call, or within the mark at the end of the first."""
    for form in ("hermes", "llama3", "mistral", "mistral_args"):
        first, both = (write(form, calls) for calls in ([("add", EASY)], [("add", EASY), ("get_weather", HARD)]))
        for end in range(len(first), len(both) - 2):
            found = CallReader(NAMES).step(both[:end], last=True)
            assert [part if isinstance(part, str) else part.name for part in found][:1] == ["add"]
            assert not [part for part in found if isinstance(part, str) and part.strip()], both[:end]


def test_arguments_that_are_no_object() -> None:
    """Some models write them as text, or leave them out."""
    for written, arguments in (('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), ("[]", "{}"), ("[1]", "[1]")):
        text = f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
        assert read(cut(text, 0)) == ("", [("add", arguments)], True)
    assert read(['<tool_call>{"name": "add"}</tool_call> Done.']) == ("Done.", [("add", "{}")], True)


def test_hostile_texts_are_read_in_time() -> None:
    """Depths and lengths beyond any call."""
    for text in ("<tool_call>" * 3000, "[add(" + "(" * 5000, '<tool_call>{"name":' + "[" * 100_000, "{" * 5000):
        assert read([text])[0] == text
