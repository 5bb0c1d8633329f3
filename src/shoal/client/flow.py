"""Sans-I/O request logic shared by Client and AsyncClient.

A flow is a generator. It yields the calls that may be sent concurrently, receives their results, or the error of the
first that failed, and returns the final result.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from shoal.client.arrays import count_rows, read_arrays
from shoal.client.calls import Answer, Call, Description, Method, Parameter, check_outputs, join, split
from shoal.client.failures import (
    ModelRefusalError,
    RestrictedError,
    TooManyRowsError,
    UnknownModelError,
)
from shoal.client.settings import check_parameters, check_timeout
from shoal.component.tensors import Array
from shoal.errors import InputError, ShoalError
from shoal.repository.default_model import find_top

T = TypeVar("T")
Flow: TypeAlias = Generator[list[Call], list[Any], T]


class Flows:
    """Request flows for one server, with a cache of its model descriptions."""

    def __init__(self) -> None:
        self._described: dict[str, Description] = {}

    def forget(self, model: str) -> None:
        """Drop the cached description: the server may have been restarted with another model of that name."""
        self._described.pop(model, None)

    def describe(self, model: str, timeout: float | None = None) -> Flow[Description]:
        """Fetch the model's description, from the cache if possible."""
        if not model:
            raise InputError("The model has no name.", "Name one that the server's repository holds.")
        if model not in self._described:
            try:
                (found,) = yield [Call(Method.CONFIG, model, timeout=timeout)]
            except RestrictedError:
                (found,) = yield [Call(Method.METADATA, model, timeout=timeout)]
            self._described[model] = found
        return self._described[model]

    def max_batch_size(self, model: str) -> Flow[int]:
        """Fetch the most rows of one request; 0 if the first dimension does not count rows."""
        described = yield from self.describe(model)
        if described.max_rows is None:
            raise RestrictedError(
                f"The server restricts the configuration of {model} to administrators.",
                "Requests with too many rows are still sent in parts.",
            )
        return described.max_rows

    def find_default(self) -> Flow[str]:
        """Find the server's default model: a service names it, elsewhere ``find_top`` picks it from the index."""
        try:
            (found,) = yield [Call(Method.CONFIG, "")]
        except UnknownModelError:
            pass
        else:
            self._described[found.name] = found
            return str(found.name)
        try:
            (names,) = yield [Call(Method.INDEX, "")]
            described = yield [Call(Method.CONFIG, name) for name in dict.fromkeys(names)]
        except RestrictedError as error:
            raise InputError(f"{error.what} Which model is meant?", "Name it, as in --model NAME") from None
        return find_top({model.name: model.calls for model in described}, "The server")

    def is_ready(self, model: str) -> Flow[bool]:
        """Whether the server has ``model`` loaded."""
        (answer,) = yield [Call(Method.READY, model)]
        return bool(answer)

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
        """Run one request, in parts if it has more rows than the model takes at a time."""
        options: dict[str, Any] = {"request_id": request_id, "timeout": timeout, "parameters": parameters}
        call, described = yield from self._prepare(Method.INFER, model, values, outputs=outputs, **options)
        try:
            return (yield from self._send(call, described))
        except InputError as error:
            self.note_refusal(error, model)
            raise

    def stream(
        self,
        model: str,
        values: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None,
        request_id: str,
        timeout: float | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> Flow[Call]:
        """Check one request that is answered in pieces, and return its call, which the client sends itself."""
        options: dict[str, Any] = {"request_id": request_id, "timeout": timeout, "parameters": parameters}
        call, described = yield from self._prepare(Method.STREAM, model, values, outputs=outputs, **options)
        return replace(call, described=described)

    def note_refusal(self, error: ShoalError, model: str) -> None:
        """Drop the cached description of a model whose server refused a request that fits it."""
        if isinstance(error, InputError) and not isinstance(error, ModelRefusalError):
            self.forget(model)

    def _prepare(
        self,
        method: Method,
        model: str,
        values: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None,
        request_id: str,
        timeout: float | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> Flow[tuple[Call, Description]]:
        """Check one request against the model's description, fetched again if the request does not fit a cached one."""
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
            method,
            model,
            arrays,
            outputs=names,
            request_id=request_id,
            parameters=check_parameters(parameters or {}),
            timeout=timeout,
            known_inputs=tuple(spec.name for spec in described.inputs),
            known_outputs=described.output_names,
        )
        return call, described

    def _send(self, call: Call, described: Description) -> Flow[Answer]:
        size, rows = described.max_rows, set(call.rows.values())
        if not size or not rows - {1} or count_rows(call.arrays) <= size:  # one row is never too many
            try:
                (answer,) = yield [call]
                return answer  # type: ignore[no-any-return]
            except TooManyRowsError as refusal:  # the limit was unknown, or the model was replaced
                size = refusal.limit
                self._described[call.model] = described._replace(max_rows=size)
        parts = split(call, size)
        return join(call, parts, (yield parts))


def _read(
    described: Description, values: Mapping[str, Any], outputs: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, Array]]:
    names = check_outputs(outputs or (), described.output_names)
    return names, read_arrays(described.inputs, values, is_batched=described.is_batched)
