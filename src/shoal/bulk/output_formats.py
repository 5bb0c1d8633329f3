"""Output formats of answers: CSV, JSON Lines, Parquet and NumPy.

A format encodes scored rows to bytes, which go to a pipe or a journal, and makes the whole file from a journal.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bulk.scoring import Scored
from shoal.component.spec import TensorSpec
from shoal.errors import ArtifactError, InputError
from shoal.tables import NotUtf8, shorten

ERROR = "error"  # the column that says why a row has no answer


Payloads = Callable[[], Iterator[bytes]]  # all that was encoded, from the beginning


def answered(scored: Scored) -> dict[str, Any]:
    """Return the row's own values, then its answers, or its ``error``."""
    given = {} if isinstance(scored.row, ArtifactError) else scored.row
    return {**given, **({ERROR: scored.answer} if isinstance(scored.answer, str) else scored.answer)}


class JsonLines:
    """JSON Lines: one object per row, no header; other formats derive from it.

    ``columns`` are the input's, where they are known beforehand; ``added`` those of the answers, by their tensors.
    """

    def __init__(self, columns: Sequence[str], added: Mapping[str, TensorSpec]) -> None:
        self._columns = dict.fromkeys(columns)  # as an ordered set
        self._reserved = (*added, ERROR)

    def header(self) -> bytes:
        """Return the bytes before the first row."""
        return b""

    def admit(self, scored: Scored) -> Scored:
        """Return the row, or its error where the format cannot hold its values."""
        taken = [name for name in self._reserved if name in scored.row] if isinstance(scored.row, dict) else []
        return self._refuse(scored, taken[0], "where an answer would go.") if taken else scored

    def encode(self, rows: Sequence[Scored]) -> bytes:
        """Encode the rows, to be appended to those encoded before."""
        return b"".join(dump_json(answered(scored)) for scored in rows)

    def finish(self, payloads: Payloads, path: Path) -> None:
        """Write the whole file, of all that was encoded."""
        with path.open("wb") as file:
            file.writelines(chain([self.header()], payloads()))

    def _refuse(self, scored: Scored, name: str, why: str) -> Scored:
        """Return the row with an error instead of its answer, and without the value that the format cannot hold."""
        assert not isinstance(scored.row, ArtifactError)
        row = {key: value for key, value in scored.row.items() if key not in self._reserved}
        said = f"Row {scored.number} has a column {shorten(name)} ({shorten(scored.row[name])}), {why}"
        return Scored(scored.number, row, said)


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

    def header(self) -> bytes:
        return _csv_lines([[writable(name) for name in (*self._columns, *self._reserved)]])

    def admit(self, scored: Scored) -> Scored:
        others = [name for name in scored.row if name not in self._columns] if isinstance(scored.row, dict) else []
        if others:
            why = "which the first row lacks; CSV cannot hold it, .jsonl can."
            return self._refuse(scored, others[0], why)
        return super().admit(scored)

    def encode(self, rows: Sequence[Scored]) -> bytes:
        names = (*self._columns, *self._reserved)
        return _csv_lines([_csv_cell(row.get(name)) for name in names] for row in map(answered, rows))


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


class Npy(JsonLines):
    """NumPy's array file: the one output of a model, a row per row of the input; rows with an error are NaN.

    Raises:
        InputError: the model has several outputs, or one whose rows cannot be an array.
    """

    def __init__(self, columns: Sequence[str], added: Mapping[str, TensorSpec]) -> None:
        super().__init__(columns, added)
        if len(added) != 1:
            raise InputError(
                f"A .npy file holds one tensor; the model gives {', '.join(added)}.", "Write .jsonl or .parquet."
            )
        [(self._name, self._spec)] = added.items()
        if self._spec.numpy_dtype.kind == "O":
            raise InputError(f"A .npy file holds numbers; {self._name} is text.", "Write .jsonl or .parquet.")

    def encode(self, rows: Sequence[Scored]) -> bytes:
        return b"".join(dump_json({ERROR: s.answer} if isinstance(s.answer, str) else s.answer) for s in rows)

    def finish(self, payloads: Payloads, path: Path) -> None:
        number, missing = 0, ""
        shape: tuple[int, ...] = (1,)
        for line in _lines(payloads):
            number += 1
            missing = missing or line.get(ERROR, "")
            shape = shape if ERROR in line else np.shape(line[self._name]) or (1,)
        if missing and self._spec.numpy_dtype.kind != "f":
            raise InputError(f"A .npy file of integers cannot hold errors: {missing}", "Write .jsonl or .parquet.")
        if not number:
            with path.open("wb") as file:
                np.save(file, np.empty((0, *shape), self._spec.numpy_dtype))
            return
        array: Any = np.lib.format.open_memmap(path, "w+", self._spec.numpy_dtype, (number, *shape))  # type: ignore[no-untyped-call]
        for at, line in enumerate(_lines(payloads)):
            try:
                array[at] = np.nan if ERROR in line else line[self._name]
            except ValueError:
                raise InputError(
                    f"A .npy file cannot hold rows of different shapes: row {at + 1}.", "Write .jsonl or .parquet."
                ) from None
        array.flush()


def _lines(payloads: Payloads) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for payload in payloads() for line in payload.splitlines())
