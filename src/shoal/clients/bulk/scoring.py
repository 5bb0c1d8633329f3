"""Score rows with a model: an answer or an error for each row, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from shoal.clients.bulk.inputs import Feed
from shoal.clients.bulk.rows import Row
from shoal.clients.client.calls import find_text_input, to_rows
from shoal.clients.client.client import Client
from shoal.clients.client.failures import UnknownModelError
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError
from shoal.kit.component.spec import BATCH_INDEX, Array, ModelSpec

if TYPE_CHECKING:
    from shoal.clients.local import Pipeline

# Rows per request to a server, which batches requests that wait: on a CPU, 16 were faster than 1, 8 or 32
# (benchmarks/results/infer-*.json).
SERVED_ROWS = 16
SERVED_REQUESTS = 3  # requests in flight: one in the encoder, one before the encoder, one waiting
LOCAL_ROWS = 32  # rows per call in this process, where calls are not batched
LOCAL_REQUESTS = 2  # calls in flight: one in the encoder while the texts of the other are tokenized

Ask: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Array]]
AskStream: TypeAlias = Callable[[Mapping[str, Any]], Any]  # gives an iterator over answers, with `close`

# Rows that are sorted by length and cut into requests together. The rows that share a batch affect the last bits of an
# encoder's scores, so windows begin at the same rows in a resumed run and in an uninterrupted one.
WINDOW = 256
_SWITCHES = ("stream", "streaming")  # inputs that ask for one whole answer if they are false
ERROR = "error"  # the column that says why a row has no answer
_FATAL = (ArtifactError, ServerError, SetupError)  # errors of the setup, not of a row

Answer = dict[str, Any] | str  # values by column, or the row's error


# --- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """A model that answers bulk requests.

    ``call`` answers one request of at most ``max_rows`` rows, and may be called by ``num_callers`` threads at a time.
    ``stream`` streams the answers to one request; closing its iterator ends the request.
    """

    spec: ModelSpec
    call: Ask
    stream: AskStream
    max_rows: int = LOCAL_ROWS
    num_callers: int = LOCAL_REQUESTS


def served(client: Client, name: str, *, max_rows: int | None = None, num_callers: int | None = None) -> Endpoint:
    """Make the endpoint of a model on a server.

    Raises:
        InputError: the server has no such model.
        ServerError: no server answers.
    """
    spec = client.describe(name)
    rows, callers = max_rows or SERVED_ROWS, num_callers or SERVED_REQUESTS
    endpoint = Endpoint(spec, partial(client.infer, name), partial(client.stream, name), rows, callers)
    return _limited(_whole(endpoint) if spec.is_decoupled else endpoint)


def local(pipeline: Pipeline, *, max_rows: int | None = None, num_callers: int | None = None) -> Endpoint:
    """Make the endpoint of a pipeline in this process."""
    spec, rows, callers = pipeline.graph.config.spec, max_rows or LOCAL_ROWS, num_callers or LOCAL_REQUESTS
    call, stream = (lambda inputs: pipeline(**inputs)), (lambda inputs: pipeline.stream(**inputs))
    endpoint = Endpoint(spec, call, stream, rows, callers)
    return _limited(_whole(endpoint) if pipeline.is_decoupled else endpoint)


@contextmanager
def open_model(
    name: str, where: str, repository: Path, connect: Callable[[], Client], **limits: int | None
) -> Iterator[Endpoint]:
    """Open a model's endpoint: ``where`` is ``server``, ``local``, or ``client`` for a pipeline that asks a server.

    ``name`` may be empty: the default model. ``limits`` are those of ``served`` and ``local``.
    """
    with ExitStack() as held:
        client = None
        if where != "local":
            client = held.enter_context(connect())
        if where == "server":
            assert client is not None
            yield served(client, name or client.default_model(), **limits)
            return
        from shoal.clients.local import load

        pipeline = load(repository / name if name else repository, remote=client)
        held.callback(pipeline.close)
        if client:  # its server does most of the work
            limits["num_callers"] = limits["num_callers"] or SERVED_REQUESTS
        yield local(pipeline, **limits)


def _limited(model: Endpoint) -> Endpoint:
    """Return the endpoint with ``max_rows`` lowered to the model's limit, which is 1 without a batch dimension."""
    return replace(model, max_rows=min(model.max_rows, max(1, model.spec.max_batch_size)))


def _whole(model: Endpoint) -> Endpoint:
    """Return the endpoint of a language model that streams its answers, asked for whole answers; else ``model``.

    Such a model has an input ``stream`` or ``streaming``, BOOL ``[1]``. Its rows are answered without ``batch_index``,
    which depends on how rows are joined to requests.
    """
    switch = next((spec.name for spec in model.spec.inputs if spec.name in _SWITCHES and spec.dtype == "TYPE_BOOL"), "")
    if not switch:
        return model

    def call(inputs: Mapping[str, Any]) -> Mapping[str, Array]:
        shape = (len(next(iter(inputs.values()))), 1) if model.spec.is_batched else (1,)
        with closing(model.stream({switch: np.zeros(shape, np.bool_), **inputs})) as answers:
            found = list(answers)
        if len(found) != 1:
            raise InputError(
                f"{model.spec.name} gave {len(found)} answers to a request, and a row has one.",
                f"Leave {switch} out, or set it to false.",
            )
        whole: Mapping[str, Array] = found[0]
        return whole

    outputs = tuple(spec for spec in model.spec.outputs if spec.name != BATCH_INDEX)
    return replace(model, spec=replace(model.spec, outputs=outputs), call=call)


def rehearse(model: Endpoint, constants: Mapping[str, Any], *, must_answer: bool = True) -> None:
    """Send a test request with one text, to find a failing server or a bad value in ``constants`` before the first row.

    Without ``must_answer``, a refusal is ignored: the model may need further inputs, which come from the rows.

    Raises:
        InputError: the model refused the request.
        ServerError: the server cannot be reached, or it fails.
    """
    try:
        _call(model, [{find_text_input(model.spec): "A text.", **constants}])
    except InputError:
        if must_answer:
            raise


# --- rows -----------------------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """A row and its answer; the answer is a string if it is an error."""

    number: int
    row: Row
    answer: Answer


@dataclass(frozen=True)
class Summary:
    """Totals of a run, and its first error, if that was not shown."""

    num_rows: int
    num_failed: int
    first_error: str = ""


def answered(scored: Scored) -> dict[str, Any]:
    """Return the values of the row, then of its answer or its ``error``, by column."""
    given = {} if isinstance(scored.row, ArtifactError) else scored.row
    return {**given, **({ERROR: scored.answer} if isinstance(scored.answer, str) else scored.answer)}


def score(rows: Iterable[tuple[int, Row]], model: Endpoint, feed: Feed) -> Iterator[list[Scored]]:
    """Yield the answers of all rows in order, in windows of ``WINDOW`` rows, with several requests in flight.

    Raises:
        ArtifactError: the input is damaged; all complete windows before the damage have been yielded.
        ServerError: the server went away, possibly after some windows were yielded.
    """
    rows = iter(rows)
    damage: ArtifactError | None = None
    ahead = 1 + -(-2 * model.num_callers * model.max_rows // WINDOW)  # windows that keep every caller busy
    with ThreadPoolExecutor(model.num_callers, thread_name_prefix="shoal-bulk") as callers:
        waiting: deque[_Window] = deque()
        try:
            while True:
                try:
                    window = list(islice(rows, WINDOW))
                except ArtifactError as error:
                    damage = error
                    break
                if not window:
                    break
                waiting.append(_Window.begin(window, model, feed, callers))
                if len(waiting) > ahead:
                    yield waiting.popleft().finish()
            while waiting:
                yield waiting.popleft().finish()
            if damage:
                raise damage
        finally:
            callers.shutdown(wait=False, cancel_futures=True)


class _Window(NamedTuple):
    rows: list[tuple[int, Row]]
    requests: list[tuple[list[int], Future[list[Answer]]]]
    refused: dict[int, str]

    @classmethod
    def begin(cls, rows: list[tuple[int, Row]], model: Endpoint, feed: Feed, callers: ThreadPoolExecutor) -> _Window:
        inputs: dict[int, dict[str, Any]] = {}
        refused: dict[int, str] = {}
        for at, (_, row) in enumerate(rows):
            try:
                if isinstance(row, ArtifactError):
                    raise row
                inputs[at] = feed.inputs(row)
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
    """Divide a window into requests. The rows of a request have inputs of one shape and texts of similar length."""
    # An encoder pads all texts of a batch to the longest one.
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


# --- requests -------------------------------------------------------------------------------------------------------


def ask(model: Endpoint, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Send rows, all with the same set of inputs, as one request.

    If the request is refused, split it in halves and retry, so that only the bad row gets an error.
    """
    try:
        outputs = _call(model, rows)
    except UnknownModelError as error:  # the server lost the model during the run
        raise ServerError(error.what, error.fix) from None
    except _FATAL:
        raise
    except ShoalError as error:
        if len(rows) == 1:
            return [str(error)]
        half = len(rows) // 2
        return ask(model, rows[:half]) + ask(model, rows[half:])
    return [*to_rows(model.spec, outputs)[: len(rows)]]


def stream(model: Endpoint, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers to one row as they come, each with values by column; closing the generator ends the request.

    Raises:
        ShoalError: the row is refused, or the model fails, possibly after some answers.
    """
    with closing(model.stream(_inputs(model, [row]))) as answers:
        for outputs in answers:
            yield from to_rows(model.spec, outputs)


def _call(model: Endpoint, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Array]:
    return model.call(_inputs(model, rows))


def _inputs(model: Endpoint, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join rows into the inputs of one request; a model without a batch dimension takes the values of its only row."""
    joined = {name: _column([row[name] for row in rows]) for name in rows[0]}
    if model.spec.is_batched:
        return joined
    return {name: value[0] if isinstance(value, np.ndarray) else value for name, value in joined.items()}


def _column(values: list[Any]) -> list[Any] | Array:
    """Return one value per row. A list in place of a text stays one value, which the model refuses."""
    if isinstance(values[0], np.ndarray):
        return np.stack(values)
    if not any(isinstance(value, list | dict) for value in values):
        return values
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array
