"""Protocol-independent requests, answers and model descriptions, and the conversion of their tensors.

Sections: calls; answers; split requests; values that callers give; rows; tensors as they are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shoal.errors import InputError, suggest
from shoal.kit.component.spec import STRING, Array, ModelSpec, TensorSpec

Parameter: TypeAlias = str | int | bool | float

# Request parameters reserved by Triton.
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
READY = "READY"  # the state of a loaded model in the server's index
# Request parameter that asks for the end of a stream as a message, and the parameter of answers that marks this end.
WITH_FINAL, IS_FINAL = "triton_enable_empty_final_response", "triton_final_response"
TEXT_INPUT = "text_input"  # the input of language models for a text, also NVIDIA's
NO_LIMIT = 2**31 - 1  # max_batch_size of a model whose server does not report it


# --- calls ----------------------------------------------------------------------------------------------------------


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
    """One request to the server. ``spec`` describes the model; it is None only for requests without tensors.

    Each part of a split request is a call; ``first_row`` is the index of its first row in the whole request.
    ``version`` is the version of the model that shall answer; None leaves the choice to the server.
    """

    method: Method
    model: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timeout: float | None = None
    spec: ModelSpec | None = None
    first_row: int = 0
    version: int | None = None


class Description(NamedTuple):
    """A model as its server describes it. ``calls`` are the models that it calls if it is an ensemble, else None."""

    spec: ModelSpec
    calls: tuple[str, ...] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Description:
        """Read a model's configuration in its JSON form."""
        graph = config.get("ensemble_scheduling")
        calls = None if graph is None else tuple(step["model_name"] for step in graph.get("step", ()))
        return cls(ModelSpec.from_config(config), calls)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Description:
        """Read a model's metadata in its JSON form, which says less than the configuration.

        All inputs are taken as optional. ``max_batch_size`` is taken as unlimited if the first dimension of every input
        is variable, and as 0 (no batch dimension) otherwise.
        """
        is_batched = {int(entry["shape"][0]) if entry.get("shape") else 0 for entry in metadata["inputs"]} == {-1}

        def read(entry: Mapping[str, Any], is_optional: bool) -> TensorSpec:
            dims = tuple(map(int, entry.get("shape", ())))[1 if is_batched else 0 :]
            return TensorSpec(entry["name"], dtype_name(entry["datatype"]), dims, is_optional=is_optional)

        inputs = tuple(read(entry, True) for entry in metadata["inputs"])
        outputs = tuple(read(entry, False) for entry in metadata["outputs"])
        return cls(ModelSpec(metadata["name"], inputs, outputs, NO_LIMIT if is_batched else 0))


class ServedModel(NamedTuple):
    """A model in the index of a server: ``state`` is READY, or says why not; ``reason`` says more about that."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether the model answers requests."""
        return self.state == READY


def dtype_name(datatype: str) -> str:
    """Translate a protocol ``datatype`` into its name in ``config.pbtxt``."""
    return STRING if datatype == "BYTES" else f"TYPE_{datatype}"


# --- answers --------------------------------------------------------------------------------------------------------


class NoOutputError(InputError, KeyError):
    """An answer has no output of this name."""

    __str__ = InputError.__str__  # KeyError would show the message as a quoted key


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Mapping[str, np.ndarray[Any, Any]]):
    """Every output of one request, by name, as a read-only NumPy array ``[rows, *dims]``.

    ``model`` is the name of the model that was asked, ``version`` is the version of it that answered, and
    ``request_id`` is the id that the caller gave the request. ``parameters`` are the response parameters.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]]
    _: KW_ONLY
    model: str
    version: str = ""
    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for array in self.arrays.values():
            array.setflags(write=False)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        try:
            return self.arrays[name]
        except KeyError:
            raise NoOutputError(f"{self.model} gave no output {name}.", suggest(name, self.arrays)) from None

    def __contains__(self, name: object) -> bool:  # asked for each token; the inherited one makes an error's text
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in self.arrays.items())
        version = f", version {self.version}" if self.version else ""
        return f"Answer({self.model}{version}: {tensors})"


# --- split requests -------------------------------------------------------------------------------------------------


def split(call: Call, size: int) -> list[Call]:
    """Split a request into parts of at most ``size`` rows, whose ids are ``ID/1``, ``ID/2`` and so on."""
    num_rows = count_rows(call.arrays)
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
    """Join the answers to the parts of ``call`` into one answer.

    Raises:
        InputError: an output does not have one row per row of the request, or its shape differs between parts.
    """
    sizes = [count_rows(part.arrays) for part in parts]
    first = answers[0]
    arrays = {name: _join(name, [answer[name] for answer in answers], sizes) for name in first}
    return Answer(
        arrays, model=call.model, version=first.version, request_id=call.request_id, parameters=first.parameters
    )


def _join(name: str, arrays: Sequence[Array], sizes: Sequence[int]) -> Array:
    fix = f"Send at most {sizes[0]} rows at a time, and join the answers as you see fit."
    if any(array.shape[:1] != (size,) for array, size in zip(arrays, sizes, strict=True)):
        raise InputError(f"The request was split, and output {name} does not have one row per row of its part.", fix)
    shapes = list(dict.fromkeys(str(["rows", *array.shape[1:]]).replace("'", "") for array in arrays))
    if len(shapes) > 1:
        raise InputError(f"The request was split, and output {name} came as {' and '.join(shapes[:3])}.", fix)
    return np.concatenate(arrays)


# --- values that callers give ---------------------------------------------------------------------------------------


def check_outputs(wanted: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the wanted outputs, without duplicates.

    Raises:
        InputError: an output in ``wanted`` is not in ``known``, or ``wanted`` is a single string.
    """
    if isinstance(wanted, str):
        raise InputError(f"outputs is a single string, {wanted!r}.", f"For one output: outputs=[{wanted!r}]")
    names = tuple(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise InputError(f"There is no output {name}.", suggest(str(name), known, "Outputs"))
    return names


def to_arrays(specs: Iterable[TensorSpec], values: Mapping[str, Any], *, is_batched: bool) -> dict[str, Array]:
    """Convert the values of inputs, by name, to NumPy arrays, and check their dtypes, shapes and numbers of rows.

    A list, a column of pandas or polars, or a NumPy array of another floating-point dtype becomes an array of the
    declared dtype; other arrays of numbers must have this dtype already. An input with one value per row may be a flat
    list: ``["a", "b"]`` for TYPE_STRING [1] becomes an array ``[2, 1]``, and so for [-1] if it is required. An input
    whose value is None is left out.

    Raises:
        InputError: an input is unknown or missing, or has another dtype, shape or number of rows than it should.
    """
    declared = {spec.name: spec for spec in specs}
    given = {name: value for name, value in values.items() if value is not None}
    if unknown := sorted(given.keys() - declared.keys()):
        raise InputError(f"There is no input {unknown[0]}.", suggest(unknown[0], declared, "Inputs"))
    if missing := [name for name, spec in declared.items() if not spec.is_optional and name not in given]:
        raise InputError(f"The input {missing[0]} is missing.", f"Give {missing[0]}=[...].")
    arrays = {name: _to_array(declared[name], value, is_batched=is_batched) for name, value in given.items()}
    if is_batched:
        _check_rows(arrays)
    return arrays


def _check_rows(arrays: Mapping[str, Array]) -> None:
    if not arrays:
        raise InputError("The request has no inputs.", "Give at least one.")
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        listing = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise InputError(f"The inputs have different numbers of rows: {listing}.", "Give one value of each per row.")
    if not all(rows.values()):
        raise InputError("The request has no rows.", "Give at least one.")


def count_rows(arrays: Mapping[str, Array]) -> int:
    """Return the number of rows of a request to a model with a batch dimension."""
    return len(next(iter(arrays.values())))


def too_many_rows(num_rows: int, spec: ModelSpec) -> InputError:
    """Build the error for a request with more rows than the model takes at a time."""
    return InputError(
        f"The request has {num_rows} rows; {spec.name} takes at most {spec.max_batch_size}.",
        "Send them in several requests.",
    )


def _to_array(spec: TensorSpec, value: Any, *, is_batched: bool) -> Array:
    if isinstance(value, str | bytes):
        value = [value]
    is_column = hasattr(value, "to_numpy")  # of pandas or polars
    if is_column:
        value = value.to_numpy()
        value = value.tolist() if value.dtype == np.object_ else value  # its elements may be lists
    if spec.dtype == STRING:
        array = _to_bytes(spec.name, value)
    elif isinstance(value, np.ndarray) and not is_column and not _are_floats(value.dtype, spec.numpy_dtype):
        array = value  # of integers: it is checked, not converted
    else:
        array = to_numbers(spec, value)
    is_text = spec.dtype == STRING and spec.dims == (-1,) and not spec.is_optional  # others are lists of words
    if is_batched and (spec.dims == (1,) or is_text) and array.ndim == 1:
        array = array[:, None]
    mismatch = spec.mismatch(array, is_batched=is_batched)
    if mismatch:
        if array.dtype != spec.numpy_dtype:
            fix = f'Convert it: array.astype("{spec.numpy_dtype}")'
        else:
            is_row = is_batched and (not array.ndim or not spec.mismatch(array, is_batched=False))
            fix = f"For one row: {spec.name}=[row]." if is_row else ""
        raise InputError(f"Input {mismatch}.", fix)
    return array


def _are_floats(given: Any, wanted: Any) -> bool:
    """Whether one is to be rounded to the other: FP64 is what NumPy makes of Python's numbers."""
    return bool(given != wanted and given.kind == wanted.kind == "f")


def to_numbers(spec: TensorSpec, value: Any) -> Array:
    """Convert numbers to an array of the declared dtype; the shape is not checked.

    Raises:
        InputError: a value is not a number, or the dtype cannot hold it.
    """
    try:
        given = np.asarray(value)
        if given.dtype.kind not in "biuf":
            elements = np.asarray(value, np.object_).ravel().tolist()
            odd = next((element for element in elements if not isinstance(element, int | float)), value)
            raise TypeError(f"{repr(odd)[:40]} is not a number")
        with np.errstate(invalid="ignore", over="raise"):  # of integers, what is lost is refused below
            array = given.astype(spec.numpy_dtype)
        if array.dtype.kind in "biu" and not np.array_equal(array, given):
            raise FloatingPointError
    except FloatingPointError:
        what = f"{spec.name} cannot be read as {spec.dtype}, which cannot hold all of these numbers."
        raise InputError(what) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{spec.name} cannot be read as {spec.dtype}: {error}.") from None
    return array


def _to_bytes(name: str, value: Any) -> Array:
    array = np.asarray(value, np.object_)
    flat = np.empty(array.size, np.object_)
    for row, text in enumerate(array.ravel().tolist()):
        flat[row] = _encode_text(name, row, text)
    return flat.reshape(array.shape)


def _encode_text(name: str, row: int, text: object) -> bytes:
    if isinstance(text, bytes):
        return bytes(text)  # tritonclient would send str() of a subclass of bytes
    if not isinstance(text, str):
        fix = "Fill what is missing, for example: fillna('')." if isinstance(text, float) and text != text else ""
        raise InputError(f"{name}[{row}] is {text!r}; it must be a string.", fix or "Give str or UTF-8 bytes.")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}[{row}] holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}.",
            "Such a string has no UTF-8 form; decode its source with errors='replace'.",
        ) from None


# --- rows -----------------------------------------------------------------------------------------------------------


def find_text_input(model: ModelSpec, given: Collection[str] = ()) -> str:
    """Return the name of the input that takes texts given without a name; empty if there is no such input.

    It is the only input of TYPE_STRING [1]; if there is none, the only required one of [-1]. If there are several, it
    is the only required one of them. If several of them are required, it is the only one that is not in ``given``. If
    all are optional, as in language models that also take chats, it is ``text_input``, unless another one is in
    ``given``.
    """
    strings = [spec for spec in model.inputs if spec.dtype == STRING]
    texts = [spec for spec in strings if spec.dims == (1,)]
    texts = texts or [spec for spec in strings if spec.dims == (-1,) and not spec.is_optional]
    required = [spec for spec in texts if not spec.is_optional]
    found = required if len(required) == 1 else texts
    if len(found) != 1:
        found = [spec for spec in required if spec.name not in given]
    if not required and not any(spec.name in given for spec in texts if spec.name != TEXT_INPUT):
        found = [spec for spec in texts if spec.name == TEXT_INPUT] or found
    return found[0].name if len(found) == 1 else ""


def name_columns(model: ModelSpec) -> dict[str, str]:
    """Return the column of each output: its name in lower case, or unchanged if two differ only in letter case."""
    names = [spec.name for spec in model.outputs]
    lower = [name.lower() for name in names]
    return dict(zip(names, lower if len(set(lower)) == len(lower) else names, strict=True))


def to_rows(model: ModelSpec, outputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Return the values of each row of an answer by column; a model without a batch dimension answers one row.

    Outputs that ``model`` does not declare are left out.
    """
    names = name_columns(model)
    given = {name: array for name, array in outputs.items() if name in names}
    columns = {names[name]: _values(array if model.is_batched else array[None]) for name, array in given.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=False)]


def _values(array: Array) -> list[Any]:
    """Return one value per row: a number or a string if the tensor is ``[rows, 1]``, else a list."""
    flat: list[Any] = array.reshape(-1).tolist()
    if array.dtype == np.object_:
        flat = [text.decode("utf-8", "backslashreplace") for text in flat]
    elif array.dtype == np.float32:
        # The shortest decimals that round to the same FP32: 0.1, not 0.10000000149.
        flat = [float(str(number)) for number in array.reshape(-1)]
    if array.shape[1:] == (1,):
        return flat
    values: list[Any] = np.array(flat, np.object_).reshape(array.shape).tolist()
    return values


# --- tensors as they are sent ---------------------------------------------------------------------------------------


def make_answer(call: Call, arrays: Mapping[str, Array], version: str, parameters: Mapping[str, Parameter]) -> Answer:
    """Build an ``Answer`` with the outputs in the requested order, or else in the order of the model's declaration."""
    declared = call.spec.outputs if call.spec else ()
    order = [*(call.outputs or [spec.name for spec in declared]), *arrays]
    return Answer(
        {name: arrays[name] for name in dict.fromkeys(order) if name in arrays},
        model=call.model,
        version=version,
        request_id=call.request_id,
        parameters={name: value for name, value in parameters.items() if name not in RESERVED | {IS_FINAL}},
    )


def datatype(array: Array) -> str:
    """Return the protocol's name for the dtype of an array, such as ``FP32``."""
    from tritonclient.utils import np_to_triton_dtype

    return str(np_to_triton_dtype(array.dtype))


def encode(array: Array) -> bytes:
    """Encode an input as the raw bytes that both protocols carry."""
    from tritonclient.utils import serialize_byte_tensor

    if not array.size:
        return b""
    return bytes(serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes())


def decode(datatype: str, shape: list[int], raw: memoryview) -> Array:
    """Decode an output from raw bytes; the elements of a BYTES output become ``bytes``."""
    from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

    if datatype == "BYTES":
        array = deserialize_bytes_tensor(bytes(raw)) if raw else np.empty(0, np.object_)
    else:
        array = np.frombuffer(raw, triton_to_np_dtype(datatype))
    return array.reshape(shape)


def restore_shape(declared: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the shape that Triton gives a flat list of ``size`` values for the ``declared`` dimensions.

    Of the dimensions declared as -1, the last one gets all values that the fixed dimensions leave, and the others are
    1.
    """
    left = size // max(1, prod(dim for dim in declared if dim != -1))
    shape: list[int] = []
    for dim in reversed(declared):
        shape.insert(0, left if dim == -1 else dim)
        left = 1 if dim == -1 else left
    return tuple(shape)
