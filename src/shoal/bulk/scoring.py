"""Score a stream of rows: an answer or an error for each, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from shoal.bulk.endpoint import Endpoint
from shoal.bulk.values import read_row
from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError
from shoal.tables import Row, shorten

# Rows that are sorted by length and cut into requests together. Which rows share a batch affects the last bits of an
# encoder's scores: windows begin at the same rows in a resumed run as in one that was not interrupted.
WINDOW = 256
_FATAL = (ArtifactError, ServerError, SetupError)  # errors of the setup, not of a row

Answer = dict[str, Any] | str  # values by column, or the row's error


class Scored(NamedTuple):
    """A row and its answer."""

    number: int
    row: Row
    answer: Answer


@dataclass(frozen=True)
class Feed:
    """Mapping of a row to a model's inputs: ``columns`` by input, and ``constants``, the same for every row.

    Several columns are the elements of a vector.
    """

    columns: Mapping[str, str | tuple[str, ...]]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self, row: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the inputs of one row; a number whose cell is empty is left out.

        Raises:
            InputError: a value is not what its input declares.
        """
        given = {name: _value(_take(row, columns), specs[name]) for name, columns in self.columns.items()}
        present = {n: v for n, v in given.items() if v is not None or specs[n].dtype == STRING}
        return {**present, **self.constants}


def _take(row: Mapping[str, Any], columns: str | tuple[str, ...]) -> Any:
    if isinstance(columns, str):
        return row.get(columns)
    cells = [row.get(column) for column in columns]
    for column, cell in zip(columns, cells, strict=True):
        if cell is None or (isinstance(cell, str) and not _is_number(cell)):
            raise InputError(f"The column {column} holds {shorten(cell)}, not a number.", "Correct that cell.")
    return [float(cell) if isinstance(cell, str) else cell for cell in cells]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _value(value: Any, spec: TensorSpec) -> Any:
    """Convert a value of a file to the input's type: text files hold numbers, and vectors in JSON, as text."""
    if spec.dtype == STRING and spec.dims == (1,):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return read_row(spec, value)


def score(rows: Iterable[tuple[int, Row]], model: Endpoint, feed: Feed) -> Iterator[list[Scored]]:
    """Answer all rows, a window at a time, in order; several requests are in flight at any time.

    Raises:
        ServerError: the server went away; windows that were answered before have been yielded.
    """
    rows = iter(rows)
    ahead = 1 + -(-2 * model.num_callers * model.max_rows // WINDOW)  # windows that keep every caller busy
    with ThreadPoolExecutor(model.num_callers, thread_name_prefix="shoal-bulk") as callers:
        waiting: deque[_Window] = deque()
        try:
            while window := list(islice(rows, WINDOW)):
                waiting.append(_Window.begin(window, model, feed, callers))
                if len(waiting) > ahead:
                    yield waiting.popleft().finish()
            while waiting:
                yield waiting.popleft().finish()
        finally:
            callers.shutdown(wait=False, cancel_futures=True)


class _Window(NamedTuple):
    rows: list[tuple[int, Row]]
    requests: list[tuple[list[int], Future[list[Answer]]]]
    refused: dict[int, str]

    @classmethod
    def begin(cls, rows: list[tuple[int, Row]], model: Endpoint, feed: Feed, callers: ThreadPoolExecutor) -> _Window:
        specs = {spec.name: spec for spec in model.inputs}
        inputs: dict[int, dict[str, Any]] = {}
        refused: dict[int, str] = {}
        for at, (_, row) in enumerate(rows):
            try:
                if isinstance(row, ArtifactError):
                    raise row
                inputs[at] = feed.inputs(row, specs)
            except (ArtifactError, InputError) as error:
                refused[at] = str(error)
        requests = []
        for chosen in _cut(inputs, model.max_rows):
            requests.append((chosen, callers.submit(ask, model, [inputs[at] for at in chosen])))
        return cls(rows, requests, refused)

    def finish(self) -> list[Scored]:
        answers: dict[int, Answer] = {**self.refused}
        for chosen, answered in self.requests:
            answers.update(zip(chosen, answered.result(), strict=True))
        return [Scored(number, row, answers[at]) for at, (number, row) in enumerate(self.rows)]


def _cut(inputs: Mapping[int, Mapping[str, Any]], max_rows: int) -> Iterator[list[int]]:
    """Length bucketing: cut a window into requests of rows with inputs of one shape and texts of similar length."""
    # An encoder pads to the longest text of a batch.
    groups: dict[frozenset[Any], list[int]] = {}
    for at, given in inputs.items():
        groups.setdefault(
            frozenset((name, value.shape if isinstance(value, np.ndarray) else ()) for name, value in given.items()), []
        ).append(at)
    for members in groups.values():
        members.sort(key=lambda at: _length(inputs[at]), reverse=True)
        for start in range(0, len(members), max_rows):
            yield members[start : start + max_rows]


def _length(inputs: Mapping[str, Any]) -> int:
    return sum(len(value) for value in inputs.values() if isinstance(value, str | bytes))


def ask(model: Endpoint, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Send rows, all with the same set of inputs, as one request.

    If it is refused, split it in halves and retry, so that only the bad row gets an error.
    """
    try:
        outputs = model.call({name: _column([row[name] for row in rows]) for name in rows[0]})
    except _FATAL:
        raise
    except ShoalError as error:
        if len(rows) == 1:
            model.check_well()
            return [str(error)]
        half = len(rows) // 2
        return ask(model, rows[:half]) + ask(model, rows[half:])
    return [*_rows(model, outputs, len(rows))]


def stream(model: Endpoint, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers to one row as they come, each with values by column; closing it ends the request.

    Raises:
        ShoalError: the row is refused, or the model fails, which may be after some answers.
    """
    assert model.stream is not None
    with closing(model.stream({name: _column([value]) for name, value in row.items()})) as answers:
        for outputs in answers:
            yield from _rows(model, outputs, max(map(len, outputs.values())))


def _column(values: list[Any]) -> list[Any] | Array:
    """Return one value per row; a list among texts is a value that is refused, not a dimension."""
    if isinstance(values[0], np.ndarray):
        return np.stack(values)
    if not any(isinstance(value, list | dict) for value in values):
        return values
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def _rows(model: Endpoint, outputs: Mapping[str, Array], num_rows: int) -> list[dict[str, Any]]:
    columns = {model.columns[name]: _values(array) for name, array in outputs.items()}
    return [{name: values[row] for name, values in columns.items()} for row in range(num_rows)]


def _values(array: Array) -> list[Any]:
    """Return one value per row: a number or string where the tensor has one, else a list."""
    flat: list[Any] = array.reshape(-1).tolist()
    if array.dtype == np.object_:
        flat = [text.decode("utf-8", "backslashreplace") for text in flat]
    elif array.dtype == np.float32:
        # The shortest decimals that round to the same FP32: 0.1, not 0.10000000149.
        flat = [float(str(number)) for number in array.reshape(-1)]
    if array.shape[1:] == (1,):
        return flat
    values: list[Any] = np.array(flat, np.object_).reshape(array.shape).tolist()
    return values
