"""Output formats of answers: CSV, JSON Lines, Parquet and NumPy.

A format encodes scored rows to bytes, which go to a pipe or to the journal of a run, and writes the output file from
the journal.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shoal.clients.bulk.parquet import ParquetOrigin
from shoal.clients.bulk.rows import NotUtf8, Row, shorten
from shoal.clients.bulk.scoring import ERROR, Scored, answered
from shoal.clients.bulk.tables import Table
from shoal.clients.client.calls import name_columns
from shoal.errors import ArtifactError, InputError, needs
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec

OUTPUT_KINDS = (".csv", ".jsonl", ".parquet", ".npy")

Payloads = Callable[[], Iterator[bytes]]  # yields everything that was encoded, from the beginning


def make_format(
    kind: str,
    table: Table[Row],
    model: ModelSpec,
    origin: ParquetOrigin | None = None,
    *,
    has_all_columns: bool = False,
) -> JsonLines:
    """Return the format for a file ending, ``kind``, with the columns of the table and of the model's answers.

    ``origin`` are the Parquet rows that the table is read from; it is not used for a table of another kind.
    ``has_all_columns`` is for several CSV files with one header: it has the outputs that no answer has, too.

    Raises:
        InputError: the kind is unknown, or a column of the table has the name of an answer's column.
        SetupError: the library for Parquet is not installed.
    """
    columns = name_columns(model)
    added = {columns[spec.name]: spec for spec in model.outputs}
    taken = [name for name in (*added, ERROR) if name in table.columns]
    if taken:
        where = table.source.name
        raise InputError(f"{where} has a column {taken[0]!r}, where an answer would go.", "Rename that column.")
    if ERROR in added:
        raise InputError(f"The model gives an output {ERROR!r}, where errors go.", "Use shoal.Client for this model.")
    if kind == ".csv":
        return Csv(table.columns, added, has_all_columns=has_all_columns)
    if kind == ".jsonl":
        return JsonLines(table.columns, added)
    if kind == ".parquet":
        return Parquet(table.columns, added, origin if table.source.kind == ".parquet" else None)
    if kind == ".npy":
        return Npy(table.columns, added)
    raise InputError(f"Answers cannot be written as {kind!r}.", f"Known: {', '.join(OUTPUT_KINDS)}.")


class JsonLines:
    """JSON Lines, with one object per row and no header; base class of the other formats.

    ``columns`` are the columns of the input rows, if they are known before the first row. ``added`` maps the columns of
    the answers to their tensors.
    """

    def __init__(self, columns: Sequence[str], added: Mapping[str, TensorSpec]) -> None:
        self._columns = dict.fromkeys(columns)  # as an ordered set
        self._reserved = (*added, ERROR)

    def header(self) -> bytes:
        """Return what an output without rows contains."""
        return b""

    def resume(self, payload: bytes) -> None:
        """Go on after earlier rows, the first of which were encoded as ``payload``."""

    def admit(self, scored: Scored) -> Scored:
        """Return ``scored``, with an error instead of the answer if the format cannot hold the row's values."""
        taken = [name for name in self._reserved if name in scored.row] if isinstance(scored.row, dict) else []
        return self._refuse(scored, taken[0], "where an answer would go.") if taken else scored

    def encode(self, rows: Sequence[Scored]) -> bytes:
        """Encode the rows as bytes that are appended to the bytes of earlier rows."""
        return b"".join(dump_json(answered(scored)) for scored in rows)

    def finish(self, payloads: Payloads, path: Path) -> None:
        """Write the file ``path`` from the payloads, which are everything that was encoded."""
        with path.open("wb") as file:
            file.writelines(payloads())
            if not file.tell():
                file.write(self.header())

    def _refuse(self, scored: Scored, name: str, why: str) -> Scored:
        """Return the row with an error instead of its answer, and without columns named like an answer's column."""
        assert not isinstance(scored.row, ArtifactError)
        row = {key: value for key, value in scored.row.items() if key not in self._reserved}
        value = shorten({**answered(scored), **scored.row}[name])
        said = f"Row {scored.number} has a column {shorten(name)} ({value}), {why}"
        return Scored(scored.number, row, said)


def dump_json(row: Mapping[str, Any]) -> bytes:
    """Encode a row as one line of JSON; values of types that JSON lacks become text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can write
        return json.dumps(row, default=_as_text).encode() + b"\n"


def _as_text(value: object) -> str:
    """Convert a value that JSON cannot hold to text: bytes with escapes where they are not UTF-8, times in ISO 8601."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    isoformat = getattr(value, "isoformat", None)
    return str(isoformat() if isoformat else value)


class Csv(JsonLines):
    """CSV: commas, quotes doubled within quotes, ``\\n`` at the ends of lines.

    The header has the columns of the first row, then those of the answers to the first rows, then ``error``. Bytes of
    the input that are not UTF-8 are written unchanged.
    """

    def __init__(
        self, columns: Sequence[str], added: Mapping[str, TensorSpec], *, has_all_columns: bool = False
    ) -> None:
        super().__init__(columns, added)
        self._has_all_columns = has_all_columns
        self._kept, self._has_begun = self._reserved, False  # answers' columns that are written, and whether rows are

    def header(self) -> bytes:
        return _csv_lines([[_writable(name) for name in (*self._columns, *self._kept)]])

    def resume(self, payload: bytes) -> None:
        names = next(csv.reader(StringIO(payload.decode("utf-8", "surrogateescape"), newline="")))
        self._kept, self._has_begun = tuple(name for name in self._reserved if _writable(name) in names), True

    def admit(self, scored: Scored) -> Scored:
        others = [name for name in scored.row if name not in self._columns] if isinstance(scored.row, dict) else []
        if others:
            why = "which the first row lacks; CSV cannot hold it, .jsonl can."
            return self._refuse(scored, others[0], why)
        late = [] if isinstance(scored.answer, str) else [name for name in scored.answer if name not in self._kept]
        if late:
            why = "which the answers to the first rows lack; CSV cannot hold it, .jsonl can."
            return self._refuse(scored, late[0], why)
        return super().admit(scored)

    def encode(self, rows: Sequence[Scored]) -> bytes:
        head = b""
        if not self._has_begun:
            given = {name for scored in rows if not isinstance(scored.answer, str) for name in scored.answer} | {ERROR}
            if not self._has_all_columns:
                self._kept = tuple(name for name in self._reserved if name in given or given == {ERROR})
            head, self._has_begun = self.header(), True
        names = (*self._columns, *self._kept)
        return head + _csv_lines([_csv_cell(row.get(name)) for name in names] for row in map(answered, rows))


class _Lines(list[str]):
    """File-like list for ``csv.writer`` that ends lines with ``\\n``.

    The writer itself ends them with ``\\r\\n``, because only then does it quote a cell with a bare carriage return.
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
        return _writable(value)
    if value is None:
        return ""
    if isinstance(value, bool | dict | list):
        return _writable(json.dumps(value, ensure_ascii=False, default=_as_text))
    return _as_text(value)


def _writable(text: str) -> str:
    """Escape lone surrogates in ``text``, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class Npy(JsonLines):
    """NumPy array file with the only output of a model, one row per input row; rows with an error are NaN.

    Raises:
        InputError: the model has several outputs, or its output is text.
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


# --- Parquet -----------------------------------------------------------------------------------------------------

_GROUP_ROWS = 4096  # rows per row group, which are in memory together
_EXACT = 2**53  # FP64 holds all whole numbers up to this one


class Parquet(JsonLines):
    """Parquet with the columns of the rows, the columns of the answers, and ``error``, which is null for answered rows.

    If the rows come from a Parquet file, ``origin``, this file is read again when all answers are there, and its
    columns keep their types. Otherwise each column becomes INT64, FP64, boolean or string, whichever holds all its
    values; objects and lists become strings of JSON.
    """

    def __init__(self, columns: Sequence[str], added: Mapping[str, TensorSpec], origin: ParquetOrigin | None) -> None:
        super().__init__(columns, added)
        with needs("files"):
            import pyarrow
        self._arrow, self._origin = pyarrow, origin
        self._added = [pyarrow.field(name, _type(pyarrow, spec)) for name, spec in added.items()]
        self._added.append(pyarrow.field(ERROR, pyarrow.string()))

    def encode(self, rows: Sequence[Scored]) -> bytes:
        """Encode rows for the journal as JSON Lines, because Parquet files cannot be appended to.

        If the rows come from ``origin``, only the answers are encoded, because the rows can be read again from
        ``origin``.
        """
        if self._origin is None:
            return super().encode(rows)
        return b"".join(dump_json({ERROR: s.answer} if isinstance(s.answer, str) else s.answer) for s in rows)

    def finish(self, payloads: Payloads, path: Path) -> None:
        from pyarrow import parquet

        schema, groups = self._of_rows(payloads) if self._origin is None else self._of_file(payloads, self._origin)
        with parquet.ParquetWriter(path, schema) as writer:
            for group in groups:
                writer.write_table(group)

    def _of_rows(self, payloads: Payloads) -> tuple[Any, Iterator[Any]]:
        kinds = _find_kinds(name_value for row in _lines(payloads) for name_value in row.items())
        fields = [
            self._arrow.field(_writable(name), getattr(self._arrow, _arrow_name(seen))())
            for name, seen in kinds.items()
            if name not in self._reserved
        ]
        schema = self._arrow.schema([*fields, *self._added])
        texts = {field.name for field in fields if field.type == self._arrow.string()}

        def groups() -> Iterator[Any]:
            rows = _lines(payloads)
            while group := [_with_texts(row, texts) for row in islice(rows, _GROUP_ROWS)]:
                yield self._arrow.Table.from_pylist(group, schema)

        return schema, groups()

    def _of_file(self, payloads: Payloads, origin: ParquetOrigin) -> tuple[Any, Iterator[Any]]:
        schema = origin.schema()
        for field in self._added:
            schema = schema.append(field)

        def groups() -> Iterator[Any]:
            answers = _lines(payloads)
            for batch in origin.batches(_GROUP_ROWS):
                rows = list(islice(answers, batch.num_rows))
                if len(rows) < batch.num_rows:
                    raise ArtifactError("The input changed while it was read.", "Start over: --fresh")
                added = [self._arrow.array([row.get(f.name) for row in rows], f.type) for f in self._added]
                yield self._arrow.Table.from_arrays([*batch.columns, *added], schema=schema)

        return schema, groups()


def _type(arrow: Any, spec: TensorSpec) -> Any:
    kind = arrow.string() if spec.dtype == STRING else arrow.from_numpy_dtype(spec.numpy_dtype)
    for _ in () if spec.dims == (1,) else spec.dims:
        kind = arrow.list_(kind)
    return kind


def _lines(payloads: Payloads) -> Iterator[dict[str, Any]]:
    for payload in payloads():
        for line in payload.splitlines():
            yield json.loads(line)


def _find_kinds(values: Iterator[tuple[str, Any]]) -> dict[str, set[str]]:
    """Collect the kinds of values in each column, in the order in which columns appear."""
    kinds: dict[str, set[str]] = {}
    for name, value in values:
        seen = kinds.setdefault(name, set())
        if value is not None:
            seen.add(_kind(value))
    return kinds


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "exact" if abs(value) <= _EXACT else "long" if -(2**63) <= value < 2**63 else "text"
    return "float" if isinstance(value, float) else "text"


def _arrow_name(seen: set[str]) -> str:
    if seen == {"bool"}:
        return "bool_"
    if seen and seen <= {"exact", "long"}:
        return "int64"
    return "float64" if seen and seen <= {"exact", "float"} else "string"


def _with_texts(row: Mapping[str, Any], texts: set[str]) -> dict[str, Any]:
    named = {_writable(name): value for name, value in row.items()}
    return {name: _as_string(value) if name in texts else value for name, value in named.items()}


def _as_string(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _writable(value)
    return _writable(json.dumps(value, ensure_ascii=False, default=_as_text))
