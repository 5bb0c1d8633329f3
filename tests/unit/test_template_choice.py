"""Chat templates of a model: their variables, and the choice of one of several."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from shoal.errors import ArtifactError, InputError
from shoal.kit.generation.templates import ChatTemplate
from tests.support.pieces import start
from tests.support.prompts import CHAT, ask, make_tokenizer, texts

THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{% set x = 1 %}{{ x }}{{ bos_token }}"
    "{{ messages[0].content }}"
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}', encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("may_start_processes")
def test_variables_are_what_the_template_reads() -> None:
    with closing(ChatTemplate(THINKING, {"bos_token": "<s>"})) as template:
        assert template.variables == {"enable_thinking", "documents"}
        for variables in (
            {},
            {"enable_thinking": False},
            {"enable_thinking": True},
            {"documents": [{"title": "a", "text": "b"}]},
        ):
            rendered = render_jinja_template(
                [CHAT], chat_template=THINKING, add_generation_prompt=True, bos_token="<s>", tools=None, **variables
            )
            assert template.render(CHAT, variables=variables) == rendered[0][0]


@pytest.mark.usefixtures("may_start_processes")
def test_a_request_sets_variables(weights: Path) -> None:
    (weights / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
    chat, off = (texts(json.dumps(each)) for each in (CHAT, {"enable_thinking": False}))
    piece = start("prompt", model=str(weights))
    plain = ask(piece, messages=chat)["input_lengths"].item()
    assert ask(piece, messages=chat, chat_template_kwargs=off)["input_lengths"].item() > plain
    for given, reason in {
        '{"thinking": false}': r"has 'thinking', which the model's chat template does not read\. It reads documents, e",
        '{"tools": [{"function": {"name": "a"}}]}': r"tools are in the request, and the model's chat template does not",
        '{"tools": [{}]}': r"chat_template_kwargs\.tools\[0\]\.function has no name",
        '{"tool_choice": "required"}': r"chat_template_kwargs\.tool_choice is required, and there are no tools",
        '{"messages": []}': r"has 'messages', which the model's chat template does not read",
        '{"bos_token": "x"}': r"has 'bos_token'",
        "[]": r"chat_template_kwargs is \[\], expected an object",
        "{": r"chat_template_kwargs is not JSON",
    }.items():
        with pytest.raises(InputError, match=reason):
            ask(piece, messages=chat, chat_template_kwargs=texts(given))
    with pytest.raises(InputError, match=r"The request has chat_template_kwargs, and text_input"):
        ask(piece, text_input=texts("The cat"), chat_template_kwargs=off)
    piece.close()


@pytest.mark.usefixtures("may_start_processes")
def test_the_form_of_calls(weights: Path) -> None:
    """Found in the template, or named by the parameter; without either, tools are refused."""
    unknown = (
        "{% if tools %}a b c{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
    )
    hermes = "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    chat, tools = (
        texts(json.dumps(CHAT)),
        texts('{"tools": [{"function": {"name": "now"}}], "tool_choice": "required"}'),
    )
    for calls, given, mark in (
        (hermes, "", "<tool_call>"),
        ("?", "mistral", "[TOOL_CALLS]"),
        (hermes, "llama3", '{"n'),
    ):
        (weights / "chat_template.jinja").write_text(unknown.replace("%s", calls), encoding="utf-8")
        piece = start("prompt", model=str(weights), tool_form=given)
        plain, found = ask(piece, messages=chat), ask(piece, messages=chat, chat_template_kwargs=tools)
        assert found["input_lengths"].item() > plain["input_lengths"].item()
        assert plain["guide"].item() == b""
        assert mark in json.loads(found["guide"].item())["grammar"].replace('\\"', '"')
        piece.close()
    (weights / "chat_template.jinja").write_text(unknown.replace("%s", "?"), encoding="utf-8")
    piece = start("prompt", model=str(weights))
    with pytest.raises(
        InputError, match=r"is not known\. Set the parameter tool_form of the prompt model to one of hermes"
    ):
        ask(piece, messages=chat, chat_template_kwargs=tools)
    piece.close()
    with pytest.raises(ArtifactError, match="tool_form"):
        start("prompt", model=str(weights), tool_form="other")


@pytest.mark.usefixtures("may_start_processes")
def test_a_model_has_its_own(weights: Path) -> None:
    (weights / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
    chat, on = texts(json.dumps(CHAT)), texts('{"enable_thinking": true}')
    piece = start("prompt", model=str(weights))
    plain = ask(piece, messages=chat)["input_lengths"].item()
    piece.close()
    piece = start("prompt", model=str(weights), chat_template_kwargs='{"enable_thinking": false}')
    assert ask(piece, messages=chat)["input_lengths"].item() > plain
    assert ask(piece, messages=chat, chat_template_kwargs=on)["input_lengths"].item() == plain
    piece.close()
    for value, reason in (('{"thinking": 1}', "has 'thinking', which"), ("[1]", "is '.1.'; expected a JSON object")):
        with pytest.raises(ArtifactError, match=reason):
            start("prompt", model=str(weights), chat_template_kwargs=value)
    with pytest.raises(ArtifactError, match=r"which the model's chat template does not read\. It reads none"):
        start("prompt", model=str(weights), template="llama2", chat_template_kwargs='{"enable_thinking": false}')


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize("is_in_files", [True, False])
def test_a_template_is_chosen_by_its_name(weights: Path, is_in_files: bool) -> None:
    named = {"default": "The cat sat", "rag": "The mat", "tool_use": "{{ tools[0] }}"}
    if is_in_files:
        (weights / "chat_template.jinja").write_text(named["default"], encoding="utf-8")
        (weights / "additional_chat_templates").mkdir()
        for name in ("rag", "tool_use"):
            (weights / "additional_chat_templates" / f"{name}.jinja").write_text(named[name], encoding="utf-8")
    else:
        entries = [{"name": name, "template": template} for name, template in named.items()]
        (weights / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(weights)
    for name in ("", "default", "rag"):
        piece = start("prompt", model=str(weights), template=name)
        found = ask(piece, messages=texts(json.dumps(CHAT)))["input_ids"][0].tolist()
        assert found == tokenizer.apply_chat_template(CHAT, chat_template=name or None, return_dict=False)
        piece.close()
    with pytest.raises(ArtifactError, match="expected one of llama2, default, rag, tool_use, or nothing"):
        start("prompt", model=str(weights), template="other")


def test_without_a_default_template_one_must_be_named(weights: Path) -> None:
    entries = [{"name": "rag", "template": "The mat"}]
    (weights / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}), encoding="utf-8")
    with pytest.raises(ArtifactError, match="there is no default one, expected one of rag"):
        start("prompt", model=str(weights))
