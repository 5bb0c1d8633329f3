"""Joining requests to one batch, checking what came out, and splitting it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from array_api_compat import device as device_of

from shoal.component.spec import ModelSpec, TensorSpec
from shoal.component.tensors import Array, Arrays, Device, namespace
from shoal.errors import ShoalError

_MAX_CONCAT = 8  # for more arrays CuPy sends a table of pointers up


def join(spec: ModelSpec, requests: Sequence[Arrays], device: Device) -> tuple[Arrays, list[int]]:
    """One batch on ``device`` of all requests, which share one set of inputs, and the number of rows each brought.

    Inputs that allow ragged batches are padded with zeros to the widest request. What lies on the host is joined there
    and goes up in one copy. A single request that is in place already is not copied.
    """
    counts = [_rows(request) for request in requests] if spec.is_batched else [1]
    names = requests[0].keys()
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    return {name: _join(inputs[name], [request[name] for request in requests], device) for name in names}, counts


def _join(tensor: TensorSpec, arrays: Sequence[Array], device: Device) -> Array:
    if len(arrays) == 1:
        return device.put(arrays[0], tensor.name)
    if not all(isinstance(array, np.ndarray) for array in arrays):  # some, or all, are on the device already
        arrays = [device.put(array, tensor.name) for array in arrays]
    return device.put(_concat(tensor, arrays), tensor.name)


def _rows(request: Arrays) -> int:
    return int(next(iter(request.values())).shape[0])


def _concat(tensor: TensorSpec, arrays: Sequence[Array]) -> Array:
    xp = namespace(arrays[0])
    if tensor.is_ragged and len({a.shape[1:] for a in arrays}) > 1:
        widest = max(a.shape[1] for a in arrays)
        arrays = [_widen(a, widest) for a in arrays]
    while len(arrays) > _MAX_CONCAT and not isinstance(arrays[0], np.ndarray):
        arrays = [xp.concat(arrays[k : k + _MAX_CONCAT], axis=0) for k in range(0, len(arrays), _MAX_CONCAT)]
    return xp.concat(list(arrays), axis=0)


def _widen(array: Array, width: int) -> Array:
    xp = namespace(array)
    shape = (array.shape[0], width - array.shape[1], *array.shape[2:])
    zeros = xp.zeros(shape, dtype=array.dtype, device=device_of(array))
    return xp.concat([array, zeros], axis=1)


def check_outputs(spec: ModelSpec, outputs: Arrays, num_rows: int) -> None:
    """Check names, dtypes, shapes and row counts, which Triton does not.

    Raises:
        ShoalError: an output is not what ``config.pbtxt`` declares.
    """
    declared = {tensor.name: tensor for tensor in spec.outputs}
    if outputs.keys() != declared.keys():
        raise ShoalError(f"Model {spec.name} gave outputs {sorted(outputs)}, its config declares {sorted(declared)}.")
    for name, array in outputs.items():
        mismatch = declared[name].mismatch(array, is_batched=spec.is_batched)
        if mismatch:
            raise ShoalError(f"Output {mismatch}, as the config of model {spec.name} declares.")
        if spec.is_batched and array.shape[0] != num_rows:
            raise ShoalError(f"Output {name} of model {spec.name} has {array.shape[0]} rows for {num_rows} rows in.")


def split(outputs: Arrays, counts: Sequence[int]) -> Iterator[Arrays]:
    """The outputs of each request, as views of the batch's."""
    if len(counts) == 1:
        yield outputs
        return
    start = 0
    for count in counts:
        yield {name: array[start : start + count] for name, array in outputs.items()}
        start += count
