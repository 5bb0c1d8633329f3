"""Calls of tools in the text of an answer, read piece by piece.

The forms in ``tool_forms.FORMS`` differ in how calls begin, so the reader finds the form in the text itself. It returns
the name of a call as soon as it is known, then the arguments as they come: JSON as the model wrote it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,]*")  # keys of an object
_NAMED = re.compile(r"\s*([\w.-]+)\s*(\[ARGS\]\s*)?(?=\{)", re.ASCII)
_FUNCTION = re.compile(r"\s*([\w.-]+)\s*\(", re.ASCII)
_STRING = re.compile(r"""("(?:[^"\\]|\\.)*("|\\?\Z)|'(?:[^'\\]|\\.)*('|\\?\Z))""", re.DOTALL)  # whole or not
_CONSTANTS = {"true": True, "false": False, "null": None}
_MOST_COMPACT = 256  # characters, without white space, of the beginning of a call with its name
_decode = json.JSONDecoder().raw_decode


class CallPiece(NamedTuple):
    """Part of a call: its number, from 0; in its first part its ``name``, later empty; more of its arguments."""

    number: int
    name: str
    arguments: str


class _Found(NamedTuple):
    """Call at the beginning of a text: what is known of it, and where it ends; None while it is not whole."""

    name: str = ""
    arguments: str = ""
    end: int | None = None


_ReadCall = Callable[[str], _Found | None]  # None of a text that is no call


class _Calls(NamedTuple):
    """Calls after a beginning: how each is read, what comes between two of them, and what ends the last one."""

    read: _ReadCall
    between: str = ""
    end: str = ""


class CallReader:
    """Divides the text of one answer into text and calls.

    Calls without a mark, such as those of Llama 3, are recognised at the beginning of the answer, by the ``names`` of
    the functions. Of more than ``most`` calls, the later ones are left out. White space beside calls is not text.
    """

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self._most = most
        self._bare = [(f'{{"name":"{name}"', _OBJECTS) for name in names]
        self._bare += [(f'{{"type":"function","name":"{name}"', _OBJECTS) for name in names]
        self._bare += [(f"[{name}(", _FUNCTIONS) for name in names]
        self._held, self._opening = "", ""  # text that is not returned yet, and the mark before it
        self._calls: _Calls | None = None  # while calls are read
        self._is_between = False  # behind a call, before what ends or goes on with the calls
        self._sent = ("", "")  # name and arguments of the call that is read
        self._count, self._has_text = 0, False

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a call that is whole."""
        return self._count > 0

    def step(self, text: str, *, last: bool = False) -> list[str | CallPiece]:
        """Take the next piece of the text; return what is known to be text, and parts of calls.

        With ``last``, a call that is not whole is text, unless a part of it, or another call, was returned.
        """
        self._held += text
        found: list[str | CallPiece] = []
        while self._held or (last and self._opening):
            before = self._held, self._calls, self._is_between
            if self._calls is None:
                found += self._step_text(last)
            elif self._is_between:
                self._step_between(self._calls, last)
            else:
                found += self._step_call(self._calls, last)
            if before == (self._held, self._calls, self._is_between):
                break
        return found

    def _step_text(self, last: bool) -> list[str | CallPiece]:
        """Return text up to the beginning of calls, or to what may become one."""
        text = self._held
        if not self._has_text and not self._count:
            calls = self._find_bare(text)
            if calls is _MAYBE and not last:
                return []
            if calls not in (None, _MAYBE):
                self._calls, end = calls, len(text) - len(text.lstrip()) + (calls is _FUNCTIONS)
                self._opening, self._held = text[:end], text[end:]
                return []
        places = [(at, mark) for mark in _MARKS if (at := text.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            blanks = len(text[:at].rstrip())
            self._calls, self._opening, self._held = _MARKS[mark], text[blanks:at] + mark, text[at + len(mark) :]
            return self._emit(text[:blanks])
        is_all = last and not self._count  # behind a call, white space and the beginning of a mark are left out
        end = len(text) if is_all else len(text[: _find_mark(text)].rstrip())
        self._held = "" if last else text[end:]
        return self._emit(text[:end])

    def _find_bare(self, text: str) -> _Calls | None:
        """Return the calls that a text without a mark begins; ``_MAYBE`` if it may still become one."""
        begun = re.sub(r"\s+", "", text[: 4 * _MOST_COMPACT])[:_MOST_COMPACT]
        if found := next((calls for begin, calls in self._bare if begun.startswith(begin)), None):
            return found
        return _MAYBE if any(begin.startswith(begun) for begin, _ in self._bare) else None

    def _step_call(self, calls: _Calls, last: bool) -> list[str | CallPiece]:
        """Return what is new of the call that is read."""
        found = calls.read(self._held)
        if found is None or (last and found.end is None):
            if self._sent[0] or (last and self._count):  # the rest of a call that is cut
                self._held, self._opening = "", ""
                return self._send(found) if found else []
            text = self._opening or self._held[:1]
            self._calls, self._opening, self._held = None, "", self._held[len(text) - len(self._opening) :]
            return self._emit(text)
        pieces = self._send(found)
        if found.end is not None:
            self._held, self._is_between, self._opening = self._held[found.end :], True, ""
            self._count, self._sent = self._count + 1, ("", "")
        return pieces

    def _send(self, found: _Found) -> list[str | CallPiece]:
        (_, sent), is_first = self._sent, not self._sent[0]
        if not found.name or (self._most is not None and self._count >= self._most):
            return []
        self._sent = found.name, found.arguments
        piece = CallPiece(self._count, found.name if is_first else "", found.arguments[len(sent) :])
        return [piece] if is_first or piece.arguments else []

    def _step_between(self, calls: _Calls, last: bool) -> None:
        """Go on with the next call, or with text."""
        rest = self._held.lstrip()
        if calls.between and rest.startswith(calls.between):
            self._held, self._is_between = rest[len(calls.between) :], False
        elif rest.startswith(calls.end) and rest:
            self._held, self._is_between, self._calls = rest[len(calls.end) :], False, None
        elif last and calls.end.startswith(rest):  # a mark that is cut
            self._held = ""
        elif last or not calls.end.startswith(rest):
            self._is_between, self._calls = False, None

    def _emit(self, text: str) -> list[str | CallPiece]:
        if not self._has_text and self._count:
            text = text.lstrip()
        self._has_text |= bool(text.strip())
        return [text] if text else []


def _find_mark(text: str) -> int:
    """Return the index at which an incomplete mark may begin; the text's length if there is none."""
    longest = max(map(len, _MARKS)) - 1
    places = range(max(0, len(text) - longest), len(text))
    return next((at for at in places if any(mark.startswith(text[at:]) for mark in _MARKS)), len(text))


def _read_object(text: str) -> _Found | None:
    """Read a call that is an object with ``name``, and with ``arguments`` or ``parameters``."""
    at, name, arguments = _skip(text, 0), "", ""
    if at < len(text) and text[at] != "{":
        return None
    at += 1
    try:
        while (at := _BETWEEN.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            if text[at] == "}":
                return _Found(name, arguments or "{}", at + 1) if name else None
            if text[at] != '"':
                return None
            key, at = scanstring(text, at + 1)
            at = _skip(text, at)
            if text[at : at + 1] not in (":", ""):
                return None
            begin = at = _skip(text, at + 1)
            is_arguments = key in ("arguments", "parameters")
            try:
                value, at = _decode(text, at)
            except ValueError:  # it is not whole, so all that follows is a part of it
                return _Found(name, text[begin:] if is_arguments and text[begin : begin + 1] == "{" else "")
            if is_arguments:
                arguments = text[begin:at] if isinstance(value, dict) else _to_arguments(value)
            elif key == "name" and isinstance(value, str):
                name = value
    except (ValueError, RecursionError):  # a key that is not whole
        pass
    return _Found(name, arguments)


def _to_arguments(value: Any) -> str:
    """Return arguments that are no object: some models write them as a text of JSON, or null for none."""
    return value if isinstance(value, str) and value else "{}" if not value else json.dumps(value, ensure_ascii=False)


def _read_named(text: str) -> _Found | None:
    """Read a call that is a name, at most a mark, and an object with the arguments."""
    match = _NAMED.match(text)
    if match is None:
        is_open = re.fullmatch(r"\s*[\w.-]*\s*(\[[ARGS\]]*\s*)?", text, re.ASCII)
        return _Found() if is_open else None
    begin = match.end()
    try:
        _, end = _decode(text, begin)
    except (ValueError, RecursionError):
        return _Found(match[1], text[begin:])
    return _Found(match[1], text[begin:end], end)


def _read_mistral(text: str) -> _Found | None:
    """Read a call after Mistral's mark: in a list of objects, or a name and an object."""
    at = _skip(text, 0)
    if text[at : at + 1] not in ("[", "{"):
        return _read_named(text)
    at += text[at] == "["
    found = _read_object(text[at:])
    return found and (found if found.end is None else found._replace(end=found.end + at))


def _read_function(text: str) -> _Found | None:
    """Read a call as in Python: a name, and keyword arguments in parentheses; it is known when it is whole."""
    if (match := _FUNCTION.match(text)) is None:
        return _Found() if re.fullmatch(r"\s*[\w.-]*\s*", text, re.ASCII) else None
    masked = _STRING.sub(lambda string: "_" * len(string[0]), text)
    depth, name = 0, match[1]
    for at in range(match.end() - 1, len(text)):
        depth += (masked[at] in "([{") - (masked[at] in ")]}")
        if depth == 0:
            break
    else:
        return _Found()  # what it is shows at its end
    try:
        call = ast.parse(f"f{text[match.end() - 1 : at + 1]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        values = {each.arg: _evaluate(each.value) for each in call.keywords}
        return _Found(name, json.dumps(values, ensure_ascii=False), at + 1)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _evaluate(node: ast.expr) -> Any:
    class Constants(ast.NodeTransformer):
        """JSON's constants, which some models write."""

        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node

    return ast.literal_eval(Constants().visit(node))


def _skip(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]


_MAYBE = _Calls(lambda _: None)
_OBJECTS = _Calls(_read_object, ";")
_FUNCTIONS = _Calls(_read_function, ",", "]")
_MARKS = {
    "<tool_call>": _Calls(_read_object, end="</tool_call>"),
    "[TOOL_CALLS]": _Calls(_read_mistral, ",", "]"),
    "<|python_tag|>": _OBJECTS,
}
