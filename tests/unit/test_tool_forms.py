"""Forms of calls: found in templates, and grammars that hold random answers to the tools."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

from shoal.errors import InputError
from shoal.kit.generation.calls import CallPiece, CallReader
from shoal.kit.generation.chat_rendering import ChatRenderer
from shoal.kit.generation.guides import ENDED, GOES_ON, Guides, read_guide
from shoal.kit.generation.templates import ChatTemplate
from shoal.kit.generation.tool_forms import FORMS, HERMES, MISTRAL, Form, find_form, to_template, write_guide
from shoal.kit.generation.tools import MOST_BYTES, MOST_TOOLS, AskedTools, split_asked
from shoal.lab.tiny_llm import make_tokenizer

_NAME, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
CALLS = {  # how templates write calls
    "hermes": f'\n<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>',
    "llama3": f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "{_NAME}", "arguments": {_ARGUMENTS}, "id": "{{{{ call.id }}}}"}}]',
    "mistral_args": f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}",
    "pythonic": f"[{_NAME}({{% for k, v in call.function.arguments.items() %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}})]",
    "": f"<function={_NAME}>{_ARGUMENTS}</function>",
}
TEMPLATE = (
    "{%% if tools %%}{{ tools | tojson }}{%% endif %%}{%% for m in messages %%}{{ m.role }}: {{ m.content }}"
    "{%% for call in m.tool_calls or [] %%}%s{%% endfor %%}{%% endfor %%}"
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time-now"}},
]
TOKENIZER = make_tokenizer()
TOKENIZER.add_tokens(["<tool_call>", "</tool_call>"])
TOKENIZER.add_special_tokens(["[TOOL_CALLS]"])
VOCABULARY = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("</s>")
MARKS = [TOKENIZER.token_to_id(mark) for mark in ("<tool_call>", "[TOOL_CALLS]")]


@pytest.mark.usefixtures("may_start_processes")
def test_templates_get_tools_as_they_are_sent() -> None:
    """Their members in the same order, which models were trained with."""
    template = ChatTemplate("{% if messages[0].content %}{{ tools | tojson }}{% endif %}")
    try:
        text = ChatRenderer(template, None, HERMES).render([{"role": "user", "content": "x"}], {"tools": TOOLS})
    finally:
        template.close()
    complete = {"name": "time-now", "parameters": {"type": "object", "properties": {}}}
    assert text == json.dumps([TOOLS[0], {"type": "function", "function": complete}])


def answer(guides: Guides, guide: bytes, seed: int, most: int = 400) -> str:
    """Return a random answer that follows a guide; it prefers what ends texts."""
    found = read_guide(guide)
    assert found is not None
    follower, numbers = guides.follow(found), np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(most):
        scores = numbers.gumbel(size=VOCABULARY)
        scores[[END, TOKENIZER.token_to_id('"'), *MARKS]] += 4
        scores[follower.find_banned()] = -np.inf
        token = int(np.argmax(scores))
        assert scores[token] > -np.inf
        ends = follower.take(token)
        ids += [] if ends == ENDED else [token]
        if ends != GOES_ON:
            return str(TOKENIZER.decode(ids, skip_special_tokens=False))
    return ""


def read(text: str, tools: list[dict[str, Any]] = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of an answer."""
    found = CallReader([tool["function"]["name"] for tool in tools]).step(text, last=True)
    calls = [(part.name, json.loads(part.arguments)) for part in found if isinstance(part, CallPiece)]
    return "".join(part for part in found if isinstance(part, str)), calls


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(lambda: TOKENIZER, VOCABULARY, [END])


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.usefixtures("may_start_processes")
def test_forms_are_found_in_templates(form: str) -> None:
    template = ChatTemplate(TEMPLATE % CALLS[form])
    assert template.reads_tools
    found = find_form(lambda chat, variables: template.render(chat, variables=variables))
    template.close()
    assert (found.name if found else "") == form


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.usefixtures("may_start_processes")
def test_answers_that_have_to_call(form: Form, guides: Guides) -> None:
    """With random weights, every answer that ends has valid calls alone; a single one if they are not parallel."""
    counts = set()
    for choice, is_parallel in (("required", True), ("required", False), ("get_weather", True)):
        guide = write_guide(AskedTools(tuple(TOOLS), choice, is_parallel), form, TOKENIZER.token_to_id, None)
        assert not read_guide(guide).is_optional  # type: ignore[union-attr]
        texts = [text for seed in range(12) if (text := answer(guides, guide, seed))]
        assert len(texts) > 4
        for text in texts:
            said, calls = read(text)
            assert said == ""
            assert calls
            assert is_parallel or len(calls) == 1
            counts.add(len(calls))
            for name, arguments in calls:
                assert choice in ("required", name)
                jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"maxProperties": 0})
    assert len(counts) > 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.usefixtures("may_start_processes")
def test_answers_that_may_call(form: Form, guides: Guides) -> None:
    """Texts are free; what begins like a call is one; with a form of the answer, texts have it."""
    asked = AskedTools(tuple(TOOLS))
    guide = write_guide(asked, form, TOKENIZER.token_to_id, None)
    found = read_guide(guide)
    assert found is not None
    assert found.is_optional
    text = 'Hello <b> {"name": 1} [1]\n' if form.has_text else 'Hello <b> {"name": 1} [get_weather(1)]\n'
    follower = guides.follow(found)
    for token in TOKENIZER.encode(text).ids:
        assert not follower.find_banned()[token]
        follower.take(token)
    assert not follower.find_banned()[END]
    texts = [each for seed in range(12) if (each := answer(guides, guide, seed, 200))]
    for each in texts:
        for name, arguments in read(each)[1]:
            jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"maxProperties": 0})
    final = read_guide('{"json": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}}')
    guide = write_guide(asked, form, TOKENIZER.token_to_id, final)
    assert not read_guide(guide).is_optional  # type: ignore[union-attr]
    for seed in range(8):
        said, calls = read(answer(guides, guide, seed) or '{"sum": 1}')
        assert calls or "sum" in json.loads(said)
    with pytest.raises(InputError, match=r"guide\.regex and tools are in one request"):
        write_guide(asked, form, TOKENIZER.token_to_id, read_guide('{"regex": "a"}'))


@pytest.mark.usefixtures("may_start_processes")
def test_schemas_that_are_not_expressed(guides: Guides) -> None:
    """Refused if they are strict; otherwise calls follow what can be expressed of them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}
    for is_strict in (False, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": is_strict}}
        guide = write_guide(AskedTools((tool,), "required"), HERMES, TOKENIZER.token_to_id, None)
        if is_strict:
            with pytest.raises(InputError, match="not"):
                answer(guides, guide, 0)
        else:
            assert any(isinstance(call["a"], int) for _, call in read(answer(guides, guide, 1), [tool])[1])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, r"tools\[0\]\.function has no name"),
    ({"tools": 5}, "tools is 5, expected a list"),
    ({"tools": {"function": {"name": "a"}}}, "tools is .* expected a list"),
    ({"tools": [TOOLS[0], 3]}, r"tools\[1\] is 3, expected a function"),
    ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, r"tools\[0\] is .*expected a function"),
    ({"tools": [{"function": {"name": "a b"}}]}, r"tools\[0\]\.function\.name is 'a b'"),
    ({"tools": [{"function": {"name": "auto"}}]}, r"tools\[0\]\.function\.name is 'auto'"),
    ({"tools": [*TOOLS, TOOLS[0]]}, r"tools\[2\]\.function\.name is 'get_weather', which another tool has"),
    ({"tools": [{"function": {"name": "a", "parameters": []}}]}, r"tools\[0\]\.function\.parameters is \[\]"),
    ({"tools": TOOLS * (MOST_TOOLS // 2 + 1)}, f"tools has {MOST_TOOLS + 2} tools; at most {MOST_TOOLS}"),
    ({"tools": [{"function": {"name": "a", "description": "b" * MOST_BYTES}}]}, "tools has .* bytes as JSON"),
    ({"tools": TOOLS, "tool_choice": "other"}, "tool_choice is 'other', expected one of none, auto, required, get_w"),
    ({"tool_choice": "required"}, "tool_choice is required, and there are no tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_tools_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_asked(given)


def test_messages_as_templates_take_them() -> None:
    """Arguments are objects, and ids have the nine characters that Mistral's templates want; the caller's stay."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "call_1"},
    ]
    before = json.dumps(chat)
    for form in (HERMES, MISTRAL):
        called, result = to_template(chat, form)
        assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}
        assert called["tool_calls"][0]["id"] == result["tool_call_id"]
        assert len(result["tool_call_id"]) == (9 if form is MISTRAL else 6)
    assert json.dumps(chat) == before
