"""What to ask a server for, in which order: the part of a client that neither waits nor sends.

A flow is a generator. It yields the calls that may go out side by side, and gets their results, or the error
of the first that failed; it returns what the caller wanted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from shoal.client.arrays import count_rows, read_arrays
from shoal.client.calls import Answer, Call, Method, Parameter, check_outputs, dtype_name, join, split
from shoal.client.failures import (
    CallError,
    Kind,
    ModelRefusalError,
    RestrictedError,
    Server,
    TooManyRowsError,
)
from shoal.client.settings import MAX_SECONDS, Settings, check_parameters, check_timeout
from shoal.component.spec import TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError

T = TypeVar("T")
Flow: TypeAlias = Generator[list[Call], list[Any], T]

MOST_ROWS = 2**31 - 1  # more than any model takes
FIRST_PAUSE, MAX_PAUSE = 0.1, 5.0  # seconds before a repetition; each is twice the one before


class Described(NamedTuple):
    """The tensors of a model, as the server describes them; which inputs are optional, it does not say.

    ``may_batch``: every input's first dimension is free. It may count rows, and is not among the ``dims``.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    may_batch: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Described:
        """Read a model's metadata in its JSON form."""
        first = {int(entry["shape"][0]) if entry["shape"] else 0 for entry in metadata["inputs"]}
        may_batch = first == {-1}

        def read(entry: Mapping[str, Any], is_optional: bool) -> TensorSpec:
            dims = tuple(map(int, entry["shape"]))[1 if may_batch else 0 :]
            return TensorSpec(entry["name"], dtype_name(entry["datatype"]), dims, is_optional=is_optional)

        inputs = tuple(read(entry, True) for entry in metadata["inputs"])
        return cls(inputs, tuple(read(entry, False) for entry in metadata["outputs"]), may_batch)

    @property
    def output_names(self) -> tuple[str, ...]:
        """In the model's own order."""
        return tuple(spec.name for spec in self.outputs)


class Flows:
    """What to ask one server for, and what it said of its models so far."""

    def __init__(self) -> None:
        self._described: dict[str, Described] = {}
        self._sizes: dict[str, int] = {}

    def forget(self, model: str) -> None:
        """Ask again: the server may have been restarted with another model of that name."""
        self._described.pop(model, None)
        self._sizes.pop(model, None)

    def describe(self, model: str, timeout: float | None = None) -> Flow[Described]:
        """The model's tensors."""
        if not model:
            raise InputError("The model has no name.", "Name one that the server's repository holds.")
        if model not in self._described:
            (metadata,) = yield [Call(Method.METADATA, model, timeout=timeout)]
            self._described[model] = Described.from_metadata(metadata)
        return self._described[model]

    def is_ready(self, model: str) -> Flow[bool]:
        """Whether the server has ``model`` loaded."""
        (answer,) = yield [Call(Method.READY, model)]
        return bool(answer)

    def max_batch_size(self, model: str, timeout: float | None = None) -> Flow[int]:
        """The most rows of one request; 0 where the first dimension does not count rows."""
        if model not in self._sizes:
            described = yield from self.describe(model, timeout)
            size = (yield from self._ask_size(model, described, timeout)) if described.may_batch else 0
            self._sizes[model] = size
        return self._sizes[model]

    def _ask_size(self, model: str, described: Described, timeout: float | None) -> Flow[int]:
        try:
            (config,) = yield [Call(Method.CONFIG, model, timeout=timeout)]
            return int(config["max_batch_size"])
        except RestrictedError:
            pass
        # More rows than any model takes are refused with the number that it does take. One dimension too many: a
        # model that does not batch refuses this as well, so that nothing ever runs.
        claims = {s.name: np.broadcast_to(np.empty((), s.numpy_dtype), _claimed(s)) for s in described.inputs}
        try:
            yield [Call(Method.PROBE, model, claims, timeout=timeout)]
        except TooManyRowsError as refusal:
            return refusal.limit
        except InputError:
            pass
        return 0

    def infer(
        self,
        model: str,
        values: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None,
        request_id: str,
        timeout: float | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> Flow[Answer]:
        """One request, in parts where it has more rows than the model takes at a time."""
        timeout = None if timeout is None else check_timeout(timeout)
        is_fresh = model not in self._described
        described = yield from self.describe(model, timeout)
        try:
            names, arrays = _read(described, values, outputs)
        except InputError:
            if is_fresh:
                raise
            self.forget(model)
            described = yield from self.describe(model, timeout)
            names, arrays = _read(described, values, outputs)
        call = Call(
            Method.INFER,
            model,
            arrays,
            outputs=names,
            request_id=request_id,
            parameters=check_parameters(parameters or {}),
            timeout=timeout,
            known_inputs=tuple(spec.name for spec in described.inputs),
            known_outputs=described.output_names,
        )
        try:
            return (yield from self._send(call, described))
        except InputError as error:
            if not isinstance(error, ModelRefusalError):
                self.forget(model)
            raise

    def _send(self, call: Call, described: Described) -> Flow[Answer]:
        rows = set(call.rows.values())
        if described.may_batch and rows - {1}:  # one row is never too many
            size = yield from self.max_batch_size(call.model, call.timeout)
            if size and count_rows(call.arrays) > size:
                parts = split(call, size)
                return join(call, parts, (yield parts))
        (answer,) = yield [call]
        return answer  # type: ignore[no-any-return]


def _claimed(spec: TensorSpec) -> tuple[int, ...]:
    return (MOST_ROWS, *(max(1, size) for size in spec.dims), 1)


def _read(
    described: Described, values: Mapping[str, Any], outputs: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, Array]]:
    names = check_outputs(outputs or (), described.output_names)
    return names, read_arrays(described.inputs, values, is_batched=described.may_batch)


class Attempts:
    """The tries of one call: how long each may take, and whether there is another."""

    def __init__(self, call: Call, settings: Settings) -> None:
        self.seconds = settings.timeout if call.timeout is None else call.timeout
        self._deadline = time.monotonic() + min(self.seconds, MAX_SECONDS)
        self._retries = settings.retries
        self._safe = {Kind.UNREACHABLE, Kind.BUSY} | ({Kind.CONNECTION_LOST} if settings.is_repeatable else set())
        self._pauses = 0
        self._settings = settings

    @property
    def server(self) -> Server:
        """Where the call goes, for its errors."""
        return Server(self._settings.url, self._settings.protocol, self.seconds)

    @property
    def left(self) -> float:
        """Seconds until the time is up; never 0, which some libraries take for no limit."""
        return max(1e-3, self._deadline - time.monotonic())

    def pause(self, failure: CallError) -> float | None:
        """Seconds to wait before the next try, about as many as the server asks for; None where there is none.

        Random, or all that were turned away together would come back together.
        """
        if failure.kind not in self._safe or self._pauses >= self._retries:
            return None
        seconds = max(failure.after, min(MAX_PAUSE, FIRST_PAUSE * 2**self._pauses)) * random.uniform(0.5, 1)
        self._pauses += 1
        return seconds if seconds < self.left else None
