"""Names of rows and columns, and their form in messages, for the readers of all kinds of files."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.errors import ArtifactError

Row = dict[str, Any] | ArtifactError  # values by column, or why they cannot be read
Rows = Iterator[tuple[int, Row]]


class Opened(NamedTuple):
    """Result of a reader: columns, rows, and the fraction read where the file position does not show it."""

    columns: tuple[str, ...]
    rows: Rows
    fraction_read: Callable[[], float] | None = None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 40


class Unnamed(str):
    """Name given to a column that has none in the file."""


class NotUtf8(bytes):
    """A cell whose bytes are not UTF-8."""


@dataclass(frozen=True)
class Source:
    """Source of rows: its name for messages, and its kind as a file ending, such as ``.csv``."""

    name: str
    kind: str

    def where(self, number: int) -> str:
        """Name the row with this number, for messages."""
        return f"{self.name}, {'line' if self.kind in ('.jsonl', '.txt') else 'row'} {number}"


def shorten(value: object) -> str:
    """Format ``value`` for messages: Python's notation, the middle of long ones left out."""
    return _SHORT.repr(value)


def shorten_all(values: Iterable[str]) -> str:
    """Format names as a list for messages."""
    return ", ".join(map(shorten, values)) or "none"


def name_columns(header: Sequence[object], source: Source) -> dict[str, int]:
    """Return each column's place in the header; those without a name are ``Unnamed``, with their place as name."""
    names = ["" if name is None else str(name) for name in header]
    given = [name for name in names if name.strip()]
    if not given:
        raise ArtifactError(
            f"{source.name} has no header: its first row is blank.", "Name its columns in the first row."
        )
    named = [name if name.strip() else Unnamed(f"column {place}") for place, name in enumerate(names, start=1)]
    check_distinct(named, source.name)
    return {name: place for place, name in enumerate(named)}


def check_distinct(names: Iterable[str], where: str) -> None:
    """Check that no column appears twice.

    Raises:
        ArtifactError: one is.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ArtifactError(f"{where} has more than one column {shorten(twice[0])}.", "Give each its own name.")


def no_rows(source: Source) -> ArtifactError:
    """Make the error for a file without a header."""
    return ArtifactError(f"{source.name} is empty.", "Name a file with a header and rows.")


def by_name(cells: Sequence[Any], named: dict[str, int]) -> dict[str, Any]:
    """Return a row's values by column name; None for columns beyond the end of a short row."""
    return {name: cells[place] if place < len(cells) else None for name, place in named.items()}
