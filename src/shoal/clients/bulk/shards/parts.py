"""Parts of input files: row groups of Parquet, the lines that begin within a range of bytes, and whole CSV files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shoal.clients.bulk.parquet import open_parquet, parquet_rows
from shoal.clients.bulk.rows import Row, Rows, RowSource
from shoal.clients.bulk.shards.folders import open_input
from shoal.clients.bulk.tables import Table, explained, json_rows, open_csv, text_rows
from shoal.errors import ArtifactError

_END_BYTES = 65_536  # at the end of a file that is not Parquet, which its digest covers
_CHUNK = 2**20


class FilePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a file of ``size`` bytes; ``digest`` is the SHA-256 of the file's end, of Parquet its footer.

    ``begin`` and ``end`` are row groups of Parquet, or bytes of JSON Lines and plain text. A line belongs to the part
    in which its first byte lies, so any two bytes divide a file into parts with all its lines once.
    """

    file: str
    size: int
    digest: str
    begin: int
    end: int


def digest_end(file: BinaryIO, size: int, kind: str) -> str:
    """Return the SHA-256 of a file's end: of the footer of Parquet, else of the last 65,536 bytes."""
    length = _END_BYTES
    if kind == ".parquet" and size >= 8:
        file.seek(size - 8)
        footer, mark = int.from_bytes(file.read(4), "little") + 8, file.read(4)
        if mark == b"PAR1" and footer <= size:
            length = footer
    file.seek(max(0, size - length))
    return hashlib.sha256(file.read(length)).hexdigest()


def open_parts(parts: Sequence[FilePart], kind: str, columns: tuple[str, ...]) -> Table[Row]:
    """Return a table of the rows of these parts, one after another.

    ``rows`` raises an ArtifactError if a file is missing or damaged, or has changed since the plan.
    """
    name = Path(parts[0].file).name if parts else "no file"
    rows = (row for part in parts for row in _read(part, kind))
    return Table(RowSource(name, kind), columns, rows, lambda: None)


def open_part(part: FilePart, kind: str, stack: ExitStack) -> BinaryIO:
    """Open the file of a part.

    Raises:
        ArtifactError: the file has changed since the plan.
    """
    file = stack.enter_context(open_input(part.file))
    size = file.seek(0, io.SEEK_END)
    if size != part.size:
        said = f"{part.file} changed since the plan: it had {part.size:,} bytes, and has {size:,}."
    elif digest_end(file, size, kind) != part.digest:
        said = f"{part.file} changed since the plan: its last bytes differ."
    else:
        file.seek(0)
        return file
    raise ArtifactError(said, "Start over: --fresh")


def _read(part: FilePart, kind: str) -> Rows:
    with ExitStack() as stack, explained(part.file):
        file = open_part(part, kind, stack)
        if kind == ".parquet":
            table = open_parquet(file, part.file, stack)
            yield from parquet_rows(table, RowSource(part.file, kind), range(part.begin, part.end))
        elif kind == ".csv":
            yield from open_csv(file, RowSource(part.file, kind), stack).rows
        else:
            begin = _find_line(file, part.begin)
            section = io.BufferedReader(_Section(file, begin, _find_line(file, part.end) - begin), _CHUNK)
            read = json_rows if kind == ".jsonl" else text_rows
            yield from read(section, RowSource(part.file, kind, begin), stack)
    with ExitStack() as stack, explained(part.file):  # did it change meanwhile?
        open_part(part, kind, stack)


def _find_line(file: BinaryIO, at: int) -> int:
    """Return where the first line begins at this byte or after it; the file's size if none does."""
    if at <= 0:
        return 0
    at = file.seek(at - 1)  # a line begins at a byte if the one before it ends a line
    while chunk := file.read(_CHUNK):
        found = chunk.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(chunk)
    return at


class _Section(io.RawIOBase):
    """Bytes of an open file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        file.seek(begin)
        self._file, self._left = file, length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        chunk = self._file.read(min(len(view), self._left))
        if not chunk and self._left and len(view):
            raise OSError("it became shorter while it was read")
        view[: len(chunk)] = chunk
        self._left -= len(chunk)
        return len(chunk)


def open_groups(part: FilePart, stack: ExitStack) -> tuple[BinaryIO, range]:
    """Open the row groups of a part, for ``ParquetOrigin``."""
    return open_part(part, ".parquet", stack), range(part.begin, part.end)
