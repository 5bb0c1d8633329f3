"""Read rows of data from CSV, JSON Lines, Parquet, Excel and plain text files through one interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from shoal.errors import ArtifactError
from shoal.tables.binary import open_parquet, open_xlsx
from shoal.tables.common import NotUtf8, Opened, Row, Rows, Source, Unnamed, shorten, shorten_all
from shoal.tables.text import TEXT, as_cell, check_utf8, open_csv, open_jsonl, open_lines

__all__ = [
    "KINDS",
    "TEXT",
    "NotUtf8",
    "Table",
    "as_cell",
    "open_stream",
    "open_table",
    "scan_table",
    "shorten",
    "shorten_all",
]

R = TypeVar("R")
_Reader = Callable[[BinaryIO, Source, ExitStack], Opened]
_READERS: dict[str, _Reader] = {
    ".csv": open_csv,
    ".jsonl": open_jsonl,
    ".parquet": open_parquet,
    ".xlsx": open_xlsx,
    ".txt": open_lines,
}
KINDS = tuple(_READERS)
STREAM_KINDS = (".txt", ".jsonl", ".csv")


@dataclass(frozen=True)
class Table(Generic[R]):
    """An open file: the names of its columns, and its rows, which can be read once.

    ``rows`` yields each row's number and its values by column. The number is the one that a person finds in the file:
    the record's in CSV and Excel, where the header is row 1; the line's in JSON Lines and plain text; the row's, from
    1, in Parquet. Values are those of the file: strings in CSV, None for an empty cell elsewhere.
    """

    source: Source
    columns: tuple[str, ...]
    rows: Iterator[tuple[int, R]]
    fraction_read: Callable[[], float | None]  # about how much has been read, where it is known how much there is

    def where(self, number: int) -> str:
        """Name the row with this number, for messages."""
        return self.source.where(number)


@contextmanager
def scan_table(path: Path) -> Iterator[Table[Row]]:
    """Open the table in ``path``, by its ending; rows are read as they are iterated.

    * ``.csv``: UTF-8 with or without a byte-order mark, commas, quotes doubled within quotes. Missing last fields are
      None. Blank lines are skipped. A column without a name is called by its place: ``column 1``.
    * ``.jsonl``: one object per line. ``columns`` are the first object's; others may have more or fewer.
    * ``.parquet``: any types, as Python's.
    * ``.xlsx``: the first sheet, its columns named as in CSV. Formulas are the values that were last computed, None
      where none ever was.
    * ``.txt``: one text per line, in a column ``text``.

    A row that cannot be read is an ArtifactError in place of its values; a cell that is not UTF-8 is ``NotUtf8``.

    Raises:
        ArtifactError: the file cannot be read, or is not what its ending says; from ``rows`` too, where nothing after
            the row can be read either, or where the file was changed during reading.
        SetupError: the library for Parquet or Excel is not installed.
    """
    with ExitStack() as stack:
        with _explained(path):
            file = stack.enter_context(path.open("rb"))
            source = Source(path.name, path.suffix.lower())
            read = _READERS.get(source.kind)
            if read is None:
                is_array = source.kind in (".npy", ".json")
                fix = f"Give it as an input's value: NAME=@{path}" if is_array else "Save it as one of these."
                raise ArtifactError(f"{path.name} is not one of {', '.join(_READERS)}.", fix)
            before = os.fstat(file.fileno())
            opened = read(file, source, stack)
        fraction = opened.fraction_read or _fraction_read(file, before.st_size)
        yield Table(source, opened.columns, _watch(opened.rows, path, before), fraction)


@contextmanager
def open_table(path: Path) -> Iterator[Table[dict[str, Any]]]:
    """Open a table like ``scan_table``, but raise at the first row that cannot be read, or cell that is not UTF-8.

    In CSV and Excel, columns without a name and rows without a value are left out.
    """
    with scan_table(path) as table:
        columns = tuple(name for name in table.columns if not isinstance(name, Unnamed))
        yield Table(table.source, columns, _demand(table, columns), table.fraction_read)


@contextmanager
def open_stream(stream: BinaryIO, kind: str) -> Iterator[Table[Row]]:
    """Open a table like ``scan_table``, from a pipe.

    Raises:
        ArtifactError: ``kind`` cannot be read from one.
    """
    if kind not in STREAM_KINDS:
        raise ArtifactError(f"{kind} cannot be read from standard input.", f"Known: {', '.join(STREAM_KINDS)}.")
    source = Source("standard input", kind)
    with ExitStack() as stack:
        opened = _READERS[kind](stream, source, stack)
        yield Table(source, opened.columns, opened.rows, lambda: None)


def _fraction_read(file: BinaryIO, size: int) -> Callable[[], float | None]:
    """Return a function that gives the fraction of bytes read; None once the file is closed."""
    return lambda: None if file.closed or not size else min(1.0, file.tell() / size)


def _demand(table: Table[Row], columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    are_blanks_skipped = table.source.kind in (".csv", ".xlsx")
    for number, row in table.rows:
        if isinstance(row, ArtifactError):
            raise row
        if len(columns) < len(table.columns):
            row = {name: row.get(name) for name in columns}
        for value in row.values():
            if isinstance(value, NotUtf8):
                check_utf8(value.decode("utf-8", "surrogateescape"), table.where(number))
        if not (are_blanks_skipped and all(map(_is_blank, row.values()))):
            yield number, row


def _is_blank(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _watch(rows: Rows, path: Path, before: os.stat_result) -> Rows:
    with _explained(path):
        yield from rows
        after = path.stat()
    if any(getattr(before, name) != getattr(after, name) for name in ("st_ino", "st_size", "st_mtime_ns")):
        raise ArtifactError(f"{path.name} changed while it was read.", "Run it again when nothing writes to the file.")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert the operating system's errors while reading to shoal's own."""
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"There is no file {path}.", "Check the file's name.") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path} is a folder.", f"Name a file in it: {', '.join(_READERS)}.") from None
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"{path} cannot be read: {reason}.", "Copy it to where you can read it.") from None
