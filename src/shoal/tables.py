"""Rows of labelled or unlabelled data: CSV, JSON Lines, Parquet and Excel files behind one door."""

from __future__ import annotations

import csv
import json
import re
import reprlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import ArtifactError, needs

Rows = Iterator[tuple[int, dict[str, Any]]]

_BATCH_ROWS = 1024  # of a Parquet file in memory at a time
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of a byte that is not UTF-8
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 40


@dataclass(frozen=True)
class Table:
    """An open file: the names of its columns, and its rows, which can be read once.

    ``rows`` yields each row's number and its values by column. The number is the one that a person finds in the file:
    of CSV and Excel the record's, the header being row 1; of JSON Lines the line's; of Parquet the row's, from 1.
    Values are what the file has: strings in CSV, None where a cell is empty elsewhere.
    """

    path: Path
    columns: tuple[str, ...]
    rows: Rows

    def where(self, number: int) -> str:
        """How messages name the row with this number."""
        return _where(self.path, number)


@contextmanager
def open_table(path: Path) -> Iterator[Table]:
    """The table in ``path``, by its ending: ``.csv``, ``.jsonl``, ``.parquet`` or ``.xlsx``; read as it is iterated.

    * CSV: UTF-8 with or without a byte-order mark, commas, quotes doubled within quotes. Missing last fields are None.
    * JSON Lines: an object a line. ``columns`` are the first object's; others may have more or fewer.
    * Parquet: any types, as Python's.
    * Excel: the first sheet. Formulas are the values that were last computed, None where none ever was.

    In CSV and Excel, columns without a name and rows without a value are left out, as are blank lines of JSON Lines.

    Raises:
        ArtifactError: the file cannot be read, or is not what its ending says; from ``rows`` too, naming the row.
        SetupError: the library for Parquet or Excel is not installed.
    """
    with ExitStack() as stack:
        with _explained(path):
            file = stack.enter_context(path.open("rb"))
            read = _READERS.get(path.suffix.lower())
            if read is None:
                raise ArtifactError(f"{path.name} is none of {', '.join(_READERS)}.", "Save it as one of these.")
            columns, rows = read(file, path, stack)
        yield Table(path, columns, _explain_rows(path, rows))


def shorten(value: object) -> str:
    """``value`` as messages show it: Python's notation, the middle of long ones left out."""
    return _SHORT.repr(value)


def shorten_all(values: Iterable[str]) -> str:
    """Names as messages list them."""
    return ", ".join(map(shorten, values)) or "none"


def _where(path: Path, number: int) -> str:
    return f"{path.name}, {'line' if path.suffix.lower() == '.jsonl' else 'row'} {number}"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Around reading: the operating system's refusals in shoal's words."""
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"There is no {path.name} in {path.parent}.", "Check the file's name.") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path} is a folder.", f"Name a file in it: {', '.join(_READERS)}.") from None
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"{path} cannot be read: {reason}.", "Copy it to where you can read it.") from None


def _explain_rows(path: Path, rows: Rows) -> Rows:
    with _explained(path):
        yield from rows


# --- columns -----------------------------------------------------------------------------------------------------


def _name_columns(header: Sequence[object], path: Path) -> dict[str, int]:
    """Each named column's place in the header."""
    names = ["" if name is None else str(name) for name in header]
    named = {name: place for place, name in enumerate(names) if name.strip()}
    if not named:
        raise ArtifactError(f"{path.name} has no header: its first row is blank.", "Name its columns in the first row.")
    _check_distinct([name for name in names if name.strip()], path.name)
    return named


def _check_distinct(names: Iterable[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ArtifactError(f"{where} has more than one column {shorten(twice[0])}.", "Give each its own name.")


def _no_rows(path: Path) -> ArtifactError:
    return ArtifactError(f"{path.name} is empty.", "Name a file with a header and rows.")


def _is_blank(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _by_name(cells: Sequence[Any], named: dict[str, int]) -> dict[str, Any]:
    return {name: cells[place] if place < len(cells) else None for name, place in named.items()}


# --- text --------------------------------------------------------------------------------------------------------


def _open_text(file: BinaryIO, stack: ExitStack, newline: str) -> TextIOWrapper:
    """Lines of UTF-8. Bytes that are not become surrogates: only who reads rows can say which row they are in."""
    return stack.enter_context(TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline))


def _check_utf8(text: str, where: str) -> None:
    if not text.isascii() and (found := _NOT_UTF8.search(text)):
        byte = ord(found.group()) - 0xDC00
        raise ArtifactError(f"{where} is not UTF-8: it has the byte 0x{byte:02x}.", "Save the file as UTF-8.")


def _open_csv(file: BinaryIO, path: Path, stack: ExitStack) -> tuple[tuple[str, ...], Rows]:
    csv.field_size_limit(sys.maxsize)  # of the whole process; the default refuses texts of more than 128 KiB
    records = _records(csv.reader(_open_text(file, stack, newline=""), strict=True), path)
    first = next(records, None)
    if first is None:
        raise _no_rows(path)
    header = first[1]
    named = _name_columns(header, path)
    return tuple(named), _csv_rows(records, named, len(header), path)


def _records(reader: Iterator[list[str]], path: Path) -> Iterator[tuple[int, list[str]]]:
    number = 0
    try:
        for number, cells in enumerate(reader, start=1):
            _check_utf8("".join(cells), _where(path, number))
            yield number, cells
    except csv.Error as error:
        raise ArtifactError(
            f"{_where(path, number + 1)} is not CSV: {error}.", "Quote texts that have quotes, and double those."
        ) from None


def _csv_rows(records: Iterator[tuple[int, list[str]]], named: dict[str, int], width: int, path: Path) -> Rows:
    for number, cells in records:
        if all(map(_is_blank, cells)):
            continue
        if len(cells) > width:
            raise ArtifactError(
                f"{_where(path, number)} has {len(cells)} fields, the header {width}.", "Quote texts that have commas."
            )
        yield number, _by_name(cells, named)


def _open_jsonl(file: BinaryIO, path: Path, stack: ExitStack) -> tuple[tuple[str, ...], Rows]:
    # Only "\n" ends a line: within JSON, "\r" is mere space.
    rows = _jsonl_rows(_open_text(file, stack, newline="\n"), path)
    first = next(rows, None)
    if first is None:
        raise _no_rows(path)
    return tuple(first[1]), chain([first], rows)


def _jsonl_rows(lines: Iterable[str], path: Path) -> Rows:
    for number, line in enumerate(lines, start=1):
        where = _where(path, number)
        _check_utf8(line, where)
        if line.strip():
            yield number, _parse_object(line, where)


def _parse_object(line: str, where: str) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_distinct((name for name, _ in pairs), where)
        return dict(pairs)

    try:
        value = json.loads(line, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # a number of too many digits; brackets within brackets
        reason = str(error)
    else:
        if isinstance(value, dict):
            return value
        raise ArtifactError(f"{where} is no JSON object: {shorten(value)}.", 'Write it as {"column": value}.')
    raise ArtifactError(f"{where} is not JSON: {reason}.", "Write one JSON object a line.")


# --- Parquet and Excel -------------------------------------------------------------------------------------------


def _open_parquet(file: BinaryIO, path: Path, stack: ExitStack) -> tuple[tuple[str, ...], Rows]:
    with needs("train"):
        import pyarrow
        from pyarrow import parquet
    try:
        table = stack.enter_context(parquet.ParquetFile(file, pre_buffer=False))
        columns = tuple(table.schema_arrow.names)
    except (pyarrow.ArrowException, OSError):
        raise ArtifactError(f"{path.name} is no Parquet file.", "Give the file the ending of what it is.") from None
    _check_distinct(columns, path.name)
    return columns, _parquet_rows(table, columns, path, (pyarrow.ArrowException, OSError, UnicodeDecodeError))


def _parquet_rows(
    table: Any, columns: tuple[str, ...], path: Path, damages: tuple[type[Exception], ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            for place in range(batch.num_rows):
                row = {name: _to_python(column[place]) for name, column in zip(columns, batch.columns, strict=True)}
                number += 1
                yield number, row
    except damages as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArtifactError(
            f"{path.name} is damaged at row {number + 1} or after: {reason}.", "Write or copy it again."
        ) from None


def _to_python(scalar: Any) -> Any:
    """The value; as text where Python has nothing that holds it, such as nanoseconds."""
    try:
        return scalar.as_py()
    except ValueError:
        return scalar.cast("string").as_py()


def _open_xlsx(file: BinaryIO, path: Path, stack: ExitStack) -> tuple[tuple[str, ...], Rows]:
    with needs("train"):
        import openpyxl
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of styles, which have no bearing on values
            workbook = openpyxl.load_workbook(file, read_only=True, data_only=True)
        stack.callback(workbook.close)
        sheet = workbook.worksheets[0]
    except Exception:  # zipfile's, the XML parser's, KeyError, ...: openpyxl has no error of its own for this
        raise ArtifactError(f"{path.name} is no Excel workbook.", "Give the file the ending of what it is.") from None
    sheet.reset_dimensions()  # some programs write a size that is less than the sheet's
    records = _sheet_rows(sheet, path)
    first = next(records, None)
    if first is None:
        raise _no_rows(path)
    named = _name_columns(first[1], path)
    rows = ((number, _by_name(cells, named)) for number, cells in records if not all(map(_is_blank, cells)))
    return tuple(named), rows


def _sheet_rows(sheet: Any, path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
    number = 0
    try:
        for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
            yield number, cells
    except Exception as error:  # as when opening it
        raise ArtifactError(f"{path.name} is damaged after row {number}: {error}.", "Save or copy it again.") from None


_READERS: dict[str, Callable[[BinaryIO, Path, ExitStack], tuple[tuple[str, ...], Rows]]] = {
    ".csv": _open_csv,
    ".jsonl": _open_jsonl,
    ".parquet": _open_parquet,
    ".xlsx": _open_xlsx,
}
