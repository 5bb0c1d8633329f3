"""Endpoints of bulk work: a served model, or a pipeline in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from shoal.client.client import Client
from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError, ServerError, suggest
from shoal.local import Pipeline

# Rows per request to a server, which batches requests that wait: on a CPU, 16 were faster than 1, 8 or 32
# (benchmarks/results/infer-*.json).
SERVED_ROWS = 16
SERVED_REQUESTS = 3  # at a time: one in the encoder, one before it, one that waits
LOCAL_ROWS = 32  # per call in this process, where calls are not batched
LOCAL_REQUESTS = 2  # at a time: one's text is read while the other's is in the encoder

Ask: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Array]]
AskStream: TypeAlias = Callable[[Mapping[str, Any]], Any]  # an iterator over answers, with `close`


@dataclass(frozen=True)
class Endpoint:
    """A model that answers bulk requests: ``call`` takes at most ``max_rows`` rows, from ``num_callers`` threads."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Ask
    max_rows: int = LOCAL_ROWS
    num_callers: int = SERVED_REQUESTS
    is_batched: bool = True
    sample: Mapping[str, Any] | None = None  # a request that was answered once
    stream: AskStream | None = None  # the same, answered in pieces; closing its iterator ends the request

    def check_well(self) -> None:
        """Check, after a row was refused, that the model is well: a server may lose or replace it during a run.

        Raises:
            ServerError: a request that was answered before is refused now.
        """
        if self.sample is not None:
            try:
                self.call(self.sample)
            except InputError as error:
                raise ServerError(
                    f"Model {self.name} refuses what it answered before: {error.what}", error.fix
                ) from None

    def rehearsed(self, constants: Mapping[str, Any], *, must_answer: bool = True) -> Endpoint:
        """Return the model after a test request with one text, so that a failing server, or a wrong value given for
        every row, is found before the first row.

        Raises:
            InputError: it is refused, unless it need not be answered since rows give other inputs too.
            ServerError: no server answers, or it cannot.
        """
        sample = {self.text_input: ["A text."], **{name: np.stack([value]) for name, value in constants.items()}}
        try:
            self.call(sample)
        except InputError:
            if must_answer:
                raise
            return self
        return replace(self, sample=sample)

    @cached_property
    def text_input(self) -> str:
        """Name of the input that takes texts: the only one of TYPE_STRING, or the only required one; else empty."""
        texts = [spec for spec in self.inputs if spec.dtype == STRING and spec.dims == (1,)]
        required = [spec for spec in texts if not spec.is_optional]
        found = required if len(required) == 1 else texts
        return found[0].name if len(found) == 1 else ""

    def find_input(self, name: str) -> TensorSpec:
        """Return the declaration of an input.

        Raises:
            InputError: the model has none of this name.
        """
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise InputError(f"There is no input {name}.", suggest(name, [spec.name for spec in self.inputs]))

    @property
    def columns(self) -> dict[str, str]:
        """Column that each output is written to: its name in lower case."""
        names = [spec.name for spec in self.outputs]
        lower = [name.lower() for name in names]
        return dict(zip(names, lower if len(set(lower)) == len(lower) else names, strict=True))


def served(client: Client, name: str, *, max_rows: int | None = None, num_callers: int | None = None) -> Endpoint:
    """Make the endpoint of a model on a server.

    Raises:
        InputError: the server has no such model, or it takes fewer rows.
        ServerError: no server answers.
    """
    spec = client.describe(name)
    limit = spec.max_batch_size
    return Endpoint(
        name,
        spec.inputs,
        spec.outputs,
        _by_row(lambda inputs: client.infer(name, inputs), limit),
        _check_rows(name, max_rows, SERVED_ROWS, limit),
        num_callers or SERVED_REQUESTS,
        is_batched=limit > 0,
        stream=_stream_by_row(lambda inputs: client.stream(name, inputs), limit),
    )


def local(pipeline: Pipeline, *, max_rows: int | None = None, num_callers: int | None = None) -> Endpoint:
    """Make the endpoint of a pipeline in this process; one with a remote half keeps more requests in flight.

    Raises:
        InputError: it takes fewer rows.
    """
    spec = pipeline.graph.config.spec
    return Endpoint(
        spec.name,
        spec.inputs,
        spec.outputs,
        _by_row(lambda inputs: pipeline(**inputs), spec.max_batch_size),
        _check_rows(spec.name, max_rows, LOCAL_ROWS, spec.max_batch_size),
        num_callers or LOCAL_REQUESTS,
        is_batched=spec.is_batched,
        stream=_stream_by_row(lambda inputs: pipeline.stream(**inputs), spec.max_batch_size),
    )


def _by_row(call: Ask, limit: int) -> Ask:
    """Return ``call``; for a model without a batch dimension, take it from a request of one row, and add it again."""
    if limit:
        return call

    return lambda inputs: _add_dimension(call(_take_row(inputs)))


def _stream_by_row(call: AskStream, limit: int) -> AskStream:
    """Return ``call`` for streams, changed as ``_by_row`` does."""
    if limit:
        return call

    def ask(inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Array]]:
        with closing(call(_take_row(inputs))) as answers:
            yield from map(_add_dimension, answers)

    return ask


def _take_row(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def _add_dimension(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array[None] for name, array in outputs.items()}


def _check_rows(name: str, wanted: int | None, default: int, limit: int) -> int:
    limit = max(1, limit)  # a model without a batch dimension gets a request per row
    if wanted is not None and wanted > limit:
        raise InputError(
            f"Model {name} takes at most {limit} rows per request, not {wanted}.", "Give a smaller number."
        )
    return wanted or min(default, limit)
