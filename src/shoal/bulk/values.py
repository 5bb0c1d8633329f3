"""Values of a model's inputs as people write them: on the command line, in cells of files, in ``.npy`` and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.component.spec import STRING, TensorSpec
from shoal.component.tensors import Array
from shoal.errors import InputError
from shoal.tables import shorten

_SHOWN = 3  # numbers of a long vector


def read_row(spec: TensorSpec, value: Any) -> Any:
    """Read one row's value of an input: a string or bytes for TYPE_STRING [1], else an array of the input's dims.

    Numbers may be given as text: ``5.1``, or as JSON ``[5.1, 3.5]``.

    Raises:
        InputError: it has another shape, or is not of the input's type.
    """
    if spec.dtype == STRING and spec.dims == (1,):
        return value
    array = read_array(spec, value)
    if array.ndim == 0 and spec.dims in ((1,), (-1,)):
        array = array.reshape(1)
    mismatch = spec.mismatch(array, is_batched=False)
    if mismatch:
        is_turned = array.ndim > 1 and array.ndim == len(spec.dims) and sorted(array.shape) == sorted(spec.dims)
        order = f"Its dimensions are in another order: transpose it. {spec.name} is {spec.kind}."
        raise InputError(f"Input {mismatch}.", order if is_turned else f"For example: {show_example(spec)}")
    return array


def read_array(spec: TensorSpec, value: Any) -> Array:
    """Convert a value to an array of the input's type; its shape is not checked.

    Raises:
        InputError: it cannot be converted.
    """
    if isinstance(value, str) and not (spec.dtype == STRING and not value.startswith("[")):
        value = _parse(spec, value)
    try:
        if spec.dtype == STRING:
            return np.asarray(value, np.object_)
        given = np.asarray(value)
        if given.dtype.kind not in "biuf":
            raise TypeError(f"{shorten(value)} does not consist of numbers")
        array = given.astype(spec.numpy_dtype)
        if spec.numpy_dtype.kind in "biu" and not np.array_equal(array, given):
            raise TypeError(f"{spec.dtype} cannot hold all of these numbers")
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{spec.name} cannot be read as {spec.dtype}: {error}.",
            f"For example: {show_example(spec)}",
        ) from None
    return array


def _parse(spec: TensorSpec, text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith(("[", "true", "false")) else float(text)
    except ValueError:
        fix = "" if spec.dims == (1,) else f"For example: {show_example(spec)}"
        raise InputError(f"{spec.name} cannot be read as {spec.dtype}: {shorten(text)} is not a number.", fix) from None


def show_example(spec: TensorSpec) -> str:
    """Write an example of an input on the command line: ``INPUT=[0.0,0.0]``; a file's name for a large one."""
    sizes = [2 if size == -1 else size for size in spec.dims]
    if spec.dtype == STRING:
        return f"{spec.name}={'text' if sizes == [1] else json.dumps(['text'] * min(sizes[0], 2))}"
    one = {"f": "0.5", "b": "true"}.get(spec.numpy_dtype.kind, "1")
    if sizes == [1]:
        return f"{spec.name}={one}"
    if len(sizes) != 1 or sizes[0] > 8:
        return f"{spec.name}=@file.npy"
    return f"{spec.name}=[{','.join([one] * sizes[0])}]"


def read_rows(spec: TensorSpec, text: str) -> list[Any]:
    """Read the value of ``NAME=VALUE``: one row, or several where it has one dimension more than the input.

    ``@file.npy`` is an array, ``@file.json`` a list or a request in KServe's form, ``@`` of another file its text.

    Raises:
        InputError: it cannot be read.
    """
    value = _read_file(spec, Path(text[1:])) if text.startswith("@") else text
    if spec.dtype == STRING and isinstance(value, str):
        return [value] if spec.dims == (1,) and not _is_list(value) else _split(spec, read_array(spec, value))
    return _split(spec, read_array(spec, value))


def _is_list(text: str) -> bool:
    """Whether a text is a JSON list of strings."""
    try:
        value = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return False
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _split(spec: TensorSpec, array: Array) -> list[Any]:
    """Divide an array into rows: it is one row if it has the input's dimensions, several if it has one more."""
    is_row = array.ndim < len(spec.dims) or (array.ndim == len(spec.dims) and (spec.dims != (1,) or len(array) == 1))
    rows = [array] if is_row else list(array)
    if spec.dtype == STRING and spec.dims == (1,):
        return [np.asarray(row).item() for row in rows]
    return [read_row(spec, row) for row in rows]


def _read_file(spec: TensorSpec, path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return text.removesuffix("\n")
        value = json.loads(text)
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.", f"Give {spec.name}=@ and a file's path.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.", "Give a .npy file, or a UTF-8 text or JSON.") from None
    if isinstance(value, dict):
        tensors = _read_kserve(value, path)
        if spec.name not in tensors:
            raise InputError(f"{path} holds no input {spec.name}.", f"It holds: {', '.join(tensors)}.")
        return tensors[spec.name]
    return value


def read_request(path: Path, specs: Mapping[str, TensorSpec]) -> dict[str, list[Any]]:
    """Read a request: KServe's JSON form, ``{"inputs": [{"name", "shape", "datatype", "data"}]}``, or rows by input,
    ``{"TEXT": ["a", "b"]}``.

    Raises:
        InputError: it cannot be read, or holds another input.
    """
    try:
        request = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.", "Give @ and the path of a request.json.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a request in JSON: {error}.", "Give {'inputs': [...]}.") from None
    tensors = _read_kserve(request, path)
    unknown = sorted(tensors.keys() - specs.keys())
    if unknown:
        raise InputError(f"There is no input {unknown[0]}.", f"Inputs: {', '.join(specs)}.")
    return {name: _split(specs[name], read_array(specs[name], value)) for name, value in tensors.items()}


def _read_kserve(request: Any, path: Path) -> dict[str, Any]:
    if isinstance(request, dict) and request and "inputs" not in request:
        return {name: value if isinstance(value, list) else [value] for name, value in request.items()}
    try:
        return {
            tensor["name"]: np.asarray(
                tensor["data"], np.object_ if tensor.get("datatype") == "BYTES" else None
            ).reshape(tensor["shape"])
            for tensor in request["inputs"]
        }
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"{path} is not a request in KServe's form: {error!r}.",
            'It is {"inputs": [{"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [...]}]}.',
        ) from None


def show_value(value: Any, *, is_full: bool = False) -> str:
    """Format a value for a table: the first numbers of a long vector, and its shape."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        return str(value)
    if is_full:
        return json.dumps(value, ensure_ascii=False)
    shape = np.shape(value) if not isinstance(value[0] if value else "", str) else (len(value),)
    first: Sequence[Any] = value
    while first and isinstance(first[0], list):
        first = first[0]
    shown = ", ".join(show_value(each) for each in first[:_SHOWN])
    if shape == (len(first),) and len(first) <= _SHOWN + 1:
        return f"[{', '.join(show_value(each) for each in first)}]"
    return f"[{shown}, …] {'x'.join(map(str, shape))}"
