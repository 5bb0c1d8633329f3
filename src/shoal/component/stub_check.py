"""Does this stub carry tensors unharmed? Asked of the real one, at every start."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from shoal.component.spec import DTYPES, STRING
from shoal.component.tensors import triton
from shoal.errors import SetupError


def check_stub() -> None:
    """Send a ramp of each dtype, and a few strings, through this stub's tensors both ways.

    A stub built against another NumPy ABI gives wrong values without an error: Triton 24.10's stub under NumPy 2
    reads 1, 2, 3 as 1, 1, 1 and sends empty outputs.

    Raises:
        SetupError: a value came back changed.
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
    if ramp.dtype != np.bool_:  # which NumPy 1 does not take from DLPack
        trips.append(np.from_dlpack(triton().Tensor("ramp", ramp)))  # outward: by the pointer that Triton would copy
    return all(trip.dtype == ramp.dtype and np.array_equal(trip, ramp) for trip in trips)


def _inward(ramp: np.ndarray[Any, Any]) -> Any:
    """``ramp`` as a request would bring it: in an array that the stub made."""
    pb_utils = triton()
    return pb_utils.Tensor.from_dlpack("ramp", pb_utils.Tensor("ramp", ramp)).as_numpy()


def _strings_survive() -> bool:
    pb_utils = triton()
    strings = np.array([b"shoal", b"", "é\0…".encode()], dtype=np.object_)
    encoded = bytearray(np.asarray(pb_utils.serialize_byte_tensor(strings), np.object_).item())
    blob = np.frombuffer(encoded, np.uint8)  # over a bytearray: DLPack takes no read-only memory
    return bool(np.array_equal(pb_utils.deserialize_bytes_tensor(_inward(blob)), strings))
