"""Fake of ``triton_python_backend_utils``, for component tests without a server.

It models the real module's pitfalls: tensors on the host or on a GPU, DLPack capsules that can be consumed once, the
contiguity rule, dynamic batching, cancellation, and failure on a missing response. It does not model speed or memory.

Names and signatures are the real module's.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from shoal.kit.component.base import Component
from shoal.kit.component.spec import ModelSpec

Array = np.ndarray[Any, Any]
_PATIENCE = 60.0  # seconds that an answer may take
_CPU, _CUDA = 1, 2  # DLDeviceType
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
known_models: dict[str, Stub] = {}  # that requests made by a model reach
deaths: list[str] = []  # what would have ended or blocked the real server


class TritonModelException(Exception):  # noqa: N818
    """Exception of the real module."""


class TritonError:
    """An error for one response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        """Return the text that a client gets."""
        return self._message

    def code(self) -> int:
        """Return the code, one of the class's constants."""
        return self._code


class Tensor:
    """Named tensor; ``is_on_gpu`` simulates a GPU tensor, so that code paths can be tested without a GPU."""

    def __init__(self, name: str, array: Array, *, is_on_gpu: bool = False) -> None:
        self._name, self._array, self._is_on_gpu = name, np.ascontiguousarray(array), is_on_gpu

    def name(self) -> str:
        """Return the tensor's name."""
        return self._name

    def is_cpu(self) -> bool:
        """Whether it is on the host."""
        return not self._is_on_gpu

    def as_numpy(self) -> Array:
        """Return the array; a GPU tensor raises, as in the real module."""
        if self._is_on_gpu:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        return self._array

    def to_dlpack(self) -> Any:
        """Return a capsule, which can be consumed once."""
        if self._array.dtype == np.object_:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return self._array.__dlpack__()

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA if self._is_on_gpu else _CPU, 0)

    @staticmethod
    def from_dlpack(name: str, source: Any) -> Tensor:
        """Create a tensor over the memory of ``source``: an object with ``__dlpack__``, or a capsule."""
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
    """Adapter that lets NumPy import a bare capsule; a second import fails in NumPy, as in the real stub."""

    capsule: Any

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


class InferenceRequest:
    """Request as passed to ``execute``, or made by a model that asks another one of ``known_models``."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        request_id: str = "",
        *,
        model_name: str = "",
        requested_output_names: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        has_gone: bool = False,
    ) -> None:
        self.tensors, self.id, self.has_gone = inputs, request_id, has_gone
        self._model, self._wanted = model_name, requested_output_names
        self._parameters = dict(parameters or {})
        self._sender: ResponseSender | None = None

    def parameters(self) -> str:
        """Return the request's parameters as JSON."""
        return json.dumps(self._parameters)

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return list(self.tensors)

    def request_id(self) -> str:
        """Return the id given by the client."""
        return self.id

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled."""
        return self.has_gone

    def get_response_sender(self) -> ResponseSender:
        """Return the sender of a decoupled model's answers."""
        self._sender = self._sender or ResponseSender(self)
        return self._sender

    def exec(self, *, decoupled: bool = False) -> Any:
        """Ask the model ``model_name``: one response, or with ``decoupled`` an iterator over any number."""
        if self._model not in known_models:
            raise TritonModelException(f"Failed for execute the inference request. Model '{self._model}' is not ready.")
        stub = known_models[self._model]
        if decoupled:
            return _as_bls_gives(stub.stream(self))
        if stub.spec.is_decoupled:
            raise TritonModelException("Models using decoupled transaction policy may only run with decoupled=True.")
        return stub.infer(self)[0]


class InferenceResponse:
    """Response to one request: tensors, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.tensors, self.fault = output_tensors, error

    def output_tensors(self) -> list[Tensor]:
        """Return the outputs."""
        return list(self.tensors)

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self.fault is not None

    def error(self) -> Any:
        """Return the error."""
        return self.fault

    def arrays(self) -> dict[str, Array]:
        """Return the outputs by name.

        Raises:
            TritonModelException: the response is an error.
        """
        if self.fault is not None:
            raise TritonModelException(self.fault.message())
        return {tensor.name(): tensor.as_numpy() for tensor in self.tensors}


class ResponseSender:
    """Sender of a request's answers, with the traps of the real one."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._has_ended = False
        self.sent: Queue[InferenceResponse | None] = Queue()

    def send(self, response: InferenceResponse | None = None, *, flags: int = 0) -> None:
        """Send an answer, the end, or both."""
        if self._has_ended:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None:
            self.sent.put(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self._has_ended = True
            self.sent.put(None)

    def is_cancelled(self) -> bool:
        """Whether the client has left; the real server of 24.10 ends with signal 11 if this is asked after the end."""
        if self._has_ended:
            deaths.append("is_cancelled() after the final flag ends the real server with signal 11")
        return self._request.has_gone


def _as_bls_gives(responses: Iterator[InferenceResponse]) -> Iterator[InferenceResponse]:
    """Yield what the real 24.10 does: the end, and an error after an answer, is a response without either."""
    for number, response in enumerate(responses):
        if response.has_error():
            yield InferenceResponse() if number else response
            if not number:
                deaths.append("reading on after an error in the first response never ends on the real server")
            return
        yield response
    yield InferenceResponse()


class MetricFamily:
    """Family of custom metrics with one name."""

    COUNTER, GAUGE = range(2)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: Mapping[str, str]) -> Metric:  # noqa: N802
        """Create the metric with these labels."""
        return Metric(self.kind, dict(labels))


@dataclass
class Metric:
    """Metric value with its labels."""

    kind: int
    labels: Mapping[str, str]
    number: float = 0.0

    def increment(self, added: float) -> None:
        """Add to the value; a counter refuses negative amounts."""
        if added < 0 and self.kind == MetricFamily.COUNTER:
            raise TritonModelException("Cannot decrease a counter.")
        self.number += added

    def set(self, value: float) -> None:
        """Set the value of a gauge; a counter refuses it."""
        if self.kind == MetricFamily.COUNTER:
            raise TritonModelException("Only gauges can be set.")
        self.number = value


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input called ``name``, or None."""
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def serialize_byte_tensor(array: Array) -> bytes:
    """Serialise each element after its length in four bytes, little-endian."""
    return b"".join(struct.pack("<I", len(element)) + element for element in array.ravel().tolist())


def deserialize_bytes_tensor(encoded: Array) -> Array:
    """Reverse ``serialize_byte_tensor``; the result is one-dimensional."""
    blob, elements, start = encoded.tobytes(), [], 0
    while start < len(blob):
        (length,) = struct.unpack_from("<I", blob, start)
        elements.append(blob[start + 4 : start + 4 + length])
        start += 4 + length
    return np.array(elements, np.object_)


# --- the caller, in place of a server ----------------------------------------------------------------------------


@contextmanager
def installed() -> Iterator[None]:
    """Register this module under the real one's name inside the context."""
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
    """Model instance: ``initialize`` once, then ``execute`` on batches as Triton's dynamic batcher would form them.

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
        """Answer requests that are queued at the same time, in order."""
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

    def stream(self, request: Mapping[str, Array] | InferenceRequest) -> Iterator[InferenceResponse]:
        """Yield a decoupled model's answers to one request. Its threads need ``installed()`` for as long as it runs."""
        made = request if isinstance(request, InferenceRequest) else _request(request)
        if not self.spec.is_decoupled:
            yield from self.infer(made)
            return
        if self._model.execute([made]) is not None:
            raise TritonModelException("A decoupled model returns nothing from execute.")
        sent = made.get_response_sender().sent
        while (response := sent.get(timeout=_PATIENCE)) is not None:
            yield response

    def finalize(self) -> None:
        """Unload the model."""
        self._model.finalize()

    def _batches(self, requests: Sequence[InferenceRequest]) -> Iterator[list[InferenceRequest]]:
        """Batch neighbours in the queue that have the same inputs and shapes; ragged inputs may differ in width.

        Without ``dynamic_batching`` every request is a batch of its own.
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
