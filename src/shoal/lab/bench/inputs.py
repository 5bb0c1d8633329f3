"""Rows that a benchmark sends in requests: real rows, from a file or a corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shoal.clients.bulk.inputs import make_feed
from shoal.clients.bulk.rows import shorten_all
from shoal.clients.bulk.tables import open_table
from shoal.clients.client.calls import to_arrays
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.spec import STRING, Array, ModelSpec

MAX_ROWS = 4096  # read from a file; more would not change the results

Texts = Callable[[], tuple[str, Sequence[str]]]  # the name of a corpus, and its texts


@dataclass(frozen=True)
class Inputs:
    """Rows to send: an array ``[num_rows, *dims]`` by input, and the name of the file or corpus (``source``).

    ``note`` says it if an input's columns were taken in the file's order.
    """

    source: str
    arrays: Mapping[str, Array]
    is_batched: bool = True
    note: str = ""

    @property
    def num_rows(self) -> int:
        """Number of rows; requests use them in turn, from the first again after the last."""
        return len(next(iter(self.arrays.values())))

    @property
    def text_bytes(self) -> dict[str, float]:
        """Mean bytes per row of each text input, by the input's name."""
        texts = {name: array for name, array in self.arrays.items() if array.dtype == np.object_}
        return {name: sum(map(len, array.ravel().tolist())) / len(array) for name, array in texts.items()}

    def take(self, start: int, number: int) -> dict[str, Array]:
        """Return ``number`` rows from row ``start`` on, by input; the first row follows the last.

        For a model without batching, return row ``start`` alone, without the batch dimension.
        """
        rows = (start + np.arange(number)) % self.num_rows
        return {name: array[rows] if self.is_batched else array[rows[0]] for name, array in self.arrays.items()}


def read_inputs(
    spec: ModelSpec, rows: Path | Texts, text_column: str = "", columns: Mapping[str, str] | None = None
) -> Inputs:
    """Read rows from a file, or take texts in a fixed random order.

    ``text_column`` and ``columns`` name columns that are not named like the inputs, as for ``make_feed``.

    Raises:
        InputError: there is no file, and the model needs other inputs than one text; or the file has no column for any
            input, or a value that the input does not take.
        ArtifactError: the file cannot be read, lacks a column, has an empty cell, or has no rows.
    """
    if isinstance(rows, Path):
        return _from_file(spec, rows, text_column, columns or {})
    required = [tensor for tensor in spec.inputs if not tensor.is_optional]
    if len(required) != 1 or required[0].dtype != STRING:
        wanted = shorten_all(tensor.name for tensor in required)
        raise InputError(
            f"{spec.name} needs {wanted or 'no input'}; shoal's own texts can only fill a single text input.",
            "Give a file with columns named like the model's inputs: --inputs FILE",
        )
    name, texts = rows()
    chosen = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))[:MAX_ROWS]]
    return _make(spec, name, {required[0].name: chosen})


def _from_file(spec: ModelSpec, path: Path, text_column: str, columns: Mapping[str, str]) -> Inputs:
    with open_table(path) as table:
        read = list(islice(table.rows, MAX_ROWS))
        if not read:
            raise ArtifactError(f"{path.name} has no rows.", "Add rows to the file.")
        feed = make_feed(spec, table, text_column=text_column, columns=columns, first=read[0][1], has_constants=False)
        if not feed.columns:
            names = shorten_all(tensor.name for tensor in spec.inputs)
            raise InputError(
                f"{path.name} has no column for any of {spec.name}'s inputs: {names}.",
                "All inputs are optional, but one is needed: --column INPUT=COLUMN",
            )
        rows = [(number, feed.inputs(row)) for number, row in read]
        for number, row in rows:
            empty = sorted(feed.columns.keys() - {name for name, value in row.items() if value is not None})
            if empty:
                raise ArtifactError(
                    f"{table.where(number)} has nothing in column {feed.columns[empty[0]]!r}.",
                    "Fill it, or remove the row.",
                )
    made = _make(spec, path.name, {name: [row[name] for _, row in rows] for name in feed.columns})
    return replace(made, note=feed.note)


def _make(spec: ModelSpec, source: str, values: Mapping[str, Any]) -> Inputs:
    lists = {tensor.name for tensor in spec.inputs if tensor.dims == (-1,)}  # of any length: a scalar is a list of one
    given = {name: [_as_vector(v) for v in rows] if name in lists else rows for name, rows in values.items()}
    return Inputs(source, to_arrays(spec.inputs, given, is_batched=True), spec.is_batched)


def _as_vector(value: Any) -> Any:
    return value if np.ndim(value) else [value]
