"""Inputs of a model as people write them: command line arguments, columns of tables, and single values.

Sections: arguments of a command; columns of a table; one value; a request for ``curl``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.clients.bulk.columns import Columns, find_column, no_column, show_option, split_columns, take_in_order
from shoal.clients.bulk.rows import Row, RowSource, is_number, shorten, show_example
from shoal.clients.bulk.tables import KINDS, TEXT, Table, explain_image
from shoal.clients.client.calls import find_text_input, to_numbers
from shoal.errors import InputError, suggest
from shoal.kit.component.spec import STRING, Array, ModelSpec, TensorSpec
from shoal.system.files import MAX_BINARY, open_regular, parse_json, read_bytes, read_text

_ARGUMENTS = "arguments"  # name of the table of what is typed


def find_input(model: ModelSpec, name: str) -> TensorSpec:
    """Return the declaration of an input.

    Raises:
        InputError: the model has no input of this name.
    """
    for spec in model.inputs:
        if spec.name == name:
            return spec
    raise InputError(f"There is no input {name}.", suggest(name, [spec.name for spec in model.inputs]))


# --- arguments of a command -----------------------------------------------------------------------------------------


def _divide(arguments: Sequence[str], model: ModelSpec) -> tuple[list[str], dict[str, str], list[Path]]:
    """Divide arguments into texts, values by input, and files with requests.

    Raises:
        InputError: an input is given twice, or an argument has an unknown name before ``=`` and does not seem to be a
            text.
    """
    texts, values, requests = [], {}, []
    names = [spec.name for spec in model.inputs]
    for argument in arguments:
        name, sign, value = argument.partition("=")
        if argument.startswith("@") and not argument.endswith(".json") and (only := _only_input(model)):
            name, sign, value = only, "=", argument
        if sign and name in names:
            if name in values:
                raise InputError(f"The input {name} is given twice.", "Give it once, with a list of values if need be.")
            values[name] = value
        elif argument.startswith("@") and argument.endswith(".json"):
            requests.append(Path(argument[1:]))
        else:
            if sign and re.fullmatch(r"\w+", name):
                _check_name(name, names, is_text=bool(find_text_input(model)))
            texts.append(argument)
    return texts, values, requests


def _only_input(model: ModelSpec) -> str:
    """Return the name of the model's only required input; empty if there is not exactly one, or if it is a text."""
    required = [spec for spec in model.inputs if not spec.is_optional]
    return required[0].name if len(required) == 1 and required[0].dtype != STRING else ""


def _check_name(name: str, names: Sequence[str], *, is_text: bool) -> None:
    advice = suggest(name, names)
    if advice.startswith("Did you mean") or not is_text:
        raise InputError(f"There is no input {name}.", advice)


def make_table(arguments: Sequence[str], model: ModelSpec) -> Table[Row]:
    """Make a table of the rows that arguments give: texts in the column ``text``, other inputs by their names.

    An input that is given for one row only has this value in every row.

    Raises:
        InputError: an argument cannot be read, an input is missing, or the numbers of rows differ.
    """
    texts, values, requests = _divide(arguments, model)
    text_input = find_text_input(model)
    specs = {spec.name: spec for spec in model.inputs}
    given: dict[str, list[Any]] = {}
    if texts:
        if len(arguments) == 1 and os.path.isfile(texts[0]):  # noqa: PTH113  # Path.is_file fails for a long text
            is_table = Path(texts[0]).suffix.lower() in (*KINDS, ".tsv")
            meant = f"--input {texts[0]}" if is_table else f"{text_input or model.inputs[0].name}=@{texts[0]}"
            raise InputError(f"{texts[0]} is a file.", f"Did you mean {shlex.join(meant.split(' ', 1))}?")
        if named := next(filter(_is_file_name, texts), ""):
            what = f"{named} is a file." if os.path.isfile(named) else f"There is no file {named}."  # noqa: PTH113
            own = f"; for this very text: {shlex.quote(f'{text_input}={named}')}" if text_input else ""
            raise InputError(what, f"For the rows of a file: --input FILE{own}")
        if text_input and texts[0].startswith("@") and os.path.isfile(texts[0][1:]):  # noqa: PTH113
            raise InputError(f"{texts[0][1:]} is a file.", f"Name its input: {text_input}={texts[0]}")
        if text_input in values:
            raise InputError(f"The input {text_input} is given twice.", "Give it once: as a text, or by its name.")
        given[TEXT if text_input else _refuse_texts(texts[0], model)] = list(texts)
    for path in requests:
        given |= read_request(path, specs)
    given |= {name: read_rows(specs[name], value) for name, value in values.items()}
    _check_complete(given, model)
    number = max(map(len, given.values()))
    odd = next((name for name, rows in given.items() if len(rows) not in (1, number)), "")
    if odd:
        raise InputError(
            f"{odd} has {len(given[odd])} rows, another input {number}.", "Give each input that many rows, or one row."
        )
    rows: Iterator[tuple[int, Row]] = (
        (at + 1, {name: _plain(rows[at % len(rows)]) for name, rows in given.items()}) for at in range(number)
    )
    return Table(RowSource(_ARGUMENTS, ".txt"), tuple(given), rows, lambda: None)


def _is_file_name(text: str) -> bool:
    """Whether a text is one word with the ending of a file of rows."""
    return bool(re.match(r"[^@\s]\S*$", text)) and text.lower().endswith((*KINDS, ".tsv", ".json"))


def _refuse_texts(text: str, model: ModelSpec) -> str:
    """Raise the error for a text without a name, for a model that has no single text input."""
    examples = " ".join(show_example(spec) for spec in model.inputs if not spec.is_optional) or "NAME=VALUE"
    if text.startswith("@"):
        raise InputError(f"{text} is given without an input's name.", f"Name it: {model.inputs[0].name}={text}")
    several = sum(spec.dtype == STRING for spec in model.inputs) > 1
    what = "has several text inputs" if several else "takes no text"
    raise InputError(f"Model {model.name} {what}; {text!r} needs a name.", f"Name each input: shoal infer {examples}")


def _check_complete(given: Mapping[str, Any], model: ModelSpec) -> None:
    there = {find_text_input(model) if name == TEXT else name for name in given}
    missing = [spec for spec in model.inputs if not spec.is_optional and spec.name not in there]
    if missing:
        raise InputError(f"The input {missing[0].name} is missing.", f"For example: {show_example(missing[0])}")


# --- columns of a table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feed:
    """Mapping of a table's rows to the inputs of ``model``.

    ``columns`` names the column of an input, or several columns that are the elements of its vector. ``constants`` are
    the values of inputs that are the same for every row. ``note`` says it if columns were taken in the file's order.
    """

    model: ModelSpec
    columns: Mapping[str, Columns]
    constants: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def inputs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of one row. An input of numbers is left out if its cell is empty.

        Raises:
            InputError: a value is not what its input declares.
        """
        specs = {spec.name: spec for spec in self.model.inputs}
        given = {name: _value(_take(row, columns), specs[name]) for name, columns in self.columns.items()}
        present = {n: v for n, v in given.items() if v is not None or specs[n].dtype == STRING}
        return {**present, **self.constants}


def _take(row: Mapping[str, Any], columns: Columns) -> Any:
    if isinstance(columns, str):
        return row.get(columns)
    cells = [row.get(column) for column in columns]
    for column, cell in zip(columns, cells, strict=True):
        if cell is None or (isinstance(cell, str) and not is_number(cell)):
            raise InputError(f"The column {column} holds {shorten(cell)}, not a number.", "Correct that cell.")
    return [float(cell) if isinstance(cell, str) else cell for cell in cells]


def _value(value: Any, spec: TensorSpec) -> Any:
    """Convert a value of a file to the input's type; in CSV and text files, numbers are text and vectors are JSON."""
    if spec.dtype == STRING and spec.dims == (1,):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return read_row(spec, value)


def make_feed(
    model: ModelSpec,
    table: Table[Any],
    *,
    text_column: str = "",
    columns: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
    first: Row | None = None,
    has_constants: bool = True,
) -> Feed:
    """Map the table's rows to the model's inputs.

    ``columns`` maps an input's name to its column, or to several columns joined by commas; ``constants`` maps an
    input's name to its value for every row. Every other input is read from the column of the same name, in any letter
    case. The input that ``find_text_input`` chooses is read from ``text_column``; by default from the column ``text``,
    or from the column of the input's name if there is no column ``text``. With the table's ``first`` row, the only
    input takes all columns in the file's order, if they are numbers and as many as the input has places.
    ``has_constants`` is whether the command has the option ``--set``.

    Raises:
        InputError: an input is unknown or given twice, or ``text_column`` is given for a model that does not have
            exactly one text input.
        ArtifactError: the table lacks a column that was named, or has no column for a required input.
    """
    columns, constants = dict(columns or {}), dict(constants or {})
    for name in (*columns, *constants):
        find_input(model, name)
    plain_input = find_text_input(model)
    text_input = find_text_input(model, {*columns, *constants})
    if text_column and not text_input:
        raise InputError(f"Model {model.name} has no single text input.", "Name each: --column INPUT=COLUMN")
    is_typed = table.source.name == _ARGUMENTS
    typed = {plain_input if name == TEXT else name for name in table.columns} if is_typed else set()
    if both := sorted(typed & constants.keys()):
        raise InputError(f"The input {both[0]} is given twice.", "Give it once: as an argument, or by --set.")
    twice = sorted((columns.keys() & constants.keys()) | ({plain_input} & {*columns, *constants}))
    if twice and (text_column or twice[0] != plain_input or plain_input in columns.keys() & constants.keys()):
        raise InputError(f"The input {twice[0]} is given twice.", "Give it once: as a value, or by its column.")
    found: dict[str, Columns] = {}
    row, note = first if isinstance(first, dict) else None, ""
    for spec in model.inputs:
        if spec.name in columns:
            found[spec.name] = split_columns(columns[spec.name], table)
        elif spec.name not in constants:
            wanted = [spec.name]
            if spec.name == text_input:
                wanted = [text_column] if text_column else [TEXT, spec.name]
            column = find_column(wanted, table)
            if column is not None:
                found[spec.name] = column
            elif [each.name for each in model.inputs if each.name not in constants] == [spec.name] and (
                taken := take_in_order(spec, table, row)
            ):
                found[spec.name] = taken
                note = f"{spec.name} takes the columns in their order: {show_option(spec, table.columns)}"
            elif not spec.is_optional or wanted == [text_column]:
                raise no_column(wanted[0], spec, model, table, row, has_constants=has_constants)
    if plain_input in constants and not is_typed:
        column = find_column([TEXT, plain_input], table)
        if column is not None and column not in found.values():
            what = f"--set gives {plain_input}, and so does the column {column!r} of {table.source.name}."
            raise InputError(what, "Leave --set out, or give a file without that column.")
    return Feed(model, found, constants, note)


# --- one value ------------------------------------------------------------------------------------------------------


def read_row(spec: TensorSpec, value: Any) -> Any:
    """Read one row's value of an input: a string or bytes for TYPE_STRING [1], else an array of the input's dims.

    Numbers may be given as text: ``5.1``, or as JSON ``[5.1, 3.5]``.

    Raises:
        InputError: the value has another shape, or is not of the input's type.
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
        InputError: the value cannot be converted.
    """
    if isinstance(value, str) and not (spec.dtype == STRING and not value.startswith("[")):
        value = _parse(spec, value)
    try:
        return np.asarray(value, np.object_) if spec.dtype == STRING else to_numbers(spec, value)
    except InputError as error:
        raise InputError(error.what, f"For example: {show_example(spec)}") from None


def _parse(spec: TensorSpec, text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith(("[", "true", "false")) else float(text)
    except ValueError:
        fix = "" if spec.dims == (1,) else f"For example: {show_example(spec)}"
        fix = "In a list, these are numbers, too: NaN, Infinity" if re.search(r"\b(nan|inf)\b", text) else fix
        raise InputError(f"{spec.name} cannot be read as {spec.dtype}: {shorten(text)} is not a number.", fix) from None


def read_rows(spec: TensorSpec, text: str) -> list[Any]:
    """Read the value of ``NAME=VALUE``: one row, or several rows if the value has one dimension more than the input.

    ``@file.npy`` stands for an array, ``@file.json`` for a list or a request in KServe's form, and ``@`` with any other
    file for the text in the file, or for its bytes if they are no text, such as a picture's.

    Raises:
        InputError: the value cannot be read.
    """
    value = _read_file(spec, Path(text[1:])) if text.startswith("@") else text
    if spec.dtype == STRING and isinstance(value, bytes):
        return [value]
    if spec.dtype == STRING and isinstance(value, str):
        return [value] if spec.dims == (1,) and not _is_list(value) else _split(spec, read_array(spec, value))
    return _split(spec, read_array(spec, value))


def read_constants(given: Mapping[str, str], model: ModelSpec) -> dict[str, Any]:
    """Read the values of ``--set``, each of which is one row of its input.

    Raises:
        InputError: an input is unknown, or a value cannot be read.
    """
    constants = {}
    for name, value in given.items():
        rows = read_rows(find_input(model, name), value)
        if len(rows) != 1:
            raise InputError(
                f"--set {name} gives {len(rows)} rows, not one value for all.", f"For example: --set {name}=0"
            )
        constants[name] = rows[0]
    return constants


def _is_list(text: str) -> bool:
    """Whether a text is a JSON list of strings."""
    try:
        value = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return False
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _split(spec: TensorSpec, array: Array) -> list[Any]:
    """Divide an array into rows: one row if it has as many dimensions as the input, several rows if it has one more."""
    is_row = array.ndim < len(spec.dims) or (array.ndim == len(spec.dims) and (spec.dims != (1,) or len(array) == 1))
    rows = [array] if is_row else list(array)
    if spec.dtype == STRING and spec.dims == (1,):
        return [np.asarray(row).item() for row in rows]
    return [read_row(spec, row) for row in rows]


def _read_file(spec: TensorSpec, path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            with open_regular(path) as file:
                return np.load(file, allow_pickle=False)
        if path.suffix != ".json":
            return _read_value(path, is_any=spec.dtype == STRING and spec.dims == (1,))
        value = parse_json(read_text(path, MAX_BINARY))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.", f"Give {spec.name}=@ and a file's path.") from None
    except (OSError, ValueError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        if image := explain_image(path):
            raise InputError(f"{path} is an image, not an array.", image) from None
        raise InputError(f"{path} cannot be read: {reason}.", "Give a .npy file, or a UTF-8 text or JSON.") from None
    if isinstance(value, dict):
        tensors = _read_kserve(value, path)
        if spec.name not in tensors:
            raise InputError(f"{path} holds no input {spec.name}.", f"It holds: {', '.join(tensors)}.")
        return tensors[spec.name]
    return value


def _read_value(path: Path, *, is_any: bool) -> str | bytes:
    """Return the text in a file, or with ``is_any`` its bytes, if they are no text."""
    try:
        return read_text(path, MAX_BINARY).removesuffix("\n")
    except UnicodeDecodeError:
        if not is_any:
            raise
        return read_bytes(path, MAX_BINARY)


def read_request(path: Path, specs: Mapping[str, TensorSpec]) -> dict[str, list[Any]]:
    """Read a request from a JSON file, in KServe's form or as a list of rows for each input.

    The forms are ``{"inputs": [{"name", "shape", "datatype", "data"}]}`` and ``{"TEXT": ["a", "b"]}``.

    Raises:
        InputError: the file cannot be read, or holds an input that the model does not have.
    """
    try:
        request = parse_json(read_text(path, MAX_BINARY))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.", "Give @ and the path of a request.json.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} is not a request in JSON: {reason}.", "Give {'inputs': [...]}.") from None
    tensors = _read_kserve(request, path)
    unknown = sorted(tensors.keys() - specs.keys())
    if unknown:
        raise InputError(f"There is no input {unknown[0]}.", f"Inputs: {', '.join(specs)}.")
    return {name: _split(specs[name], read_array(specs[name], value)) for name, value in tensors.items()}


def _read_kserve(request: Any, path: Path) -> dict[str, Any]:
    if isinstance(request, dict) and request and "inputs" not in request:
        return {name: value if isinstance(value, list) else [value] for name, value in request.items()}
    try:
        if not isinstance(request, dict):
            raise TypeError(f"a {type(request).__name__} without names")
        return {
            tensor["name"]: np.asarray(
                tensor["data"], np.object_ if tensor.get("datatype") == "BYTES" else None
            ).reshape(tensor["shape"])
            for tensor in request["inputs"]
        }
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"{path} is not a request in KServe's form: {error if isinstance(error, TypeError) else repr(error)}.",
            'It is {"inputs": [{"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [...]}]}.',
        ) from None


# --- a request for curl ---------------------------------------------------------------------------------------------


def write_curl(url: str, model: ModelSpec, inputs: Mapping[str, Sequence[Any]]) -> str:
    """Return a curl command that sends these rows, with a body in KServe's JSON form."""
    specs: Mapping[str, TensorSpec] = {spec.name: spec for spec in model.inputs}
    tensors = []
    for name, rows in inputs.items():
        array = np.asarray([_as_json(row) for row in rows], np.object_ if specs[name].dtype == STRING else None)
        array = array.reshape(len(rows), *(array.shape[1:] or (1,)))
        kind = specs[name].dtype.removeprefix("TYPE_").replace("STRING", "BYTES")
        data = (array if model.is_batched else array[0]).tolist()
        tensors.append(
            {"name": name, "shape": list(np.shape(array)[not model.is_batched :]), "datatype": kind, "data": data}
        )
    body = json.dumps({"inputs": tensors}, ensure_ascii=False)
    root = url.rstrip("/") if "://" in url else f"http://{url}"
    return (
        f"curl {shlex.quote(f'{root}/v2/models/{model.name}/infer')} --header 'Content-Type: application/json'"
        f" --data {shlex.quote(body)}"
    )


def _plain(value: Any) -> Any:
    """Convert an array to lists. FP32 numbers get their shortest decimals: 5.1, not 5.099999904632568."""
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        value = value.astype(str).astype(np.float64)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _as_json(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else _plain(value)
