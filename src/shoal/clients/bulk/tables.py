"""Read rows of data from CSV, JSON Lines, Parquet, Excel and plain text files through one interface.

``scan_table``, ``open_table`` and ``open_stream`` are at the end, after the readers of each kind of file.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar, cast

from shoal.clients.bulk.parquet import open_parquet, parquet_rows
from shoal.clients.bulk.rows import NotUtf8, Row, Rows, RowSource, check_distinct, shorten
from shoal.errors import ArtifactError, needs
from shoal.system.files import open_regular

TEXT = "text"  # the column that holds the lines of a plain text file
_MAX_CELL = _MAX_LINE = 2**24  # characters of a CSV cell, and of a line of JSON Lines or plain text
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}  # of the columns of CSV
_UNCLOSED = ("unexpected end of data", "field larger than field limit")  # messages of `csv` for an unclosed quote
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # surrogates that `surrogateescape` makes of bytes that are not UTF-8

R = TypeVar("R")


class Unnamed(str):
    """Name given to a column that has none in the file."""


@dataclass(frozen=True)
class Table(Generic[R]):
    """An open file: the names of its columns, and its rows, which can be read once.

    ``rows`` yields each row's number and its values by column. The number is the one that a person finds in the file:
    it counts records in CSV and Excel, where the header is number 1, lines in JSON Lines and plain text, and rows in
    Parquet, from 1. Values are strings in CSV; in other files, an empty cell is None.
    """

    source: RowSource
    columns: tuple[str, ...]
    rows: Iterator[tuple[int, R]]
    fraction_read: Callable[[], float | None]  # approximate; None if the size of the input is unknown

    def where(self, number: int) -> str:
        """Name the row with this number, for messages."""
        return self.source.where(number)


class _Opened(NamedTuple):
    """Result of a reader. ``fraction_read`` gives the fraction of rows read, if the file position does not show it."""

    columns: tuple[str, ...]
    rows: Rows
    fraction_read: Callable[[], float] | None = None


def _name_columns(header: Sequence[object], source: RowSource) -> dict[str, int]:
    """Return each column's index in the header, by name. A column without a name is called ``column NUMBER``."""
    names = ["" if name is None else str(name) for name in header]
    given = [name for name in names if name.strip()]
    if not given:
        raise ArtifactError(
            f"{source.name} has no header: its first row is blank.", "Name its columns in the first row."
        )
    named = [name if name.strip() else Unnamed(f"column {place}") for place, name in enumerate(names, start=1)]
    check_distinct(named, source.name)
    return {name: place for place, name in enumerate(named)}


def _no_rows(source: RowSource) -> ArtifactError:
    """Make the error for a file without a header."""
    return ArtifactError(f"{source.name} is empty.", "Name a file with a header and rows.")


def _by_name(cells: Sequence[Any], named: dict[str, int]) -> dict[str, Any]:
    """Return a row's values by column name; None for columns beyond the end of a short row."""
    return {name: cells[place] if place < len(cells) else None for name, place in named.items()}


# --- text in UTF-8 --------------------------------------------------------------------------------------------------


def _open_text(file: BinaryIO, stack: ExitStack, newline: str, encoding: str = "utf-8-sig") -> TextIOWrapper:
    """Open UTF-8 text. Bytes that are not UTF-8 become surrogates, of which the row readers make ``NotUtf8`` cells."""
    return stack.enter_context(TextIOWrapper(file, encoding, errors="surrogateescape", newline=newline))


def _read_lines(file: BinaryIO, source: RowSource, stack: ExitStack) -> Iterator[tuple[int, str | ArtifactError]]:
    """Yield numbered lines; one that is too long for memory is an error. Only "\\n" ends a line."""
    text = _open_text(file, stack, newline="\n", encoding="utf-8" if source.offset else "utf-8-sig")
    number = 0
    while line := text.readline(_MAX_LINE):
        number += 1
        if len(line) == _MAX_LINE and line[-1] != "\n":
            rest = "?"
            while rest and rest[-1] != "\n":
                rest = text.readline(_MAX_LINE)
            said = f"{source.where(number)} has more than {_MAX_LINE:,} characters."
            yield number, ArtifactError(said, "Divide it into several lines.")
        else:
            yield number, line


def _check_utf8(text: str, where: str) -> None:
    """Check that text decoded with ``surrogateescape`` was UTF-8.

    Raises:
        ArtifactError: the text was not UTF-8.
    """
    if found := _NOT_UTF8.search(text):
        byte = ord(found.group()) - 0xDC00
        raise ArtifactError(f"{where} is not UTF-8: it has the byte 0x{byte:02x}.", "Save the file as UTF-8.")


def as_cell(text: str) -> str | NotUtf8:
    """Convert a cell decoded with ``surrogateescape``: text, or the original bytes where they are not UTF-8."""
    return NotUtf8(text.encode("utf-8", "surrogateescape")) if _NOT_UTF8.search(text) else text


# --- CSV ------------------------------------------------------------------------------------------------------------


def open_csv(file: BinaryIO, source: RowSource, stack: ExitStack) -> _Opened:
    """Open the columns and rows of CSV; a row with wrong quotes or too many fields becomes an error.

    A quote that is never closed ends the reading, because it makes one cell of everything after it.
    """
    csv.field_size_limit(_MAX_CELL)  # of the whole process; the default refuses texts of more than 128 KiB
    lines = _open_text(file, stack, newline="")
    start = next(lines, "")
    separator = _find_separator(start, source)
    records = _records(chain([start] if start else [], lines), source, separator)
    first = next(records, None)
    if first is None:
        raise _no_rows(source)
    header = first[1]
    if isinstance(header, ArtifactError):
        raise header
    _check_utf8("".join(header), source.where(1))
    named = _name_columns(header, source)
    return _Opened(tuple(named), _csv_rows(records, named, len(header), source, _SEPARATORS[separator]))


def _find_separator(header: str, source: RowSource) -> str:
    """Return what separates the columns of a header, outside of its quotes: commas, or else tabs, or semicolons."""
    if source.name.lower().endswith(".tsv"):
        return "\t"
    bare = re.sub(r'"[^"]*"?', "", header)
    if "|" in bare and not set(bare) & set(_SEPARATORS):
        said = f"{source.name} has {shorten(header.strip())} as its header: | separates no columns."
        raise ArtifactError(said, f"Separate them by {' or '.join(_SEPARATORS.values())}; or quote the name.")
    return next((each for each in _SEPARATORS if each in bare), ",")


def _records(
    lines: Iterable[str], source: RowSource, separator: str
) -> Iterator[tuple[int, list[str] | ArtifactError]]:
    reader, number = csv.reader(lines, delimiter=separator, strict=True), 0
    while True:
        number += 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            said = f"{source.where(number)} is not CSV: {error}."
            if str(error).startswith(_UNCLOSED):  # all rows after it were read as one cell
                raise ArtifactError(said, "A quote is opened and never closed: close it, or double it.") from None
            yield number, ArtifactError(said, "Quote texts that have quotes, and double those.")
        else:
            yield number, cells


def _csv_rows(
    records: Iterator[tuple[int, list[str] | ArtifactError]],
    named: dict[str, int],
    width: int,
    source: RowSource,
    separators: str,
) -> Rows:
    for number, cells in records:
        if isinstance(cells, ArtifactError):
            yield number, cells
        elif len(cells) > width:
            where = source.where(number)
            said = f"{where} has {len(cells)} fields, the header {width}."
            yield number, ArtifactError(said, f"Quote texts that have {separators}.")
        elif cells:
            # One check of the whole row: checking each cell costs as much as parsing it.
            is_clean = all(map(str.isascii, cells)) or not _NOT_UTF8.search("".join(cells))
            yield number, _by_name(cells if is_clean else list(map(as_cell, cells)), named)


# --- JSON Lines and plain text --------------------------------------------------------------------------------------


def _open_jsonl(file: BinaryIO, source: RowSource, stack: ExitStack) -> _Opened:
    """Open the columns of the first object, and the rows; a row is an error where its line is not a JSON object.

    The first line must be an object: the columns of CSV output are taken from it.
    """
    rows = json_rows(file, source, stack)
    first = next(rows, None)
    if first is None:
        raise _no_rows(source)
    if isinstance(first[1], ArtifactError):
        raise first[1]
    return _Opened(tuple(first[1]), chain([first], rows))


def json_rows(file: BinaryIO, source: RowSource, stack: ExitStack) -> Rows:
    """Yield the rows of JSON Lines; a row is an error where its line is not a JSON object."""
    for number, line in _read_lines(file, source, stack):  # within JSON, "\r" is whitespace
        if isinstance(line, ArtifactError):
            yield number, line
        elif line.strip():
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
        _check_utf8(line, where)
        reason = f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:  # a number of too many digits; brackets within brackets
        reason = str(error)
    else:
        if isinstance(value, dict):
            return value
        raise ArtifactError(f"{where} is not a JSON object: {shorten(value)}.", 'Write it as {"column": value}.')
    raise ArtifactError(f"{where} is not JSON: {reason}.", "Write one JSON object per line.")


def _open_lines(file: BinaryIO, source: RowSource, stack: ExitStack) -> _Opened:
    """Open a file with one text per line."""
    return _Opened((TEXT,), text_rows(file, source, stack))


def text_rows(file: BinaryIO, source: RowSource, stack: ExitStack) -> Rows:
    """Yield one text per line. A blank line is an empty text; U+2028 and the like do not end a line."""
    for number, line in _read_lines(file, source, stack):
        yield number, {TEXT: as_cell(line.rstrip("\n").rstrip("\r"))} if isinstance(line, str) else line


# --- Parquet and Excel ----------------------------------------------------------------------------------------------


def _open_parquet(file: BinaryIO, source: RowSource, stack: ExitStack) -> _Opened:
    """Open the columns and rows of a Parquet file, in batches."""
    table = open_parquet(file, source.name, stack)
    read = 0

    def rows() -> Rows:
        nonlocal read
        for number, row in parquet_rows(table, source):
            read = number
            yield number, row

    return _Opened(tuple(table.schema_arrow.names), rows(), lambda: read / max(1, table.metadata.num_rows))


def _open_xlsx(file: BinaryIO, source: RowSource, stack: ExitStack) -> _Opened:
    """Open the columns and rows of a workbook's first sheet."""
    with needs("files"):
        import openpyxl
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about styles, which do not affect values
            workbook = openpyxl.load_workbook(file, read_only=True, data_only=True)
        stack.callback(workbook.close)
        sheet = workbook.worksheets[0]
    except Exception:  # zipfile's, the XML parser's, KeyError, ...: openpyxl has no error of its own for this
        raise ArtifactError(
            f"{source.name} is not an Excel workbook.", "Give the file the ending of what it is."
        ) from None
    sheet.reset_dimensions()  # some programs write a size that is less than the sheet's
    records = _sheet_rows(sheet, source)
    first = next(records, None)
    if first is None:
        raise _no_rows(source)
    named = _name_columns(first[1], source)
    return _Opened(tuple(named), ((number, _by_name(cells, named)) for number, cells in records))


def _sheet_rows(sheet: Any, source: RowSource) -> Iterator[tuple[int, Sequence[Any]]]:
    number = 0
    try:
        for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
            yield number, cells
    except Exception as error:  # of any type, as above
        raise ArtifactError(
            f"{source.name} is damaged after row {number}: {error}.", "Save or copy it again."
        ) from None


# --- opening --------------------------------------------------------------------------------------------------------


_Reader = Callable[[BinaryIO, RowSource, ExitStack], _Opened]
_READERS: dict[str, _Reader] = {
    ".csv": open_csv,
    ".jsonl": _open_jsonl,
    ".parquet": _open_parquet,
    ".xlsx": _open_xlsx,
    ".txt": _open_lines,
}
KINDS = tuple(_READERS)
STREAM_KINDS = (".txt", ".jsonl", ".csv")


@contextmanager
def scan_table(path: Path) -> Iterator[Table[Row]]:
    """Open the table in ``path``, according to its file ending; rows are read as they are iterated.

    * ``.csv``: UTF-8 with or without a byte-order mark; commas, or tabs or semicolons if its header has no commas;
      quotes doubled within quotes. Missing last fields are None. Blank lines are skipped. A column without a name is
      called by its number: ``column 1``.
    * ``.tsv``: the same, with tabs.
    * ``.jsonl``: one object per line. ``columns`` are the keys of the first object; other objects may have more or
      fewer.
    * ``.parquet``: values of any type, as Python objects.
    * ``.xlsx``: the first sheet, its columns named as in CSV. A formula gives its last computed value, or None.
    * ``.txt``: one text per line, in a column ``text``.

    A row that cannot be read is an ArtifactError in place of its values; a cell that is not UTF-8 is ``NotUtf8``.

    Raises:
        ArtifactError: the file cannot be read, or is not what its ending says. ``rows`` raises it too, if neither the
            row nor anything after it can be read.
        SetupError: the library for Parquet or Excel is not installed.
    """
    with ExitStack() as stack:
        with explained(path):
            file = stack.enter_context(open_regular(path))
            kind = path.suffix.lower()
            source = RowSource(path.name, ".csv" if kind == ".tsv" else kind)
            read = _READERS.get(source.kind)
            if read is None:
                is_array = source.kind in (".npy", ".json")
                fix = f"Give it as an input's value: NAME=@{path}" if is_array else "Save it as one of these."
                if source.kind == ".json" and re.match(rb"\s*\[\s*\{", file.read(1024)):
                    names = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".jsonl")))
                    fix = f"Write one object per line: jq -c '.[]' {names[0]} > {names[1]}"
                fix = explain_image(path) or fix
                raise ArtifactError(f"{path.name} is not one of {', '.join(_READERS)}.", fix)
            opened = read(file, source, stack)
        fraction = opened.fraction_read or _fraction_read(file, path.stat().st_size)
        yield Table(source, opened.columns, _explain_rows(opened.rows, path), fraction)


def explain_image(path: Path) -> str:
    """Return how to make an array of an image; empty if a file is none, by its ending."""
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"):
        return ""
    array = path.with_suffix(".npy")
    made = f"numpy.save('{array}', numpy.asarray(PIL.Image.open('{path}').convert('RGB'), 'float32') / 255)"
    return f"Make an array of it, in the model's shape, such as {made}, and give it: NAME=@{array}"


@contextmanager
def open_table(path: Path) -> Iterator[Table[dict[str, Any]]]:
    """Open a table like ``scan_table``; ``rows`` raises at the first row that cannot be read or is not UTF-8.

    In CSV and Excel, columns without a name and rows without a value are left out.
    """
    with scan_table(path) as table:
        columns = tuple(name for name in table.columns if not isinstance(name, Unnamed))
        yield Table(table.source, columns, _demand(table, columns), table.fraction_read)


@contextmanager
def open_stream(stream: BinaryIO, kind: str) -> Iterator[Table[Row]]:
    """Open a table like ``scan_table``, from a pipe.

    Without ``kind``, it is JSON Lines if it begins with ``{``, else CSV.

    Raises:
        ArtifactError: ``kind`` cannot be read from a pipe.
    """
    if not kind:
        ahead = stream if isinstance(stream, BufferedReader) else BufferedReader(cast("Any", stream))
        stream, kind = ahead, ".jsonl" if ahead.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" else ".csv"
    if kind not in STREAM_KINDS:
        raise ArtifactError(f"{kind} cannot be read from standard input.", f"Known: {', '.join(STREAM_KINDS)}.")
    source = RowSource("standard input", kind)
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
                _check_utf8(value.decode("utf-8", "surrogateescape"), table.where(number))
        if not (are_blanks_skipped and all(map(_is_blank, row.values()))):
            yield number, row


def _is_blank(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _explain_rows(rows: Rows, path: Path) -> Rows:
    with explained(path):
        yield from rows


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Turn an error of the operating system while ``path`` is read into an ``ArtifactError``."""
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"There is no file {path}.", "Check the file's name.") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path} is a folder.", f"Name a file in it: {', '.join(_READERS)}.") from None
    except OSError as error:
        reason = error.strerror or error
        raise ArtifactError(f"{path} cannot be read: {reason}.", "Copy it to where you can read it.") from None
