"""Output formats of answers: CSV, JSON Lines and Parquet.

A format encodes scored rows to bytes, which go to a pipe or a journal, and makes the whole file from a journal.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from shoal.bulk.scoring import Scored
from shoal.component.spec import TensorSpec
from shoal.errors import ArtifactError, InputError
from shoal.tables import NotUtf8, shorten

ERROR = "error"  # the column that says why a row has no answer


Payloads = Callable[[], Iterator[bytes]]  # all that was encoded, from the beginning


class Format(Protocol):
    """Output format of scored rows."""

    def header(self) -> bytes:
        """Return the bytes before the first row."""

    def admit(self, scored: Scored) -> Scored:
        """Return the row, or its error where the format cannot hold its values."""

    def encode(self, rows: Sequence[Scored]) -> bytes:
        """Encode the rows, to be appended to those encoded before."""

    def finish(self, payloads: Payloads, path: Path) -> None:
        """Write the whole file, of all that was encoded."""


@dataclass(frozen=True)
class Layout:
    """Columns of the input, where they are known beforehand, and those that the answers add, by their tensors."""

    columns: tuple[str, ...]
    added: Mapping[str, TensorSpec]

    @property
    def reserved(self) -> tuple[str, ...]:
        """Columns of the answers and the errors."""
        return (*self.added, ERROR)

    def check(self, source: str) -> None:
        """Check that no answer takes the place of a column, or of another answer.

        Raises:
            InputError: there is a column of that name.
        """
        taken = [name for name in self.reserved if name in self.columns]
        if taken:
            raise InputError(f"{source} has a column {taken[0]!r}, where an answer would go.", "Rename that column.")
        if ERROR in self.added:
            raise InputError(f"The model gives an output {ERROR!r}, where errors go.", "Ask it with shoal.Client.")

    def refuse(self, scored: Scored, name: str, why: str) -> Scored:
        """Return the row with an error instead of its answer, and without the value that the format cannot hold."""
        assert not isinstance(scored.row, ArtifactError)
        row = {key: value for key, value in scored.row.items() if key not in self.reserved}
        said = f"Row {scored.number} has a column {shorten(name)} ({shorten(scored.row[name])}), {why}"
        return Scored(scored.number, row, said)


def answered(scored: Scored) -> dict[str, Any]:
    """Return the row's own values, then its answers, or its ``error``."""
    given = {} if isinstance(scored.row, ArtifactError) else scored.row
    return {**given, **({ERROR: scored.answer} if isinstance(scored.answer, str) else scored.answer)}


class JsonLines:
    """JSON Lines: one object per row, no header."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def header(self) -> bytes:
        return b""

    def admit(self, scored: Scored) -> Scored:
        taken = [name for name in self._layout.reserved if name in scored.row] if isinstance(scored.row, dict) else []
        return self._layout.refuse(scored, taken[0], "where an answer would go.") if taken else scored

    def encode(self, rows: Sequence[Scored]) -> bytes:
        return b"".join(dump_json(answered(scored)) for scored in rows)

    def finish(self, payloads: Payloads, path: Path) -> None:
        write_all(path, payloads())


def dump_json(row: Mapping[str, Any]) -> bytes:
    """Encode a row as one line of JSON; values of types that JSON lacks become text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=as_text).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can write
        return json.dumps(row, default=as_text).encode() + b"\n"


def as_text(value: object) -> str:
    """Convert a value of another type to text: bytes with escapes for what is not UTF-8, times in ISO 8601."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    isoformat = getattr(value, "isoformat", None)
    return str(isoformat() if isoformat else value)


class Csv(JsonLines):
    """CSV: commas, quotes doubled within quotes, ``\\n`` at the ends of lines; ``error`` is the last column.

    The header is the first row's columns and those of the answers. Bytes that were not UTF-8 are written unchanged.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._names = [*layout.columns, *layout.added, ERROR]
        self._known = set(layout.columns)

    def header(self) -> bytes:
        return _csv_lines([[writable(name) for name in self._names]])

    def admit(self, scored: Scored) -> Scored:
        others = [name for name in scored.row if name not in self._known] if isinstance(scored.row, dict) else []
        if others:
            why = "which the first row lacks; CSV cannot hold it, .jsonl can."
            return self._layout.refuse(scored, others[0], why)
        return super().admit(scored)

    def encode(self, rows: Sequence[Scored]) -> bytes:
        return _csv_lines([_csv_cell(row.get(name)) for name in self._names] for row in map(answered, rows))

    def finish(self, payloads: Payloads, path: Path) -> None:
        write_all(path, chain([self.header()], payloads()))


class _Lines(list[str]):
    """Line sink of ``csv.writer``. With ``\\r\\n`` as its line end, csv also quotes a bare carriage return, as it must;
    the sink then makes it ``\\n``.
    """

    def write(self, line: str) -> None:
        self.append(line[: -len("\r\n")] + "\n")


def _csv_lines(rows: Iterable[Sequence[str]]) -> bytes:
    written = _Lines()
    csv.writer(written, lineterminator="\r\n").writerows(rows)
    return "".join(written).encode("utf-8", "surrogateescape")


def _csv_cell(value: Any) -> str:
    if isinstance(value, NotUtf8):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return writable(value)
    if value is None:
        return ""
    if isinstance(value, bool | dict | list):
        return writable(json.dumps(value, ensure_ascii=False, default=as_text))
    return as_text(value)


def writable(text: str) -> str:
    """Escape lone surrogates in ``text``, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def write_all(path: Path, parts: Iterable[bytes]) -> None:
    """Write ``parts`` one after the other."""
    with path.open("wb") as file:
        file.writelines(parts)
