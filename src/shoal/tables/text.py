"""Readers of CSV, JSON Lines and plain text: UTF-8, with or without a byte-order mark."""

from __future__ import annotations

import csv
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import TextIOWrapper
from itertools import chain
from typing import Any, BinaryIO

from shoal.errors import ArtifactError
from shoal.tables.common import (
    NotUtf8,
    Opened,
    Row,
    Rows,
    Source,
    by_name,
    check_distinct,
    name_columns,
    no_rows,
    shorten,
)

TEXT = "text"  # the column that holds a plain text's lines
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of a byte that is not UTF-8
_MAX_CELL = 2**24  # characters of a CSV cell; a quote that is never closed takes all to the end of the file
_UNCLOSED = ("unexpected end of data", "field larger than field limit")
_LOOK_AHEAD = 100  # rows: a file of which none of the first can be read is not what its name says


def _open_text(file: BinaryIO, stack: ExitStack, newline: str) -> TextIOWrapper:
    """Open lines of UTF-8. Other bytes become surrogates: only the row readers know which cell they are in."""
    return stack.enter_context(TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline=newline))


def check_utf8(text: str, where: str) -> None:
    """Check that text decoded with ``surrogateescape`` was UTF-8.

    Raises:
        ArtifactError: it was not.
    """
    if found := _NOT_UTF8.search(text):
        byte = ord(found.group()) - 0xDC00
        raise ArtifactError(f"{where} is not UTF-8: it has the byte 0x{byte:02x}.", "Save the file as UTF-8.")


def as_cell(text: str) -> str | NotUtf8:
    """Convert a cell decoded with ``surrogateescape``: text, or the original bytes where they are not UTF-8."""
    return NotUtf8(text.encode("utf-8", "surrogateescape")) if _NOT_UTF8.search(text) else text


def open_csv(file: BinaryIO, source: Source, stack: ExitStack) -> Opened:
    """Open the columns and rows of CSV; a row with wrong quotes or a wrong number of fields becomes an error."""
    csv.field_size_limit(_MAX_CELL)  # of the whole process; the default refuses texts of more than 128 KiB
    records = _records(_Lines(_open_text(file, stack, newline="")), source)
    first = next(records, None)
    if first is None:
        raise no_rows(source)
    header = first[1]
    if isinstance(header, ArtifactError):
        raise header
    check_utf8("".join(header), source.where(1))
    named = name_columns(header, source)
    return Opened(tuple(named), _csv_rows(records, named, len(header), source))


class _Lines:
    """Iterator of lines for ``csv.reader`` that can return the lines of the current record to the input."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self._back = iter(lines), deque[str]()
        self.taken: list[str] = []  # since the record began

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._back.popleft() if self._back else next(self._lines)
        self.taken.append(line)
        return line

    def take_back(self) -> None:
        """Return all but the record's first line to the input."""
        self._back.extendleft(reversed(self.taken[1:]))


def _records(lines: _Lines, source: Source) -> Iterator[tuple[int, list[str] | ArtifactError]]:
    reader, number = csv.reader(lines, strict=True), 0
    while True:
        number += 1
        lines.taken.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            where, fix = source.where(number), "Quote texts that have quotes, and double those."
            yield number, ArtifactError(f"{where} is not CSV: {error}.", fix)
            if str(error).startswith(_UNCLOSED):
                lines.take_back()  # an unclosed quote must not cost the rows after it
                reader = csv.reader(lines, strict=True)
        else:
            yield number, cells


def _csv_rows(
    records: Iterator[tuple[int, list[str] | ArtifactError]], named: dict[str, int], width: int, source: Source
) -> Rows:
    for number, cells in records:
        if isinstance(cells, ArtifactError):
            yield number, cells
        elif len(cells) > width:
            where = source.where(number)
            said = f"{where} has {len(cells)} fields, the header {width}."
            yield number, ArtifactError(said, "Quote texts that have commas.")
        elif cells:
            # One check of the whole row: checking each cell costs as much as parsing it.
            is_clean = all(map(str.isascii, cells)) or not _NOT_UTF8.search("".join(cells))
            yield number, by_name(cells if is_clean else list(map(as_cell, cells)), named)


def open_jsonl(file: BinaryIO, source: Source, stack: ExitStack) -> Opened:
    """Open the columns of the first object, and the rows; a row is an error where its line is not a JSON object."""
    # Only "\n" ends a line: within JSON, "\r" is whitespace.
    rows = _jsonl_rows(_open_text(file, stack, newline="\n"), source)
    seen: list[tuple[int, Row]] = []
    for number, row in rows:
        seen.append((number, row))
        if not isinstance(row, ArtifactError):
            return Opened(tuple(row), chain(seen, rows))
        if len(seen) == _LOOK_AHEAD:
            break
    for _, row in seen:
        assert isinstance(row, ArtifactError)
        raise row
    raise no_rows(source)


def _jsonl_rows(lines: Iterable[str], source: Source) -> Rows:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row: Row = _read_object(line, source.where(number))
            except ArtifactError as error:
                row = error
            yield number, row


def _read_object(line: str, where: str) -> dict[str, Any]:
    row = _parse_object(line, where)
    if not line.isascii() and _NOT_UTF8.search(line):
        return {name: as_cell(value) if isinstance(value, str) else value for name, value in row.items()}
    return row


def _parse_object(line: str, where: str) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            check_distinct((name for name, _ in pairs), where)
        return row

    try:
        value = json.loads(line, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        check_utf8(line, where)
        reason = f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # a number of too many digits; brackets within brackets
        reason = str(error)
    else:
        if isinstance(value, dict):
            return value
        raise ArtifactError(f"{where} is not a JSON object: {shorten(value)}.", 'Write it as {"column": value}.')
    raise ArtifactError(f"{where} is not JSON: {reason}.", "Write one JSON object per line.")


def open_lines(file: BinaryIO, source: Source, stack: ExitStack) -> Opened:
    """Open one text per line, blank ones too; U+2028 and similar characters do not end a line."""
    del source
    lines = _open_text(file, stack, newline="\n")
    rows = ((number, {TEXT: as_cell(line.rstrip("\n").rstrip("\r"))}) for number, line in enumerate(lines, start=1))
    return Opened((TEXT,), rows)
