"""Conversion of callers' values to the arrays that a model declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError


def to_arrays(specs: Iterable[TensorSpec], values: Mapping[str, Any], *, is_batched: bool) -> dict[str, Array]:
    """Convert lists or arrays, by input name, to NumPy arrays of the declared dtypes, and check the row counts.

    One value per row may be given flat: ``["a", "b"]`` for TYPE_STRING [1] is ``[2, 1]``. None omits an input.

    Raises:
        InputError: an input is unknown or missing, has another dtype or shape, or another number of rows.
    """
    arrays = read_arrays(specs, values, is_batched=is_batched)
    if is_batched:
        count_rows(arrays)
    return arrays


def read_arrays(specs: Iterable[TensorSpec], values: Mapping[str, Any], *, is_batched: bool) -> dict[str, Array]:
    """Convert like ``to_arrays``, without the check that all inputs have the same number of rows."""
    declared = {spec.name: spec for spec in specs}
    given = {name: value for name, value in values.items() if value is not None}
    unknown = sorted(given.keys() - declared.keys())
    if unknown:
        raise unknown_input(unknown[0], declared)
    missing = [name for name, spec in declared.items() if not spec.is_optional and name not in given]
    if missing:
        raise missing_input(missing[0])
    return {name: _to_array(declared[name], value, is_batched=is_batched) for name, value in given.items()}


def count_rows(arrays: Mapping[str, Array]) -> int:
    """Return the number of rows of a request, which is the same in every input.

    Raises:
        InputError: they differ, or there are no inputs, or no rows.
    """
    if not arrays:
        raise InputError("The request has no inputs.", "Give at least one.")
    rows = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise different_rows(rows)
    (count,) = set(rows.values())
    if not count:
        raise InputError("The request has no rows.", "Give at least one.")
    return int(count)


# --- errors shared with translated refusals of the server --------------------------------------------------------


def unknown_input(name: str, known: Iterable[str]) -> InputError:
    """Build the error for an input that the model does not have."""
    return InputError(f"There is no input {name}.", f"Inputs: {', '.join(known)}.")


def missing_input(name: str) -> InputError:
    """Build the error for a missing required input."""
    return InputError(f"The input {name} is missing.", f"Give {name}=[...].")


def different_rows(rows: Mapping[str, int]) -> InputError:
    """Build the error for inputs of one request with different numbers of rows."""
    listing = ", ".join(f"{name} {count}" for name, count in rows.items())
    return InputError(f"The inputs have different numbers of rows: {listing}.", "Give one value of each per row.")


def too_many_rows(num_rows: int, model: str, most: int) -> InputError:
    """Build the error for a request with more rows than the model takes at a time."""
    return InputError(
        f"The request has {num_rows} rows; {model} takes at most {most}.", "Send them in several requests."
    )


# --- one input ---------------------------------------------------------------------------------------------------


def _to_array(spec: TensorSpec, value: Any, *, is_batched: bool) -> Array:
    if isinstance(value, str | bytes):
        value = [value]
    array = _to_bytes(spec.name, value) if spec.dtype == STRING else _to_numbers(spec, value)
    if is_batched and spec.dims == (1,) and array.ndim == 1:
        array = array[:, None]
    mismatch = spec.mismatch(array, is_batched=is_batched)
    if mismatch:
        if array.dtype != spec.numpy_dtype:
            fix = f'Convert it: array.astype("{spec.numpy_dtype}")'
        else:
            is_row = is_batched and not spec.mismatch(array, is_batched=False)
            fix = f"For one row: {spec.name}=[row]." if is_row else ""
        raise InputError(f"Input {mismatch}.", fix)
    return array


def _to_numbers(spec: TensorSpec, value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value  # an array's dtype is its caller's decision: it is checked, not converted
    try:
        given = np.asarray(value)
        if given.dtype.kind in "US":
            raise TypeError(f"{str(given.flat[0])!r} is not a number")
        are_integers = given.dtype.kind in "iu" and spec.numpy_dtype.kind in "iu"  # whose range is checked below
        array = given.astype(spec.numpy_dtype, casting="unsafe" if are_integers else "same_kind")
    except (TypeError, ValueError) as error:
        raise InputError(f"{spec.name} cannot be read as {spec.dtype}: {error}.") from None
    if array.dtype.kind in "iu" and not np.array_equal(array, given):
        raise InputError(f"{spec.name} holds a number that {spec.dtype} cannot.", "Give smaller ones.")
    return array


def _to_bytes(name: str, value: Any) -> Array:
    array = np.asarray(value, np.object_)
    flat = np.empty(array.size, np.object_)
    for row, text in enumerate(array.ravel().tolist()):
        flat[row] = _encode(name, row, text)
    return flat.reshape(array.shape)


def _encode(name: str, row: int, text: object) -> bytes:
    if isinstance(text, bytes):
        return bytes(text)  # tritonclient would send str() of a subclass of bytes
    if not isinstance(text, str):
        raise InputError(f"{name}[{row}] is {text!r}; it must be a string.", "Give str or UTF-8 bytes.")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}[{row}] holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}.",
            "Such a string has no UTF-8 form; decode its source with errors='replace'.",
        ) from None
