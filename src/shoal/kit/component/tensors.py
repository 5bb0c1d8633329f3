"""Devices, array transfer, and conversion between Triton's tensors and arrays.

No other module imports ``triton_python_backend_utils``. Arrays are NumPy's on the host and CuPy's or torch's on a GPU.
Code takes the array functions from ``namespace(array)``, so it is written once for all three libraries.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from shoal.errors import InputError, ServerError, SetupError, ShoalError, needs
from shoal.kit.component.ledger import ACROSS, DOWN, UP, Ledger
from shoal.kit.component.spec import DTYPES, ENGINE_LIBRARY, HOST_LIBRARY, STRING, Array, Arrays, ModelSpec, TensorSpec

_DL_CPU = 1  # DLDeviceType of the host, in dlpack.h


def namespace(*arrays: Array) -> Any:
    """Return the array functions for ``arrays``: a module with the Python array API for NumPy, CuPy or torch."""
    return array_namespace(*arrays)


@dataclass(frozen=True)
class Device:
    """Device of a component's arrays: the host, or GPU number ``index``. ``ledger`` records copies to and from it.

    ``kind`` is that of the model's instance: ``cpu``, ``gpu``, or ``model`` (KIND_MODEL). On a GPU, ``library`` is the
    array library, ``cupy`` or ``torch``. All work is queued on the default CUDA stream, so calls of different libraries
    run in order. With ``numpy``, the component computes on the host only. With ``engine``, its arrays are on the host
    as well, and what it calls computes on the GPU.
    """

    kind: str = "cpu"
    index: int = 0
    library: str = "cupy"
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)

    @classmethod
    def from_triton(cls, args: Mapping[str, str], library: str = "cupy") -> Device:
        """Return the device of a model instance from Triton's ``args``; call this before importing CuPy or torch."""
        kind = args["model_instance_kind"].lower()
        return cls() if kind == "cpu" else cls(kind, int(args["model_instance_device_id"]), library)

    @property
    def is_host(self) -> bool:
        """Whether arrays live in the host's memory."""
        return self.kind == "cpu" or self.library == ENGINE_LIBRARY

    @property
    def xp(self) -> Any:
        """Module with the Python array API for this device's library."""
        if self.is_host:
            return np
        return importlib.import_module(f"array_api_compat.{self.library}")

    @property
    def torch_name(self) -> str:
        """torch's name for this device: ``cpu``, or for example ``cuda:0``."""
        return "cpu" if self.is_host else f"cuda:{self.index}"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this device and its default CUDA stream current in the ``with`` block."""
        if self.is_host:
            yield
        elif self.library == "torch":
            import torch

            with torch.cuda.device(self.index), torch.cuda.stream(torch.cuda.default_stream(self.index)):
                yield
        else:
            import cupy

            with cupy.cuda.Device(self.index), cupy.cuda.Stream.null:
                yield

    def prepare(self) -> None:
        """Select the GPU and install one memory pool, shared by CuPy and libcudf; call this before any allocation.

        Raises:
            SetupError: the component cannot compute on this kind of device, the GPU does not exist, or its library is
                not installed.
        """
        if self.is_host:
            return
        if self.kind == "model" or self.library == HOST_LIBRARY:
            kinds = "KIND_CPU" if self.library == HOST_LIBRARY else "KIND_CPU or KIND_GPU"
            raise SetupError(
                f"Its instance has KIND_{self.kind.upper()}, and the component computes with {kinds} only.",
                "Write instance_group [ { kind: KIND_CPU } ] into its config.pbtxt, or compose with --place MODEL=cpu",
            )
        with needs("gpu"):
            num_gpus = _prepare_torch(self.index) if self.library == "torch" else _prepare_cupy(self.index)
        if self.index >= num_gpus:
            raise SetupError(
                f"This model is placed on GPU {self.index}; its process sees {num_gpus} GPUs.",
                "Compose with --placement cpu, or name another GPU with --gpu.",
            )

    def owns(self, array: Array) -> bool:
        """Whether ``array`` is already on this device, in this device's own library."""
        if isinstance(array, np.ndarray):
            return self.is_host
        if self.is_host or not is_array_api_obj(array) or namespace(array) is not self.xp:
            return False
        place = array.device
        return bool((place.index if self.library == "torch" else place.id) == self.index)

    def put(self, array: Array, edge: str) -> Array:
        """Return ``array`` itself if it is on this device, else a copy there, which the ledger counts at ``edge``.

        ``array`` is a NumPy array or has ``__dlpack__``. Another library's array on this device is shared
        without a copy, and is read only after the work that this library has queued. Arrays of ``bytes`` stay on the
        host.
        """
        if self.owns(array) or (isinstance(array, np.ndarray) and array.dtype == np.object_):
            return array
        if self.is_host:
            return self.fetch(array, edge)
        start = time.perf_counter()
        if not isinstance(array, np.ndarray) and array.__dlpack_device__()[0] == _DL_CPU:
            array = np.from_dlpack(array)
        if isinstance(array, np.ndarray):
            here, direction = self._upload(np.ascontiguousarray(array)), UP
        else:
            here, direction = self._adopt(array)
        if direction:
            self.ledger.record(edge, direction, int(here.nbytes), time.perf_counter() - start)
        return here

    def _upload(self, array: np.ndarray[Any, Any]) -> Array:
        if self.library != "torch":
            with self.active():
                return self.xp.asarray(array)
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors
        return self.xp.from_numpy(array).to(self.torch_name)

    def _adopt(self, array: Any) -> tuple[Array, str]:
        """Import another library's device array; return it, and the direction of the copy (empty if there was none)."""
        source = int(array.__dlpack_device__()[1])
        with replace(self, index=source).active():
            ours = self.xp.from_dlpack(array)
        if source == self.index:
            return ours, ""
        with self.active():
            return (ours.to(self.torch_name) if self.library == "torch" else ours.copy()), ACROSS

    def fetch(self, array: Array, edge: str) -> np.ndarray[Any, Any]:
        """Return ``array`` itself if it is on the host, else a copy there, which the ledger counts at ``edge``.

        The copy waits for queued work on the array. All copies from device to host are made here; a test refuses any
        other read of a device array's values.
        """
        if isinstance(array, np.ndarray):
            return array
        if array.__dlpack_device__()[0] == _DL_CPU and not self.owns(array):
            return np.from_dlpack(array)
        start = time.perf_counter()
        there = self._download(array)
        self.ledger.record(edge, DOWN, there.nbytes, time.perf_counter() - start)
        return there

    def _download(self, array: Any) -> np.ndarray[Any, Any]:
        if hasattr(array, "cpu"):  # torch's, which copies on its current stream
            with replace(self, kind="gpu", index=array.device.index, library="torch").active():
                return np.asarray(array.detach().cpu())
        try:
            import cupy
        except ModuleNotFoundError:  # a component on the host, with a tensor that another one left on a GPU
            with needs("gpu"):
                import torch
            return np.asarray(torch.utils.dlpack.from_dlpack(array).cpu())
        with cupy.cuda.Device(int(array.__dlpack_device__()[1])), cupy.cuda.Stream.null:
            return np.asarray(cupy.asnumpy(array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)))


@cache
def _prepare_torch(index: int) -> int:
    import torch

    count = torch.cuda.device_count()
    if index < count:
        torch.cuda.set_device(index)
        # cuDNN's attention makes a plan for each new number and length of rows, in each thread: 40 to 90 ms on an H100,
        # where the others need none and are at most a tenth slower.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return count


@cache  # a second pool could not reuse the memory that the first one holds
def _prepare_cupy(index: int) -> int:
    import cupy

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver
        return 0
    if index < count:
        cupy.cuda.Device(index).use()
        _share_pool(cupy)
    return count


def _share_pool(cupy: Any) -> None:
    """Let CuPy allocate from RMM's asynchronous pool, as libcudf does; without RMM, from CUDA's asynchronous pool."""
    try:
        import rmm
        from rmm.allocators.cupy import rmm_cupy_allocator
    except ModuleNotFoundError:
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        return
    rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())
    cupy.cuda.set_allocator(rmm_cupy_allocator)


# --- Triton's requests and responses -----------------------------------------------------------------------------


def triton() -> Any:
    """Import ``triton_python_backend_utils``, which exists only in a process of the Python backend (a stub)."""
    import triton_python_backend_utils as pb_utils

    return pb_utils


def to_inside(declared: Iterable[TensorSpec], arrays: Arrays, *, is_batched: bool) -> Arrays:
    """Give tensors the shapes that the model itself has (``reshape``).

    Triton does so with inputs before it calls a model, and expects outputs in these shapes.
    """
    inner = {tensor.name: tensor.inner for tensor in declared if tensor.inner is not None}
    shapes = {name: (*arrays[name].shape[: int(is_batched)], *inner[name]) for name in inner if name in arrays}
    return {**arrays, **{name: arrays[name].reshape(shape) for name, shape in shapes.items()}} if shapes else arrays


def read_request(request: Any, spec: ModelSpec, device: Device) -> dict[str, Array]:
    """Return the inputs of one Triton request by name; omitted optional inputs are absent.

    Host tensors are NumPy arrays and stay on the host until the batch is joined, even if ``device`` is a GPU: this
    gives one upload per batch, not one per request. TYPE_STRING tensors are object arrays of ``bytes``. GPU tensors
    become arrays of ``device`` without a copy, unless they are on another GPU.

    Raises:
        InputError: a required tensor is missing, or a tensor does not have the declared shape. Triton does not refuse
            all such requests: it only compares the number of tensors, accepts 0 rows with the data of one row, and
            counts rows in 32 bits.
    """
    inputs = {}
    for declared in spec.inputs:
        tensor = triton().get_input_tensor_by_name(request, declared.name)
        if tensor is None and not declared.is_optional:
            raise InputError(f"Input {declared.name} of model {spec.name} is missing.", f"Send it: {declared.dtype}.")
        if tensor is None:
            continue
        array = tensor.as_numpy() if tensor.is_cpu() else device.put(tensor, declared.name)
        mismatch = declared.inside.mismatch(array, is_batched=spec.is_batched)
        if mismatch:
            raise InputError(f"Input {mismatch}, as the config of model {spec.name} declares.", "Send 1 row or more.")
        inputs[declared.name] = array
    return inputs


def request_parameters(request: Any) -> dict[str, Any]:
    """Return the request's parameters; an ensemble passes them to each of its steps.

    Raises:
        InputError: the parameters are not UTF-8; Triton does not check this.
    """
    try:
        return dict(json.loads(request.parameters() or "{}"))
    except ValueError:  # UnicodeDecodeError, from the stub, is one
        raise InputError("The request's parameters are not UTF-8.", "Send names and values as UTF-8 text.") from None


def make_response(answer: Arrays | ShoalError) -> Any:
    """Build the Triton response for outputs or an error."""
    pb_utils = triton()
    if isinstance(answer, ShoalError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer), _code(answer)))
    return pb_utils.InferenceResponse(output_tensors=[_tensor(name, array) for name, array in answer.items()])


def _tensor(name: str, array: Array) -> Any:
    if isinstance(array, np.ndarray):
        return triton().Tensor(name, np.ascontiguousarray(array))
    # Triton accepts only C order. Pass the array itself, not a capsule: only then does Triton order its copy after
    # the producer's stream.
    is_torch = hasattr(array, "contiguous")
    array = array.detach().contiguous() if is_torch else namespace(array).ascontiguousarray(array)
    return triton().Tensor.from_dlpack(name, array)


def make_request(
    model: str, inputs: Arrays, outputs: Sequence[str], request_id: str, parameters: Mapping[str, str] | None = None
) -> Any:
    """Build a request to another model of this server; empty ``outputs`` requests all outputs."""
    return triton().InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=[_tensor(name, array) for name, array in inputs.items()],
        request_id=request_id,
        parameters=dict(parameters or {}),
    )


def read_response(response: Any, device: Device) -> dict[str, Array]:
    """Return the outputs of another model's response: GPU tensors as arrays on ``device``, others as NumPy arrays.

    Raises:
        ShoalError: the response is an error. Triton 24.10 does not pass on the error's code.
    """
    if response.has_error():
        raise ShoalError(response.error().message())
    return {
        tensor.name(): tensor.as_numpy() if tensor.is_cpu() else device.put(tensor, tensor.name())
        for tensor in response.output_tensors()
    }


def _code(error: ShoalError) -> Any:
    codes = triton().TritonError
    if isinstance(error, InputError):
        return codes.INVALID_ARG
    return codes.UNAVAILABLE if isinstance(error, ServerError) else codes.INTERNAL


# --- self-test of the stub's tensors, run at every start ---------------------------------------------------------


def check_stub() -> None:
    """Check that numbers of each dtype, and strings, are unchanged when this stub converts them to tensors and back.

    A stub built against another NumPy ABI gives wrong values without an error: Triton 24.10's stub under NumPy 2
    reads 1, 2, 3 as 1, 1, 1 and sends empty outputs.

    Raises:
        SetupError: a value was changed.
    """
    for name, dtype in DTYPES.items():
        ramp = np.arange(12).reshape(3, 4)
        try:
            is_exact = _strings_survive() if name == STRING else _survives(ramp.astype(dtype))
        except Exception:
            logging.getLogger("shoal").exception("self-test of %s", name)
            is_exact = False
        if not is_exact:
            raise SetupError(
                f"This stub corrupts {name} tensors under NumPy {np.__version__}.",
                "Use numpy<2 in the environment of a Triton 24.10 stub, or a stub built for NumPy 2.",
            )


def _survives(ramp: np.ndarray[Any, Any]) -> bool:
    trips = [_inward(ramp)]
    if ramp.dtype != np.bool_:  # NumPy 1 does not accept booleans from DLPack
        trips.append(np.from_dlpack(triton().Tensor("ramp", ramp)))  # outward: by the pointer that Triton would copy
    return all(trip.dtype == ramp.dtype and np.array_equal(trip, ramp) for trip in trips)


def _inward(ramp: np.ndarray[Any, Any]) -> Any:
    """Return ``ramp`` as a component would get it from a request: as an array that the stub made."""
    pb_utils = triton()
    return pb_utils.Tensor.from_dlpack("ramp", pb_utils.Tensor("ramp", ramp)).as_numpy()


def _strings_survive() -> bool:
    pb_utils = triton()
    strings = np.array([b"shoal", b"", "é\0…".encode()], dtype=np.object_)
    encoded = bytearray(np.asarray(pb_utils.serialize_byte_tensor(strings), np.object_).item())
    blob = np.frombuffer(encoded, np.uint8)  # over a bytearray: DLPack refuses read-only memory
    return bool(np.array_equal(pb_utils.deserialize_bytes_tensor(_inward(blob)), strings))
