"""Line numbers of the fields of a text-format protobuf.

The message itself is read by protobuf, which keeps no positions; this walks the same tokens, with protobuf's own
tokenizer, and keeps only the positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 100  # protobuf's own limit of nesting


@dataclass
class Node:
    """A field: the line of its name, its value where it is a scalar, and the fields within it in their order."""

    line: int
    value: str = ""
    children: dict[str, list[Node]] = field(default_factory=dict)

    def find(self, *path: str | int) -> Node:
        """Find the field at ``path``, names and indices in turn; the nearest enclosing one if it does not exist.

        An index counts the occurrences of the name before it; a name alone means the first.
        """
        node, position = self, 0
        while position < len(path):
            name = path[position]
            index = path[position + 1] if position + 1 < len(path) and isinstance(path[position + 1], int) else None
            position += 1 if index is None else 2
            same = node.children.get(str(name), [])
            if not same or int(index or 0) >= len(same):
                return node
            node = same[int(index or 0)]
        return node

    def entries(self, name: str, key: str) -> Iterator[Node]:
        """The entries of map field ``name`` with ``key``."""
        keys = ((entry, entry.children.get("key")) for entry in self.children.get(name, []))
        return (entry for entry, found in keys if found and found[0].value == key)


def locate(text: str) -> Node:
    """The fields of ``text``; as many as can be read, where it is not well formed."""
    from google.protobuf.text_format import ParseError, Tokenizer

    root = Node(1)
    with suppress(ParseError), warnings.catch_warnings():  # the real parser reports what is wrong, and where
        warnings.simplefilter("ignore", DeprecationWarning)
        _read_fields(Tokenizer(text.split("\n")), root, "", 0)
    return root


def _read_fields(tokens: Any, node: Node, end: str, depth: int) -> None:
    while not tokens.AtEnd() and not (end and tokens.TryConsume(end)):
        line = _line(tokens)
        name = str(tokens.ConsumeIdentifierOrNumber())
        _read_value(tokens, node, name, line, depth)
        if not tokens.TryConsume(","):
            tokens.TryConsume(";")


def _read_value(tokens: Any, node: Node, name: str, line: int, depth: int) -> None:
    tokens.TryConsume(":")
    if not tokens.TryConsume("["):
        _read_one(tokens, node, name, line, depth)
        return
    while not tokens.TryConsume("]"):
        _read_one(tokens, node, name, _line(tokens), depth)
        if not tokens.TryConsume(",") and not tokens.LookingAt("]"):
            raise tokens.ParseError("Expected ',' or ']'.")


def _read_one(tokens: Any, node: Node, name: str, line: int, depth: int) -> None:
    if depth > MAX_DEPTH or tokens.AtEnd():
        raise tokens.ParseError("Nested too deep, or cut short.")
    child = Node(line)
    node.children.setdefault(name, []).append(child)
    for start, end in (("{", "}"), ("<", ">")):
        if tokens.TryConsume(start):
            _read_fields(tokens, child, end, depth + 1)
            return
    if tokens.token[:1] in ('"', "'"):
        child.value = str(tokens.ConsumeString())
        return
    if tokens.TryConsume("-"):
        child.value = "-"
    child.value += str(tokens.token)
    tokens.NextToken()


def _line(tokens: Any) -> int:
    return int(tokens._line) + 1  # the tokenizer has no public attribute for it
