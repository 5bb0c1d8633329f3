"""Rows of tables: their values, where they come from, and how they are named in messages."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.errors import ArtifactError
from shoal.kit.component.spec import STRING, TensorSpec

Row = dict[str, Any] | ArtifactError  # values by column, or why they cannot be read
Rows = Iterator[tuple[int, Row]]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 40


class NotUtf8(bytes):
    """A cell whose bytes are not UTF-8."""


@dataclass(frozen=True)
class RowSource:
    """Source of rows: its name for messages, and its kind as a file ending, such as ``.csv``.

    If only a part of a file is read, its lines are counted from the byte ``offset``.
    """

    name: str
    kind: str
    offset: int = 0

    def where(self, number: int) -> str:
        """Name the row with this number, for messages."""
        unit = "line" if self.kind in (".jsonl", ".txt") else "row"
        return f"{self.name}, {unit} {number}{f' after byte {self.offset}' if self.offset else ''}"


def shorten(value: object) -> str:
    """Format ``value`` for messages, in Python's notation; the middle of a long value is left out."""
    return _SHORT.repr(value)


def shorten_all(values: Iterable[str]) -> str:
    """Format names as a list for messages."""
    return ", ".join(map(shorten, values)) or "none"


def check_distinct(names: Iterable[str], where: str) -> None:
    """Check that no column appears twice.

    Raises:
        ArtifactError: a column appears twice.
    """
    counts = Counter(names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        fix = advise_header(counts, "Give each its own name.")
        raise ArtifactError(f"{where} has more than one column {shorten(twice[0])}.", fix)


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def advise_header(columns: Iterable[str], otherwise: str) -> str:
    """Return the advice for a table with a row of numbers in place of names; else ``otherwise``."""
    names = list(columns)
    if names and all(map(is_number, names)) and names != [*map(str, range(len(names)))]:  # as pandas numbers columns
        return "Its first line looks like values, not names: put a line with the names above it."
    return otherwise


def show_example(spec: TensorSpec) -> str:
    """Return an example of an input for the command line: ``INPUT=[0.5,0.5]``, or ``INPUT=@file.npy`` if large."""
    sizes = [2 if size == -1 else size for size in spec.dims]
    if spec.dtype == STRING:
        return f"{spec.name}={'text' if sizes == [1] else json.dumps(['text'] * min(sizes[0], 2))}"
    one = "true" if spec.dtype == "TYPE_BOOL" else "0.5" if spec.dtype.startswith(("TYPE_FP", "TYPE_BF")) else "1"
    if sizes == [1]:
        return f"{spec.name}={one}"
    if len(sizes) != 1 or sizes[0] > 8:
        return f"{spec.name}=@file.npy"
    return f"{spec.name}=[{','.join([one] * sizes[0])}]"
