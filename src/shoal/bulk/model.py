"""Who answers the requests of bulk work: a served model, or a pipeline in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError
from shoal.serving.client import Client
from shoal.serving.local import Pipeline

ROWS = 32  # of a request: more bring nothing where an encoder computes, and are lost where a row of them is bad
SERVED_REQUESTS = 4  # at a time: enough that every step of the server has one to do and one that waits
LOCAL_REQUESTS = 2  # at a time: one's text is read while the other's is in the encoder


@dataclass(frozen=True)
class Model:
    """``call`` answers a request of at most ``max_rows`` rows; ``num_callers`` threads may call it at a time."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Callable[[Mapping[str, Any]], Mapping[str, Array]]
    max_rows: int = ROWS
    num_callers: int = SERVED_REQUESTS

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

    def check_input(self, name: str) -> None:
        """Check that the model has an input of this name.

        Raises:
            InputError: it has not.
        """
        names = [spec.name for spec in self.inputs]
        if name not in names:
            raise InputError(f"There is no input {name}.", f"Inputs: {', '.join(names)}.")

    @property
    def columns(self) -> dict[str, str]:
        """The column that each output is written to: its name in lower case."""
        names = [spec.name for spec in self.outputs]
        lower = [name.lower() for name in names]
        return dict(zip(names, lower if len(set(lower)) == len(lower) else names, strict=True))


def served(client: Client, name: str, *, max_rows: int | None = None, num_callers: int | None = None) -> Model:
    """A model on a server.

    Raises:
        InputError: the server has no such model, or it does not batch.
        ServerError: no server answers.
    """
    limit = client.max_batch_size(name)
    return Model(
        name,
        client.inputs(name),
        client.outputs(name),
        lambda inputs: client.infer(name, inputs),
        _check_rows(name, max_rows, limit),
        num_callers or SERVED_REQUESTS,
    )


def local(pipeline: Pipeline, *, max_rows: int | None = None, num_callers: int | None = None) -> Model:
    """A pipeline in this process; of one with a remote half, more requests are on their way at a time.

    Raises:
        InputError: it does not batch.
    """
    spec = pipeline.graph.config.spec
    return Model(
        spec.name,
        spec.inputs,
        spec.outputs,
        lambda inputs: pipeline(**inputs),
        _check_rows(spec.name, max_rows, spec.max_batch_size),
        num_callers or LOCAL_REQUESTS,
    )


def _check_rows(name: str, wanted: int | None, limit: int) -> int:
    if limit == 0:
        raise InputError(f"Model {name} does not batch.", "Ask it with shoal.Client, one request a text.")
    if wanted is not None and wanted > limit:
        raise InputError(f"Model {name} takes at most {limit} rows a request, not {wanted}.", "Give a smaller number.")
    return wanted or min(ROWS, limit)
