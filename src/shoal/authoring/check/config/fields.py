"""Rules for the text of a ``config.pbtxt``: syntax, unknown fields, and placeholders that were not filled in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any, TypeAlias

from shoal.authoring.check.config.trtllm import find_unset_lines
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Node, Repository
from shoal.authoring.environment.targets import LLMAPI, Release
from shoal.authoring.repository.config import CONFIG
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS
from shoal.authoring.repository.parameters import ANY, COMPONENT, HOST_INPUTS, find_right_name

SYNTAX = Rule("config-syntax", Severity.ERROR, is_core=True)
UNKNOWN = Rule("unknown-field", Severity.WARNING, is_core=True)
REFUSED = Rule("field-unknown-to-target", Severity.ERROR, is_core=True)
MISSPELT = Rule("misspelt-field", Severity.ERROR, is_core=True)
TOO_NEW = Rule("field-newer-than-target", Severity.ERROR, is_core=True)
LEFTOVER = Rule("template-leftover", Severity.ERROR, is_core=True)
LEFTOVER_TEXT = Rule("template-leftover-in-text", Severity.WARNING)
UNREADABLE = Rule("config-unreadable", Severity.ERROR)
PARAMETER = Rule("parameter-misspelt", Severity.WARNING)
VALUE = Rule("parameter-value", Severity.ERROR, is_core=True)

# (message, field): the first release of Triton whose schema has the field.
_FIRST = {("", "model_metrics"): (24, 11), ("ensemble_scheduling", "max_inflight_requests"): (25, 11)}
Parts: TypeAlias = Sequence[tuple[int, str]]
_PLACEHOLDER = re.compile(r"\$\{[^{}\n]*\}")
_QUOTES = ("'", '"')
PART = re.compile(r""""(?:\\.|[^"\\])*(?:"|$)|'(?:\\.|[^'\\])*(?:'|$)|#.*|[^"'#]+""")
_BAD_ESCAPE = re.compile(r"(?:[^\\]|^)(?:\\\\)*(\\[^abfnrtv?\\'\"0-7xXuU])")
# Numbers that Python's parser takes: 1_000, +1, 0b1, 0o7.
_NOT_NUMBER = re.compile(r"(?<![\w.])(?:\d[\d.]*_\w*|\+[\d.]\w*|0[bBoO]\d\w*)")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
COMPONENT_CODE = re.compile(r"\b(from|import) shoal\b")
_CLOSE = 0.8  # least difflib ratio of a misspelt name and the right one


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in the text of ``config.pbtxt``."""
    parts = list(_parts(model.text))
    leftovers = list(_leftovers(model, parts))
    yield from leftovers
    if model.message is not None and not model.broken_line:
        yield from _stricter(model, parts)
    if model.unreadable:
        what = f"{CONFIG} of {model.name} cannot be read: {model.unreadable}."
        yield UNREADABLE.at(Place(model.path), what, "Make it a text file that the server's user may read.")
    if model.problem and not any(finding.rule is LEFTOVER for finding in leftovers):
        what, line = model.problem
        shown = _shown(model.text, line)
        yield SYNTAX.at(
            Place(model.path, line),
            "failed to read text proto. In the words of Python's protobuf:"
            f" {what}{f'; the line is: {shown}' if shown else ''}.",
            _advise(what, model.text),
        )
    if model.message is not None:
        yield from _unknown(model, model.fields, model.message.DESCRIPTOR, repository, ())
        yield from _misspelt(model)
        yield from _values(model, repository)


def _leftovers(model: Model, parts: Parts) -> Findings:
    unset = find_unset_lines(model) if model.message is not None and "${" in model.text else ()
    for number, part in parts:
        found = _PLACEHOLDER.search(part)
        if found and not (part[0] in _QUOTES and number in unset):
            rule = LEFTOVER_TEXT if part[0] in _QUOTES else LEFTOVER
            what = f"The placeholder {found[0][:80]} was never filled in."
            yield rule.at(Place(model.path, number), what, f"Give {found[0][2:-1][:80]} a value.")


def _stricter(model: Model, parts: Parts) -> Findings:
    """Find text that Python's protobuf accepts and the C++ parser in Triton rejects."""
    for number, part in parts:
        if part[0] in _QUOTES:
            found = _BAD_ESCAPE.search(part)
            what, fix = (f"escape {found[1]}", f"Write \\{found[1]} for a backslash.") if found else ("", "")
        elif found := _NOT_ASCII.search(part):
            what = f"character U+{ord(found[0]):04X} outside of quotes"
            fix = "Remove it; pasted text often contains it."
        else:
            found = _NOT_NUMBER.search(part)
            what, fix = f"number {found[0][:40]}" if found else "", "Write digits alone, such as 100000."
        if what:
            yield SYNTAX.at(Place(model.path, number), f"failed to read text proto: the {what} is not valid.", fix)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Split each line, without comments, into quoted strings and other text; yield the line's number with each part."""
    for number, line in enumerate(text.split("\n"), start=1):
        for found in PART.finditer(line):
            if not found[0].startswith("#"):
                yield number, found[0]


def _shown(text: str, line: int) -> str:
    lines = text.split("\n")
    return lines[line - 1].strip()[:80] if 0 < line <= len(lines) else ""


def _advise(what: str, text: str) -> str:
    if "oneof" in what and "ensemble_scheduling" in text:
        return "An ensemble has no batching of its own. Remove it, and set it in the models."
    if "multiple" in what:
        return "Keep one of the two."
    enum = re.search(r'Enum type "inference\.(\w+(?:\.\w+)*)" has no value named (\S+)', what)
    if enum:
        known = _enum_values(enum[1])
        close = difflib.get_close_matches(enum[2], known, 1, 0.5)
        return f"Write {close[0]}." if close else f"Known: {', '.join(known)}."
    return "Fix that line; the fields are those of Triton's ModelConfig."


def _enum_values(name: str) -> list[str]:
    from tritonclient.grpc import model_config_pb2

    found = model_config_pb2
    for part in name.split("."):
        found = getattr(found, part, None)
    return list(found.keys()) if found is not None else []


def _unknown(model: Model, node: Node, message: Any, repository: Repository, path: tuple[str, ...]) -> Findings:
    known = message.fields_by_name
    for name, nodes in node.children.items():
        place = Place(model.path, nodes[0].line)
        if name not in known:
            close = difflib.get_close_matches(name, list(known), 1, _CLOSE)
            where = f"{'.'.join(path) or 'a ModelConfig'}"
            if close:
                yield MISSPELT.at(place, f"{where} has no field {name}.", f"Write {close[0]}.")
            elif repository.target and repository.target.release <= _find_schema():
                what = f"{where} of {repository.target.name} has no field {name}."
                yield REFUSED.at(place, what, "Remove it.")
            else:
                yield UNKNOWN.at(
                    place,
                    f"{where} has no field {name} in the schema of this machine's tritonclient.",
                    "Remove it, or make sure that your Triton is new enough to support it.",
                )
            continue
        first = _FIRST.get((path[-1] if path else "", name))
        if first and repository.target and repository.target.release < first:
            yield TOO_NEW.at(
                place,
                f"{name} is supported from Triton {first[0]}.{first[1]:02} on; the target is"
                f" {repository.target.name} ({repository.target.version}).",
                "Remove it, or serve with a newer release.",
            )
        if known[name].message_type is not None:
            for child in nodes:
                yield from _unknown(model, child, known[name].message_type, repository, (*path, name))


@cache
def _find_schema() -> Release:
    """Return the release of Triton whose schema this machine's tritonclient has: 2.51 is of 24.10, one a month."""
    months = 24 * 12 + 9 + int(metadata.version("tritonclient").split(".")[1]) - 51
    return months // 12, months % 12 + 1


def _misspelt(model: Model) -> Findings:
    """Find parameters with nearly the name of one that shoal reads, unless the model's own code reads them."""
    code = "\n".join(text for _, text in model.sources)
    scopes = [ANY, model.backend, *([COMPONENT] if COMPONENT_CODE.search(code) else [])]
    scopes += [LLMAPI] if LLMAPI in code else []
    for name in model.parameters:
        right = find_right_name(name, scopes, model.parameters)
        if right and not re.search(rf"([\"']){re.escape(name)}\1", code):
            yield PARAMETER.at(
                model.at_entry("parameters", key=name, within=("key",)),
                f"{model.name} has the parameter {name}, and none called {right}.",
                f"Write {right}, if that is meant.",
            )


def _values(model: Model, repository: Repository) -> Findings:
    """Find a value of its own parameter that Triton's Python backend refuses."""
    given = model.parameters.get(HOST_INPUTS, "yes")
    is_embedded = repository.target is not None and repository.target.is_embedded
    is_ours = is_embedded and model.backend in PYTHON_BASED_BACKENDS
    if (model.is_python or is_ours or model.message.runtime.endswith(".py")) and given not in ("yes", "no"):
        place = model.at_entry("parameters", key=HOST_INPUTS, within=("value", "string_value"))
        yield VALUE.at(place, f"Incorrect value for {HOST_INPUTS}: {given!r:.60}.", "Write yes or no.")
