"""Forms in which models write calls of tools, and the grammars that hold an answer to them.

Models write calls in the form that their chat templates have for the calls of earlier answers, so ``find_form`` finds
it in a rendered example.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import InputError
from shoal.kit.generation.guides import GUIDE, Guide
from shoal.kit.generation.tools import AUTO, TOOLS, AskedTools

_ID_LENGTH = 9  # of calls, in Mistral's templates
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models are trained


@dataclass(frozen=True)
class Form:
    """A form of calls: what ``begin`` precedes the first call, what is between two calls, and what ends the last one.

    A call is ``call`` with a function's name and, for ``%ARGUMENTS``, its arguments as JSON. ``marks`` are texts in
    them that a tokenizer may have as one token. With ``has_text`` a text may come before the calls.
    """

    name: str
    begin: str
    call: str
    between: str
    end: str
    marks: tuple[str, ...] = ()
    has_text: bool = True


_JSON_CALL = '{"name": "%s", "arguments": %ARGUMENTS}'
HERMES = Form(
    "hermes",
    "<tool_call>\n",
    _JSON_CALL,
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
    ("<tool_call>", "</tool_call>"),
)
LLAMA3 = Form("llama3", "", '{"name": "%s", "parameters": %ARGUMENTS}', "; ", "", has_text=False)
MISTRAL = Form("mistral", "[TOOL_CALLS] [", _JSON_CALL, ", ", "]", ("[TOOL_CALLS]",))
MISTRAL_ARGS = Form(
    "mistral_args", "[TOOL_CALLS]", "%s[ARGS]%ARGUMENTS", "[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[ARGS]")
)
PYTHONIC = Form("pythonic", "[", "%s(%ARGUMENTS)", ", ", "]", has_text=False)
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, PYTHONIC)}

_MARKED = "markedfunction", "markedkey", "markedvalue"
_EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "other",
        "description": "Other.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "Text."}}},
    },
}


def find_form(render: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]) -> Form | None:
    """Return the form in which a template writes calls; None if it is not known. ``render`` has messages, variables."""
    name, key, value = _MARKED
    call = {"id": "a" * _ID_LENGTH, "type": "function", "function": {"name": name, "arguments": {key: value}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": call["id"], "name": name},
    ]
    try:
        text = render(chat, {TOOLS: [_EXAMPLE_TOOL]})
    except InputError:
        return None
    before, _, after = text.partition(name)
    before, between = before[-48:].rstrip(), after.partition(key)[0]
    if between.startswith("[ARGS]"):
        return MISTRAL_ARGS
    if between.startswith("(") and before.endswith("["):
        return PYTHONIC
    if not re.search(r'\{\s*"name"\s*:\s*"$', before) or not between.startswith('"'):
        return None
    if "[TOOL_CALLS]" in before:
        return MISTRAL
    if "<tool_call>" in before:
        return HERMES
    return LLAMA3 if '"parameters"' in between else None


def to_template(messages: Sequence[Mapping[str, Any]], form: Form | None) -> list[dict[str, Any]]:
    """Return messages as templates take them: arguments as objects, and ids of calls as Mistral's want them."""
    is_short = form in (MISTRAL, MISTRAL_ARGS)

    def to_id(given: str) -> str:
        return hashlib.sha256(given.encode()).hexdigest()[:_ID_LENGTH] if is_short else given

    found = []
    for message in messages:
        own = dict(message)
        if "tool_call_id" in own:
            own["tool_call_id"] = to_id(own["tool_call_id"])
        if calls := own.get("tool_calls"):
            own["tool_calls"] = [
                {
                    "type": "function",
                    "id": to_id(call.get("id", "")),
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.loads(call["function"].get("arguments") or "{}"),
                    },
                }
                for call in calls
            ]
        found.append(own)
    return found


# --- grammars ----------------------------------------------------------------------------------------------------


def write_guide(asked: AskedTools, form: Form, find_id: Callable[[str], int | None], final: Guide | None) -> bytes:
    """Return the setting ``guide`` that holds an answer to the tools; empty if it may call none.

    ``find_id`` returns the id of a text that is one token, else None. ``final`` is what an answer follows that calls
    no tool. The guide is optional if neither the choice nor a strict function needs it.

    Raises:
        InputError: ``final`` is not JSON.
    """
    if not (functions := asked.callable):
        return b""
    if final is not None and not final.schema:
        raise InputError(f"{GUIDE}.{final.kind} and {TOOLS} are in one request.", "Send json, or no tools.")
    spell = _Speller(form, find_id)
    names = [f"call_{index}" for index in range(len(functions))]
    rules = [f"call: {' | '.join(names)}"]
    for name, function in zip(names, functions, strict=True):
        rules += _write_call(name, function, form, spell)
    more = f" ({spell(form.between)} call)*" if asked.is_parallel and form.between else ""
    rules.append(f"calls: {spell(form.begin)} call{more} {spell(form.end)}")
    if asked.choice != AUTO:
        start = "calls"
    elif final is not None:
        start = "calls | final"
        rules.append(f"final: %json {_add_options(json.loads(final.schema))}")
    else:
        start = "TEXT calls | TEXT | calls" if form.has_text else "TEXT | calls"
        begins = [form.begin.rstrip()] if form.has_text else [_begin(form, each["name"]) for each in functions]
        banned = "|".join(f"{re.escape(each)}" for each in begins).replace("/", r"\/")
        lead = "(?s:.)*" if form.has_text else r"\s*"
        rules.append(f"TEXT: /(?s:.)+/ & ~/{lead}({banned})(?s:.)*/")
    grammar = "\n".join([f"start: {start}", *rules])
    is_strict = any(function.get("strict") for function in functions)
    kept = {"optional": True} if asked.choice == AUTO and final is None and not is_strict else {}
    return json.dumps({"grammar": grammar, **kept}, ensure_ascii=False).encode()


def _begin(form: Form, name: str) -> str:
    return f"{form.begin}{form.call.partition('%ARGUMENTS')[0] % name}"


class _Speller:
    """Writes texts of a form in Lark's form: marks that are one token as this token."""

    def __init__(self, form: Form, find_id: Callable[[str], int | None]) -> None:
        found = ((mark, find_id(mark)) for mark in form.marks)
        self._ids = {mark: token for mark, token in found if token is not None}

    def __call__(self, text: str) -> str:
        parts = re.split(f"({'|'.join(map(re.escape, self._ids))})", text) if self._ids else [text]
        spelled = (f"<[{self._ids[each]}]>" if each in self._ids else json.dumps(each) for each in parts if each)
        return " ".join(spelled)


def _write_call(rule: str, function: Mapping[str, Any], form: Form, spell: _Speller) -> list[str]:
    """Return the rules for a call of a function, the first one named ``rule``."""
    before, _, after = form.call.partition("%ARGUMENTS")
    head = f"{rule}: {spell(before % function['name'])}"
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    is_strict = bool(function.get("strict"))
    if form is PYTHONIC:
        return [f"{head} {rule}_0 {spell(after)}", *_write_keywords(rule, schema, is_strict)]
    end = f" {spell(after)}" if after else ""
    schema = schema if "type" in schema else {**schema, "type": "object"}
    return [f"{head} {rule}_arguments{end}", f"{rule}_arguments: %json {_add_options(schema, is_strict=is_strict)}"]


def _write_keywords(rule: str, schema: Mapping[str, Any], is_strict: bool) -> list[str]:
    """Return rules for keyword arguments, in the schema's order: ``rule_N`` before the first, ``rule_N_more`` after."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        raise InputError(f"{TOOLS} has a schema whose required or properties are of another kind.", "Write it in full.")
    rules = []
    for index, (name, each) in enumerate(properties.items()):
        value = {**(each if isinstance(each, Mapping) else {}), **shared}
        one, after = f"{json.dumps(name + '=')} {rule}_{index}_value", f"{rule}_{index + 1}"
        skipped = "" if name in required else f" | {after}"
        rules.append(f"{rule}_{index}: {one} {after}_more{skipped}")
        skipped = "" if name in required else f" | {after}_more"
        rules.append(f'{rule}_{index}_more: ", " {one} {after}_more{skipped}')
        rules.append(f"{rule}_{index}_value: %json {_add_options(value, is_strict=is_strict)}")
    last = f"{rule}_{len(properties)}"
    return [*rules, f'{last}: ""', f'{last}_more: ""']


def _add_options(schema: Mapping[str, Any], *, is_strict: bool = True) -> str:
    """Return a schema as JSON, with llguidance's options; unless strict, what it does not know is left out of it."""
    options = {**_BLANKS, "lenient": not is_strict}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
