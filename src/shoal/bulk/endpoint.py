"""Who answers the requests of bulk work: a served model, or a pipeline in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.client.client import Client
from shoal.client.failures import RestrictedError
from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError, ServerError
from shoal.local import Pipeline

# Of a request to a server, which joins those that wait: on a CPU requests of 16 were faster than of 1, 8 or 32
# (benchmarks/results/infer-*.json).
SERVED_ROWS = 16
SERVED_REQUESTS = 3  # at a time: one in the encoder, one before it, one that waits
LOCAL_ROWS = 32  # of a call in this process, where nobody joins them
LOCAL_REQUESTS = 2  # at a time: one's text is read while the other's is in the encoder


@dataclass(frozen=True)
class Endpoint:
    """``call`` answers a request of at most ``max_rows`` rows; ``num_callers`` threads may call it at a time."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Callable[[Mapping[str, Any]], Mapping[str, Array]]
    max_rows: int = LOCAL_ROWS
    num_callers: int = SERVED_REQUESTS
    sample: Mapping[str, Any] | None = None  # a request that was answered once

    def check_well(self) -> None:
        """Check, where a row was refused, that it is the row: a server may lose a model, or get another of its name.

        Raises:
            ServerError: what was answered before is not any more.
        """
        if self.sample is not None:
            try:
                self.call(self.sample)
            except InputError as error:
                raise ServerError(
                    f"Model {self.name} refuses what it answered before: {error.what}", error.fix
                ) from None

    def rehearsed(self, constants: Mapping[str, float], *, must_answer: bool = True) -> Endpoint:
        """The model after a request for one text: what is wrong with the server, or with numbers given for every row,
        shows before the first.

        Raises:
            InputError: it is refused, unless it need not be answered since rows give other inputs too.
            ServerError: no server answers, or it cannot.
        """
        sample = {self.text_input: ["A text."], **{name: [value] for name, value in constants.items()}}
        try:
            self.call(sample)
        except InputError:
            if must_answer:
                raise
            return self
        return replace(self, sample=sample)

    @property
    def text_input(self) -> str:
        """The input that takes texts.

        Raises:
            InputError: there is none.
        """
        for spec in self.inputs:
            if spec.dtype == STRING:
                return spec.name
        raise InputError(f"Model {self.name} takes no text.", "Name an ensemble that does: --model NAME")

    def find_input(self, name: str) -> TensorSpec:
        """The declaration of an input.

        Raises:
            InputError: the model has none of this name.
        """
        for spec in self.inputs:
            if spec.name == name:
                return spec
        raise InputError(f"There is no input {name}.", f"Inputs: {', '.join(spec.name for spec in self.inputs)}.")

    @property
    def columns(self) -> dict[str, str]:
        """The column that each output is written to: its name in lower case."""
        names = [spec.name for spec in self.outputs]
        lower = [name.lower() for name in names]
        return dict(zip(names, lower if len(set(lower)) == len(lower) else names, strict=True))


def served(client: Client, name: str, *, max_rows: int | None = None, num_callers: int | None = None) -> Endpoint:
    """A model on a server.

    Raises:
        InputError: the server has no such model, or it does not batch.
        ServerError: no server answers.
    """
    try:
        limit = client.max_batch_size(name)
    except RestrictedError:  # the client divides what turns out to be too long
        limit = max_rows or SERVED_ROWS
    return Endpoint(
        name,
        client.inputs(name),
        client.outputs(name),
        lambda inputs: client.infer(name, inputs),
        _check_rows(name, max_rows, SERVED_ROWS, limit),
        num_callers or SERVED_REQUESTS,
    )


def local(pipeline: Pipeline, *, max_rows: int | None = None, num_callers: int | None = None) -> Endpoint:
    """A pipeline in this process; of one with a remote half, more requests are on their way at a time.

    Raises:
        InputError: it does not batch.
    """
    spec = pipeline.graph.config.spec
    return Endpoint(
        spec.name,
        spec.inputs,
        spec.outputs,
        lambda inputs: pipeline(**inputs),
        _check_rows(spec.name, max_rows, LOCAL_ROWS, spec.max_batch_size),
        num_callers or LOCAL_REQUESTS,
    )


def _check_rows(name: str, wanted: int | None, default: int, limit: int) -> int:
    if limit == 0:
        raise InputError(f"Model {name} does not batch.", "Ask it with shoal.Client, one request a text.")
    if wanted is not None and wanted > limit:
        raise InputError(f"Model {name} takes at most {limit} rows a request, not {wanted}.", "Give a smaller number.")
    return wanted or min(default, limit)
