"""Protocol-independent requests, answers and model descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shoal.component.spec import STRING, ModelSpec, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError, suggest

Parameter: TypeAlias = str | int | bool | float


class Method(Enum):
    """Kind of a call."""

    CONFIG = "the model's configuration"
    INDEX = "the models of the server"
    INFER = "an inference"
    METADATA = "the model's tensors"
    READY = "whether the model is loaded"
    STREAM = "an inference that is answered in pieces"


@dataclass(frozen=True)
class Call:
    """One request to the server; ``known_...`` are the valid tensor names, for error messages.

    A part of a split request begins with row ``first_row`` of the whole. ``described`` is the model's description, for
    STREAM: over HTTP its tensors are sent without dtypes and shapes.
    """

    method: Method
    model: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timeout: float | None = None
    known_inputs: tuple[str, ...] = ()
    known_outputs: tuple[str, ...] = ()
    first_row: int = 0
    described: Description | None = None

    @property
    def rows(self) -> dict[str, int]:
        """The size of each input's first dimension."""
        return {name: int(array.shape[0]) for name, array in self.arrays.items() if array.ndim}


class NoOutputError(InputError, KeyError):
    """An answer has no output of this name."""

    __str__ = InputError.__str__  # KeyError would show the message as a quoted key


class Answer(Mapping[str, np.ndarray[Any, Any]]):
    """Every output of one request, by name, as a read-only NumPy array ``[rows, *dims]``.

    ``version`` is that of the model that answered; ``parameters`` are the response parameters.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        *,
        model: str,
        version: str = "",
        request_id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        for array in arrays.values():
            array.setflags(write=False)
        self._arrays = dict(arrays)
        self._model, self._version, self._request_id = model, version, request_id
        self._parameters = dict(parameters or {})

    @property
    def model(self) -> str:
        """The model that was asked."""
        return self._model

    @property
    def version(self) -> str:
        """The version of the model that answered."""
        return self._version

    @property
    def request_id(self) -> str:
        """The caller's own name for the request."""
        return self._request_id

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Response parameters sent beside the tensors, as a copy."""
        return dict(self._parameters)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise NoOutputError(f"{self._model} gave no output {name}.", suggest(name, self._arrays)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in self._arrays.items())
        version = f", version {self._version}" if self._version else ""
        return f"Answer({self._model}{version}: {tensors})"


class Description(NamedTuple):
    """The tensors of a model, and how many rows a request may have.

    ``is_batched``: the first dimension of every tensor counts rows, and is not among the ``dims``. ``max_rows`` is None
    where the server restricts access to configurations. ``calls`` are the models that an ensemble calls.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    is_batched: bool
    max_rows: int | None = None
    calls: tuple[str, ...] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Description:
        """Read a model's configuration in its JSON form."""
        spec = ModelSpec.from_config(config)
        graph = config.get("ensemble_scheduling")
        calls = None if graph is None else tuple(step["model_name"] for step in graph.get("step", ()))
        return cls(spec.name, spec.inputs, spec.outputs, spec.is_batched, spec.max_batch_size, calls)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Description:
        """Read a model's metadata in its JSON form; it lacks the batch limit and which inputs are optional.

        If the first dimension of every input is variable, it is taken for the batch dimension.
        """
        shapes = {int(entry["shape"][0]) if entry.get("shape") else 0 for entry in metadata["inputs"]}
        is_batched = shapes == {-1}

        def read(entry: Mapping[str, Any], is_optional: bool) -> TensorSpec:
            dims = tuple(map(int, entry.get("shape", ())))[1 if is_batched else 0 :]
            return TensorSpec(entry["name"], dtype_name(entry["datatype"]), dims, is_optional=is_optional)

        inputs = tuple(read(entry, True) for entry in metadata["inputs"])
        outputs = tuple(read(entry, False) for entry in metadata["outputs"])
        return cls(metadata["name"], inputs, outputs, is_batched, None if is_batched else 0)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the model's order."""
        return tuple(spec.name for spec in self.outputs)


def split(call: Call, size: int) -> list[Call]:
    """Split a request into parts of at most ``size`` rows; ids get the part's number appended: ``ID/1``, ``ID/2``."""
    (num_rows,) = set(call.rows.values())
    return [
        replace(
            call,
            arrays={name: array[start : start + size] for name, array in call.arrays.items()},
            request_id=call.request_id and f"{call.request_id}/{number}",
            first_row=start,
        )
        for number, start in enumerate(range(0, num_rows, size), start=1)
    ]


def join(call: Call, parts: Sequence[Call], answers: Sequence[Answer]) -> Answer:
    """Join the answers to the parts of ``call`` into one.

    Raises:
        InputError: an output does not have one row per row of the request, or its shape differs between parts.
    """
    sizes = [next(iter(part.rows.values())) for part in parts]
    first = answers[0]
    arrays = {name: _join(name, [answer[name] for answer in answers], sizes) for name in first}
    return Answer(
        arrays, model=call.model, version=first.version, request_id=call.request_id, parameters=first.parameters
    )


def _join(name: str, arrays: Sequence[Array], sizes: Sequence[int]) -> Array:
    fix = f"Send at most {sizes[0]} rows at a time, and join the answers as you see fit."
    if any(array.shape[:1] != (size,) for array, size in zip(arrays, sizes, strict=True)):
        raise InputError(f"The request was split, and output {name} has not one row for each of its own.", fix)
    shapes = list(dict.fromkeys(str(["rows", *array.shape[1:]]).replace("'", "") for array in arrays))
    if len(shapes) > 1:
        raise InputError(f"The request was split, and output {name} came as {' and '.join(shapes[:3])}.", fix)
    return np.concatenate(arrays)


def dtype_name(datatype: str) -> str:
    """Translate a protocol ``datatype`` into its name in ``config.pbtxt``."""
    return STRING if datatype == "BYTES" else f"TYPE_{datatype}"


def check_outputs(wanted: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the outputs asked for, without duplicates.

    Raises:
        InputError: one is unknown.
    """
    if isinstance(wanted, str):
        raise InputError(f"outputs is a single string, {wanted!r}.", f"For one output: outputs=[{wanted!r}]")
    names = tuple(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise unknown_output(name, known)
    return names


def unknown_output(name: str, known: Iterable[str]) -> InputError:
    """Build the error for a requested output that the model does not have."""
    return InputError(f"There is no output {name}.", f"Outputs: {', '.join(known)}.")
