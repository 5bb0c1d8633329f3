"""The only door between Triton and arrays: dtypes, devices, and what crosses between them.

Nothing else imports ``triton_python_backend_utils``. Inside the door an array is NumPy's on the host and CuPy's on a
GPU; array code takes its namespace from its input (``namespace(x)``) and so is written once for both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

from shoal.errors import InputError, ServerError, SetupError, ShoalError

Array: TypeAlias = Any  # NumPy, CuPy or torch: whatever array_api_compat knows
Arrays: TypeAlias = Mapping[str, Array]

STRING = "TYPE_STRING"
_DTYPES = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    STRING: np.object_,
}


def namespace(*arrays: Array) -> Any:
    """The array API of ``arrays``: ``numpy``, ``cupy`` or ``torch`` behind one set of names."""
    return array_namespace(*arrays)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as ``config.pbtxt`` declares it; ``dims`` excludes the batch dimension, -1 is any size."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    is_optional: bool = False
    is_ragged: bool = False

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> TensorSpec:
        """Read an ``input`` or ``output`` entry of a model configuration in its JSON form."""
        return cls(
            name=entry["name"],
            dtype=entry.get("data_type", "TYPE_INVALID"),
            dims=tuple(int(d) for d in entry.get("dims", ())),
            is_optional=bool(entry.get("optional", False)),
            is_ragged=bool(entry.get("allow_ragged_batch", False)),
        )

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype; ``object`` for TYPE_STRING, whose elements are ``bytes``."""
        try:
            return np.dtype(_DTYPES[self.dtype])
        except KeyError:
            raise InputError(
                f"Tensor {self.name} has data type {self.dtype}, which has no NumPy form.",
                f"Known: {', '.join(_DTYPES)}.",
            ) from None

    def mismatch(self, array: Array, *, is_batched: bool) -> str:
        """How ``array`` differs from this declaration, in words; empty where it fits."""
        if array.dtype != self.numpy_dtype and str(array.dtype).removeprefix("torch.") != str(self.numpy_dtype):
            return f"{self.name} has dtype {array.dtype}, expected {self.numpy_dtype} ({self.dtype})"
        shape = tuple(array.shape[1:] if is_batched else array.shape)
        is_fit = len(shape) == len(self.dims) and all(d in (-1, s) for s, d in zip(shape, self.dims, strict=True))
        if is_fit and not (is_batched and array.ndim == 0):
            return ""
        wanted = [*(["rows"] if is_batched else []), *self.dims]
        return f"{self.name} has shape {list(array.shape)}, expected [{', '.join(map(str, wanted))}]"


@dataclass(frozen=True)
class Device:
    """Where a component's arrays live: the host, or GPU ``index``."""

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def from_triton(cls, args: Mapping[str, str]) -> Device:
        """The device of a model instance; to be called before any GPU library is imported."""
        is_gpu = args["model_instance_kind"] == "GPU"
        return cls("gpu", int(args["model_instance_device_id"])) if is_gpu else cls()

    @property
    def xp(self) -> Any:
        """The array library of this device."""
        if self.kind == "cpu":
            return np
        import cupy

        cupy.cuda.Device(self.index).use()
        return cupy

    def put(self, array: Array) -> Array:
        """``array`` on this device: the same object where it is there already."""
        if self.kind == "cpu" or not isinstance(array, np.ndarray) or array.dtype == np.object_:
            return array
        return self.xp.asarray(array)


# --- Triton's side of the door -----------------------------------------------------------------------------------


def _triton() -> Any:
    import triton_python_backend_utils as pb_utils

    return pb_utils


def read_request(request: Any, specs: Iterable[TensorSpec], device: Device) -> dict[str, Array]:
    """The inputs of one Triton request, by name, on ``device``; inputs that were left out are absent.

    Tensors already on the device are not copied. TYPE_STRING tensors are NumPy object arrays of ``bytes`` always.
    """
    inputs = {}
    for spec in specs:
        tensor = _triton().get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            inputs[spec.name] = device.put(tensor.as_numpy() if tensor.is_cpu() else device.xp.from_dlpack(tensor))
    return inputs


def make_response(answer: Arrays | ShoalError) -> Any:
    """The Triton response that carries ``answer``."""
    pb_utils = _triton()
    if isinstance(answer, ShoalError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer), _code(answer)))
    return pb_utils.InferenceResponse(output_tensors=[_tensor(name, array) for name, array in answer.items()])


def _tensor(name: str, array: Array) -> Any:
    pb_utils = _triton()
    if isinstance(array, np.ndarray):
        return pb_utils.Tensor(name, np.ascontiguousarray(array))
    # The array itself, never a capsule: Triton orders its copy after the producer's stream only for the former.
    return pb_utils.Tensor.from_dlpack(name, array)


def _code(error: ShoalError) -> Any:
    codes = _triton().TritonError
    if isinstance(error, InputError):
        return codes.INVALID_ARG
    return codes.UNAVAILABLE if isinstance(error, ServerError) else codes.INTERNAL


def self_test() -> None:
    """Send a ramp of each dtype, and a few strings, through this stub's tensors both ways.

    A stub built against another NumPy ABI gives wrong values without an error: Triton 24.10's stub under NumPy 2
    reads 1, 2, 3 as 1, 1, 1 and sends empty outputs.

    Raises:
        SetupError: a value came back changed.
    """
    for name, dtype in _DTYPES.items():
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
    if ramp.dtype != np.bool_:  # which NumPy 1 does not take from DLPack
        trips.append(np.from_dlpack(_triton().Tensor("ramp", ramp)))  # outward: by the pointer that Triton would copy
    return all(trip.dtype == ramp.dtype and np.array_equal(trip, ramp) for trip in trips)


def _inward(ramp: np.ndarray[Any, Any]) -> Any:
    """``ramp`` as a request would bring it: in an array that the stub made."""
    pb_utils = _triton()
    return pb_utils.Tensor.from_dlpack("ramp", pb_utils.Tensor("ramp", ramp)).as_numpy()


def _strings_survive() -> bool:
    pb_utils = _triton()
    strings = np.array([b"shoal", b"", "é\0…".encode()], dtype=np.object_)
    encoded = bytearray(np.asarray(pb_utils.serialize_byte_tensor(strings), np.object_).item())
    blob = np.frombuffer(encoded, np.uint8)  # over a bytearray: DLPack takes no read-only memory
    return bool(np.array_equal(pb_utils.deserialize_bytes_tensor(_inward(blob)), strings))
