"""Requests of several rows to engines: each row is computed by itself, and answered as it comes or with all others."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.errors import InputError, ShoalError
from shoal.kit.component.base import Component
from shoal.kit.component.spec import BATCH_INDEX, Array, Arrays, ModelSpec
from shoal.kit.component.stream import QueueStream, Stream
from shoal.kit.generation.answers import join_rows, new_stream_id, pack_answer
from shoal.kit.generation.contract import Limits, TokenRequest, naming_row


@dataclass
class Row:
    """One row of a request: what is asked, whether its answer begins with the prompt, and the answer so far."""

    request: TokenRequest
    pad_id: int
    has_prompt: bool
    ids: list[int]
    reason: str = ""
    log_probs: dict[str, list[Array]] = field(default_factory=dict)  # of each answer so far


class RowBatch:
    """Collects the answers to the rows of one request, and sends them as one answer when all of them are there.

    The first row that fails ends the request with its error, and the other rows are given up. So are all rows when the
    client leaves; if it asks for the end, it gets the tokens so far. ``streams`` has one stream for each row, for the
    engine.
    """

    def __init__(self, component: Component, rows: Sequence[Row], stream: Stream) -> None:
        self._spec, self._rows, self._stream = component.context.spec, rows, stream
        self._lock, self._open = threading.Lock(), set(range(len(rows)))
        self.streams = [_RowStream(component, self, number, stream.request_id) for number in range(len(rows))]
        stream.farewell = self._pack_cancelled
        stream.on_leave(self._leave)

    def add(self, number: int, item: Arrays | ShoalError | None) -> None:
        """Take an answer to the row ``number``, its error or, with None, its end."""
        if isinstance(item, ShoalError):
            place = f"Row {number}: " if len(self._rows) > 1 else ""
            self._stream.end(type(item)(f"{place}{item.what}", item.fix))
            # in a thread of its own, because this one holds the lock of the row that failed
            threading.Thread(target=self._leave, name="shoal-rows", daemon=True).start()
        elif item is not None:
            self._take(number, item)
        else:
            with self._lock:
                self._open.discard(number)
                is_complete = not self._open
            self._end_row(is_complete)

    def _take(self, number: int, item: Arrays) -> None:
        row = self._rows[number]
        row.ids += item["output_ids"][0, 0].tolist()
        row.reason = bytes(item["finish_reason"][0, 0]).decode()
        for name in row.request.returns:
            row.log_probs.setdefault(name, []).append(item[name])

    def _end_row(self, is_complete: bool) -> None:
        if is_complete and self._stream.send(pack_rows(self._rows, self._spec)):
            self._stream.end()

    def _pack_cancelled(self) -> Arrays:
        """Return the answer to a request that is stopped: the tokens so far; rows that are not complete say it."""
        rows = [replace(row, ids=list(row.ids), reason=row.reason or "cancelled", log_probs={}) for row in self._rows]
        return pack_rows(rows, self._spec)

    def _leave(self) -> None:
        for each in self.streams:
            each.leave()


class StreamedRowBatch(RowBatch):
    """Sends the answers to the rows of one request as they come, each with its row's number as ``batch_index``."""

    def __init__(self, component: Component, rows: Sequence[Row], stream: Stream) -> None:
        super().__init__(component, rows, stream)
        self._names = [tensor.name for tensor in self._spec.outputs]
        self._stream_ids = np.array([[new_stream_id()] for _ in rows], np.int64)

    def _take(self, number: int, item: Arrays) -> None:
        row = self._rows[number]
        if row.has_prompt and not row.request.is_streaming:
            ids = np.concatenate([np.array([[row.ids]], row.request.dtype), item["output_ids"]], axis=2)
            item = {**item, "output_ids": ids, "sequence_length": item["sequence_length"] + len(row.ids)}
        numbers = {"stream_id": self._stream_ids[number : number + 1], BATCH_INDEX: np.array([[number]], np.int32)}
        answer = {**item, **numbers}
        self._stream.send({name: answer[name] for name in self._names if name in answer})

    def _end_row(self, is_complete: bool) -> None:
        if is_complete:
            self._stream.end()

    def _pack_cancelled(self) -> Arrays:
        """Return the last answer to a request that is stopped: the end of the rows that are open."""
        if not (numbers := sorted(self._open)):
            return {}  # the stream is about to end
        rows = [replace(self._rows[number], ids=[], log_probs={}, reason="cancelled") for number in numbers]
        own = {"stream_id": self._stream_ids[numbers], BATCH_INDEX: np.array(numbers, np.int32)[:, None]}
        packed = {**pack_rows(rows, self._spec), **own}
        return {name: packed[name] for name in self._names if name in packed}


class UncheckedStream(Stream):
    """Stream of an engine's own answers, which are not yet those that the model declares."""

    def send(self, outputs: Arrays) -> bool:
        """Send one answer of an engine; return False if the stream is closed."""
        with self._lock:
            if self._is_open:
                self._deliver(outputs)
            return self._is_open


class TrialStream(UncheckedStream, QueueStream):
    """Stream of the answers to a trial request, read in this process."""


class _RowStream(UncheckedStream):
    """Stream for the engine's answers to one row."""

    def __init__(self, component: Component, whole: RowBatch, number: int, request_id: str) -> None:
        super().__init__(component, 1, request_id)
        self._whole, self._number = whole, number

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        self._whole.add(self._number, item)


def read_rows(inputs: Arrays, limits: Limits, outputs: Container[str] = (), *, has_prompt: bool) -> list[Row]:
    """Read the rows of a request to a model that declares ``outputs``.

    ``has_prompt``: answers begin with the prompt, unless the request says otherwise.

    Raises:
        InputError: a value is out of range, or there are no rows; the message has the row.
    """
    count = len(inputs["input_ids"])
    if not count:
        raise InputError("The request has no rows.", "Send one prompt or more.")
    rows = []
    for number in range(count):
        given = {name: array[number : number + 1] for name, array in inputs.items()}
        with naming_row(number, count):
            if count > 1 and "input_lengths" not in given:
                raise InputError(f"input_lengths is missing, and there are {count} rows.", "Send each row's length.")
            request = TokenRequest.read(given, limits, outputs)
        pads = [int(given[name].reshape(-1)[0]) for name in ("pad_id", "end_id") if name in given]
        pad = next((pad for pad in [*pads, *request.end_ids] if pad >= 0), 0)
        excludes = (
            bool(given["exclude_input_in_output"].any()) if "exclude_input_in_output" in given else not has_prompt
        )
        begin = [] if excludes or request.sampling.echo else list(request.ids)  # echo is the engine's
        rows.append(Row(request, pad, not excludes, begin))
    return rows


def pack_rows(rows: Sequence[Row], spec: ModelSpec) -> dict[str, Array]:
    """Return those outputs that ``spec`` declares, for rows that are complete.

    ``output_ids`` [rows, 1, longest], padded with each row's ``pad_id``; ``sequence_length`` [rows, 1], with the prompt
    where it is returned; and ``finish_reason``, ``stream_id``, ``is_last``, ``carry``, each [rows, 1]. Log
    probabilities, if a row asks for them, are padded with 0, and ``top_token_ids`` with -1.
    """
    width = max(len(row.ids) for row in rows)
    outputs = join_rows([_pack_row(row, number, width) for number, row in enumerate(rows)])
    declared = {tensor.name for tensor in spec.outputs}
    return {name: array for name, array in outputs.items() if name in declared}


def _pack_row(row: Row, number: int, width: int) -> dict[str, Array]:
    request, ids = row.request, row.ids + [row.pad_id] * (width - len(row.ids))
    what: dict[str, Any] = {"passthrough": request.passthrough, "reason": row.reason, "dtype": request.dtype}
    return {
        **pack_answer(ids, stream_id=new_stream_id(), is_last=True, **what),
        "sequence_length": np.array([[len(row.ids)]], request.dtype),
        BATCH_INDEX: np.array([[number]], np.int32),
        **{name: _join_parts(name, parts) for name, parts in row.log_probs.items()},
    }


def _join_parts(name: str, parts: Sequence[Array]) -> Array:
    """Join a row's log probabilities ``name`` of one answer after the other; a sum is the last one."""
    if name == "cum_log_probs":
        return parts[-1]
    return np.concatenate(parts, axis=2 if name == "output_log_probs" else 1)
