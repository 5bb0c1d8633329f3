"""Parquet output: with the types of the Parquet file that the rows came from, or with types found in the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.bulk.output_formats import ERROR, JsonLines, Payloads, as_text, dump_json, writable
from shoal.bulk.scoring import Scored
from shoal.component.spec import STRING, TensorSpec
from shoal.errors import ArtifactError, needs
from shoal.tables.binary import BUFFER

_GROUP_ROWS = 4096  # rows per row group, which are in memory together
_EXACT = 2**53  # FP64 holds all whole numbers up to this one


class Parquet(JsonLines):
    """Parquet with the rows' columns, the answers', and ``error``, null where a row has an answer.

    Rows of ``origin``, a Parquet file, keep their types: it is read again when the answers are complete. Others get
    INT64, FP64, booleans and strings, whichever holds all that a column has; objects and lists as JSON.
    """

    def __init__(self, columns: Sequence[str], added: Mapping[str, TensorSpec], origin: Path | None) -> None:
        super().__init__(columns, added)
        with needs("files"):
            import pyarrow
        self._arrow, self._origin = pyarrow, origin
        self._added = [pyarrow.field(name, _type(pyarrow, spec)) for name, spec in added.items()]
        self._added.append(pyarrow.field(ERROR, pyarrow.string()))

    def encode(self, rows: Sequence[Scored]) -> bytes:
        """Encode as JSON Lines, since Parquet cannot be appended to; the answers alone if ``origin`` has the rows."""
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
            self._arrow.field(writable(name), getattr(self._arrow, _arrow_name(seen))())
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

    def _of_file(self, payloads: Payloads, origin: Path) -> tuple[Any, Iterator[Any]]:
        from pyarrow import parquet

        schema = parquet.read_schema(origin)
        for field in self._added:
            schema = schema.append(field)

        def groups() -> Iterator[Any]:
            answers = _lines(payloads)
            with parquet.ParquetFile(origin, pre_buffer=False, buffer_size=BUFFER) as file:
                for batch in file.iter_batches(batch_size=_GROUP_ROWS, use_threads=False):
                    rows = list(islice(answers, batch.num_rows))
                    if len(rows) < batch.num_rows:
                        raise ArtifactError(f"{origin.name} changed while it was read.", "Start over: --fresh")
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
    named = {writable(name): value for name, value in row.items()}
    return {name: _as_string(value) if name in texts else value for name, value in named.items()}


def _as_string(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return writable(value)
    return writable(json.dumps(value, ensure_ascii=False, default=as_text))
