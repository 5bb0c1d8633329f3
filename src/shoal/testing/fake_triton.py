"""A stand-in for ``triton_python_backend_utils`` where no stub runs: component tests without a server.

It models what bites in the real one: tensors on the host or on a GPU, DLPack capsules that can be taken once, the
contiguity rule, which requests Triton joins to one ``execute``, cancellation, and what Triton does not forgive (a
missing response). What it does not model is speed and memory.

Names and signatures are the real module's, so nothing here is ours to choose.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.component.base import Component
from shoal.component.spec import ModelSpec

Array = np.ndarray[Any, Any]
_CPU, _CUDA = 1, 2  # DLDeviceType


class TritonModelException(Exception):  # noqa: N818
    """What the real module raises."""


class TritonError:
    """An error for one response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        """The text that a client gets."""
        return self._message

    def code(self) -> int:
        """One of the class's constants."""
        return self._code


class Tensor:
    """A named tensor; ``is_on_gpu`` only pretends, so that code paths can be tried without one."""

    def __init__(self, name: str, array: Array, *, is_on_gpu: bool = False) -> None:
        self._name, self._array, self._is_on_gpu = name, np.ascontiguousarray(array), is_on_gpu

    def name(self) -> str:
        """The tensor's name."""
        return self._name

    def is_cpu(self) -> bool:
        """Whether it lies on the host."""
        return not self._is_on_gpu

    def as_numpy(self) -> Array:
        """The array; a GPU tensor has none."""
        if self._is_on_gpu:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        return self._array

    def to_dlpack(self) -> Any:
        """A capsule, which can be taken once."""
        if self._array.dtype == np.object_:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return self._array.__dlpack__()

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA if self._is_on_gpu else _CPU, 0)

    @staticmethod
    def from_dlpack(name: str, source: Any) -> Tensor:
        """A tensor over ``source``'s memory: an object with ``__dlpack__``, or a capsule."""
        if isinstance(source, np.ndarray):
            raise TritonModelException("The real stub of 24.10 dies here of a segmentation fault.")
        array = np.from_dlpack(source if hasattr(source, "__dlpack__") else _Holder(source))
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. "
                "Only contiguous DLPack tensors that are stored in C-Order are supported."
            )
        is_on_gpu = hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] == _CUDA
        return Tensor(name, array, is_on_gpu=is_on_gpu)


@dataclass
class _Holder:
    """Makes a bare capsule what NumPy asks for; taking it again fails there, as in the real stub."""

    capsule: Any

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


@dataclass
class InferenceRequest:
    """One request as ``execute`` gets it."""

    tensors: Sequence[Tensor]
    id: str = ""
    has_gone: bool = False
    sent_beside: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> str:
        """What was sent beside the tensors, as JSON."""
        return json.dumps(dict(self.sent_beside))

    def inputs(self) -> list[Tensor]:
        """Its input tensors."""
        return list(self.tensors)

    def request_id(self) -> str:
        """The client's own id."""
        return self.id

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return self.has_gone


@dataclass
class InferenceResponse:
    """One answer: tensors, or an error."""

    output_tensors: Sequence[Tensor] = field(default_factory=list)
    error: TritonError | None = None

    def arrays(self) -> dict[str, Array]:
        """The outputs by name.

        Raises:
            TritonModelException: the response carries an error.
        """
        if self.error is not None:
            raise TritonModelException(self.error.message())
        return {tensor.name(): tensor.as_numpy() for tensor in self.output_tensors}


class MetricFamily:
    """Custom metrics of one name."""

    COUNTER, GAUGE = range(2)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str]) -> Metric:  # noqa: N802
        """The metric with these labels."""
        return Metric(self.kind, dict(labels))


@dataclass
class Metric:
    """One number."""

    kind: int
    labels: Mapping[str, str]
    number: float = 0.0

    def increment(self, added: float) -> None:
        """Add to it; a counter refuses to fall."""
        if added < 0 and self.kind == MetricFamily.COUNTER:
            raise TritonModelException("Cannot decrease a counter.")
        self.number += added


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """The input called ``name``, or None."""
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def serialize_byte_tensor(array: Array) -> bytes:
    """Each element after its length in four bytes, little-endian."""
    return b"".join(struct.pack("<I", len(element)) + element for element in array.ravel().tolist())


def deserialize_bytes_tensor(encoded: Array) -> Array:
    """The reverse, one-dimensional."""
    blob, elements, start = encoded.tobytes(), [], 0
    while start < len(blob):
        (length,) = struct.unpack_from("<I", blob, start)
        elements.append(blob[start + 4 : start + 4 + length])
        start += 4 + length
    return np.array(elements, np.object_)


# --- and who calls it, in place of a server ----------------------------------------------------------------------


@contextmanager
def installed() -> Iterator[None]:
    """This module under the real one's name."""
    name = "triton_python_backend_utils"
    before = sys.modules.get(name)
    sys.modules[name] = sys.modules[__name__]
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


class Stub:
    """One model instance: ``initialize`` once, then ``execute`` on what Triton's batcher would join.

    ``config`` is the model's configuration in its JSON form; ``kind`` is CPU or GPU.
    """

    def __init__(
        self,
        component: type[Component],
        folder: Path,
        config: Mapping[str, Any],
        *,
        version: int = 1,
        kind: str = "CPU",
    ) -> None:
        self.spec = ModelSpec.from_config(config)
        self._batches_dynamically = "dynamic_batching" in config
        self._model = component.for_triton()()
        args = {
            "model_repository": str(folder),
            "model_name": self.spec.name,
            "model_version": str(version),
            "model_instance_name": f"{self.spec.name}_0_0",
            "model_instance_kind": kind,
            "model_instance_device_id": "0",
            "model_config": json.dumps(config),
        }
        with installed():
            self._model.initialize(args)
        self.batch_sizes: list[int] = []

    def infer(self, *requests: Mapping[str, Array] | InferenceRequest) -> list[InferenceResponse]:
        """Answer requests that wait at the same time, in order."""
        made = [r if isinstance(r, InferenceRequest) else _request(r) for r in requests]
        answers: list[InferenceResponse] = []
        for batch in self._batches(made):
            self.batch_sizes.append(len(batch))
            with installed():
                responses = self._model.execute(batch)
            if responses is None or len(responses) != len(batch) or None in responses:
                raise TritonModelException("A request got no response: with the real server its client waits for ever.")
            answers += responses
        return answers

    def finalize(self) -> None:
        """Unload the model."""
        self._model.finalize()

    def _batches(self, requests: Sequence[InferenceRequest]) -> Iterator[list[InferenceRequest]]:
        """Neighbours in the queue that bring the same inputs in the same shapes; ragged inputs may differ in width.

        Without ``dynamic_batching`` every request comes alone.
        """
        batch: list[InferenceRequest] = []
        for request in requests:
            rows = sum(r.tensors[0]._array.shape[0] for r in [*batch, request])
            is_alike = self._batches_dynamically and bool(batch) and self._shape(request) == self._shape(batch[0])
            if batch and (not is_alike or rows > self.spec.max_batch_size):
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def _shape(self, request: InferenceRequest) -> dict[str, tuple[int, ...]]:
        ragged = {tensor.name for tensor in self.spec.inputs if tensor.is_ragged}
        return {t.name(): () if t.name() in ragged else t._array.shape[1:] for t in request.tensors}


def _request(inputs: Mapping[str, Array]) -> InferenceRequest:
    return InferenceRequest([Tensor(name, array) for name, array in inputs.items()])
