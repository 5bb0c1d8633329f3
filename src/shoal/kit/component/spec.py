"""Model and tensor declarations parsed from ``config.pbtxt``: the subset needed to run a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError

Array: TypeAlias = Any  # NumPy, CuPy or torch: whatever array_api_compat knows
Arrays: TypeAlias = Mapping[str, Array]

STRING = "TYPE_STRING"
CALLS = "calls"  # parameter of a configuration: names of the models that the code calls, separated by spaces
TOGETHER = "together"  # parameter, and folder of a version: those of the called models that run in the caller's process
HOSTED_CONFIG = "config.pbtxt.json"  # of such a model: its config.pbtxt, as Triton hands it to a component
STOP = "stop"  # optional input of a streaming model: a request with it ends the running request of the same id
BATCH_INDEX = "batch_index"  # output of a streaming model, INT32 [1]: the row of the request that is answered
REPOSITORY = "shoal_repository"  # parameter of a model's configuration and of a request: digest of its repository
# Values of Component.library for components whose arrays stay on the host.
HOST_LIBRARY, ENGINE_LIBRARY = "numpy", "engine"
FILES = "shoal_files"  # parameter of a model that is not Python code, and of a request: digest of the model's files
OTHER_REPOSITORY = "The server has another"  # start of the error for a request with another digest
DTYPES = {
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


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as ``config.pbtxt`` declares it; ``dims`` excludes the batch dimension; -1 is any size.

    ``inner`` are the dims that the model itself has, by ``reshape``; None without it. Triton gives a model its inputs
    in this shape, and takes its outputs in the declared one.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    is_optional: bool = False
    is_ragged: bool = False
    inner: tuple[int, ...] | None = None

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> TensorSpec:
        """Read an ``input`` or ``output`` entry of a model configuration in its JSON form."""
        return cls(
            name=entry.get("name", ""),
            dtype=entry.get("data_type", "TYPE_INVALID"),
            dims=tuple(int(d) for d in entry.get("dims", ())),
            is_optional=bool(entry.get("optional", False)),
            is_ragged=bool(entry.get("allow_ragged_batch", False)),
            inner=tuple(int(d) for d in entry["reshape"].get("shape", ())) if "reshape" in entry else None,
        )

    @cached_property
    def inside(self) -> TensorSpec:
        """The tensor as the model itself has it."""
        return self if self.inner is None else replace(self, dims=self.inner, inner=None)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy dtype; ``object`` for TYPE_STRING, whose elements are ``bytes``."""
        try:
            return np.dtype(DTYPES[self.dtype])
        except KeyError:
            raise InputError(
                f"Tensor {self.name} has data type {self.dtype}, which has no NumPy form.",
                f"Known: {', '.join(DTYPES)}.",
            ) from None

    @property
    def item_bytes(self) -> int:
        """Bytes per element of a dtype other than TYPE_STRING. BF16 has no NumPy form."""
        return 2 if self.dtype == "TYPE_BF16" else self.numpy_dtype.itemsize

    @property
    def kind(self) -> str:
        """Dtype and shape, without the batch dimension, such as ``FP32 [31]``."""
        return f"{self.dtype.removeprefix('TYPE_')} {list(self.dims)}"

    def zeros(self, rows: int | None, text: bytes = b"") -> NDArray[Any]:
        """Return zeros, or copies of ``text`` for TYPE_STRING, shaped ``[rows, *dims]``; ``dims`` if ``rows`` is None.

        A dimension of -1 has size 1.
        """
        shape = [*([] if rows is None else [rows]), *(1 if size == -1 else size for size in self.dims)]
        return np.full(shape, text if self.dtype == STRING else 0, self.numpy_dtype)

    def mismatch(self, array: Any, *, is_batched: bool) -> str:
        """Describe how ``array`` differs from this declaration; empty if it fits."""
        if array.dtype != self.numpy_dtype and str(array.dtype).removeprefix("torch.") != str(self.numpy_dtype):
            return f"{self.name} has dtype {array.dtype}, expected {self.numpy_dtype} ({self.dtype})"
        shape = tuple(array.shape[1:] if is_batched else array.shape)
        is_fit = len(shape) == len(self.dims) and all(d in (-1, s) for s, d in zip(shape, self.dims, strict=True))
        if is_fit and not (is_batched and array.ndim == 0):
            return ""
        wanted = [*(["rows"] if is_batched else []), *self.dims]
        return f"{self.name} has shape {list(array.shape)}, expected [{', '.join(map(str, wanted))}]"


@dataclass(frozen=True)
class ModelSpec:
    """Declaration of one model: tensors, batching, instances and parameters.

    ``max_batch_size`` 0 means that tensors have no batch dimension. ``is_decoupled`` is true if a request
    gets any number of answers, even none. It is false for an ensemble, whose configuration does not say this.
    ``filename`` is the field ``default_model_filename``: the model's file, if it has not the backend's usual name.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    num_instances: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_decoupled: bool = False
    filename: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a model configuration in its JSON form, as Triton passes it to the Python backend."""
        groups = config.get("instance_group", [])
        return cls(
            name=config["name"],
            inputs=tuple(map(TensorSpec.from_config, config.get("input", []))),
            outputs=tuple(map(TensorSpec.from_config, config.get("output", []))),
            max_batch_size=int(config.get("max_batch_size", 0)),
            num_instances=max(1, sum(int(g.get("count", 1)) * max(1, len(g.get("gpus", ()))) for g in groups)),
            parameters={key: entry.get("string_value", "") for key, entry in config.get("parameters", {}).items()},
            is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            filename=config.get("default_model_filename", ""),
        )

    @property
    def signature(self) -> str:
        """The model as a function: ``name(TEXT: STRING [1], WEIGHT: FP32 [1] = None) -> SCORE: FP32 [1]``."""
        inputs = ", ".join(f"{t.name}: {t.kind}{' = None' if t.is_optional else ''}" for t in self.inputs)
        return f"{self.name}({inputs}) -> {', '.join(f'{t.name}: {t.kind}' for t in self.outputs)}"

    @property
    def is_batched(self) -> bool:
        """Whether the first dimension of every tensor counts rows."""
        return self.max_batch_size > 0
