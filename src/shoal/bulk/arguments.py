"""Inputs given as arguments of a command: texts, ``NAME=VALUE`` and ``@request.json``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bulk.endpoint import Endpoint
from shoal.bulk.values import read_request, read_rows, show_example
from shoal.component.spec import STRING, TensorSpec
from shoal.errors import InputError, suggest
from shoal.tables import TEXT, Row, Source, Table, as_cell


def divide(arguments: Sequence[str], model: Endpoint) -> tuple[list[str], dict[str, str], list[Path]]:
    """Divide arguments into texts, values by input, and files with requests.

    Raises:
        InputError: an input is given twice, or nearly has the name of one.
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
                _check_name(name, names, is_text=bool(model.text_input))
            texts.append(argument)
    return texts, values, requests


def _only_input(model: Endpoint) -> str:
    """Return the model's only required input, if it is not a text."""
    required = [spec for spec in model.inputs if not spec.is_optional]
    return required[0].name if len(required) == 1 and required[0].dtype != STRING else ""


def _check_name(name: str, names: Sequence[str], *, is_text: bool) -> None:
    advice = suggest(name, names)
    if advice.startswith("Did you mean") or not is_text:
        raise InputError(f"There is no input {name}.", advice)


def make_table(arguments: Sequence[str], model: Endpoint) -> Table[Row]:
    """Make a table of the rows that arguments give: texts in the column ``text``, other inputs by their names.

    An input with one row is the same for all rows.

    Raises:
        InputError: an argument cannot be read, an input is missing, or the numbers of rows differ.
    """
    texts, values, requests = divide(arguments, model)
    specs = {spec.name: spec for spec in model.inputs}
    given: dict[str, list[Any]] = {}
    if texts:
        if len(arguments) == 1 and Path(texts[0]).is_file():
            raise InputError(f"{texts[0]} is a file.", f"Did you mean --input {shlex.quote(texts[0])}?")
        if model.text_input in values:
            raise InputError(
                f"The input {model.text_input} is given twice.", "Give it once: as a text, or by its name."
            )
        given[TEXT if model.text_input else _refuse_texts(texts[0], model)] = [as_cell(text) for text in texts]
    for path in requests:
        given |= read_request(path, specs)
    given |= {name: read_rows(specs[name], value) for name, value in values.items()}
    _check_complete(given, model)
    number = max(map(len, given.values()))
    odd = next((name for name, rows in given.items() if len(rows) not in (1, number)), "")
    if odd:
        raise InputError(
            f"{odd} has {len(given[odd])} rows, another input {number}.", "Give each as many rows, or one for all."
        )
    rows: Iterator[tuple[int, Row]] = (
        (at + 1, {name: _plain(rows[at % len(rows)]) for name, rows in given.items()}) for at in range(number)
    )
    return Table(Source("arguments", ".txt"), tuple(given), rows, lambda: None)


def _refuse_texts(text: str, model: Endpoint) -> str:
    """Raise the error for a text without a name, to a model without a single text input."""
    examples = " ".join(show_example(spec) for spec in model.inputs if not spec.is_optional) or "NAME=VALUE"
    if text.startswith("@"):
        raise InputError(f"{text} has no input's name.", f"Name it: {model.inputs[0].name}={text}")
    several = sum(spec.dtype == STRING for spec in model.inputs) > 1
    what = "has several text inputs" if several else "takes no text"
    raise InputError(f"Model {model.name} {what}; {text!r} needs a name.", f"Name each input: shoal infer {examples}")


def _check_complete(given: Mapping[str, Any], model: Endpoint) -> None:
    there = {model.text_input if name == TEXT else name for name in given}
    missing = [spec for spec in model.inputs if not spec.is_optional and spec.name not in there]
    if missing:
        raise InputError(f"The input {missing[0].name} is missing.", f"For example: {show_example(missing[0])}")


def write_curl(url: str, model: Endpoint, inputs: Mapping[str, Sequence[Any]]) -> str:
    """Write the request for these rows as a command of curl's, in KServe's JSON form."""
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
    return (
        f"curl {shlex.quote(f'http://{url}/v2/models/{model.name}/infer')} --header 'Content-Type: application/json'"
        f" --data {shlex.quote(body)}"
    )


def _plain(value: Any) -> Any:
    """Convert an array to lists; FP32 numbers as they were typed: 5.1, not 5.099999904632568."""
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        value = value.astype(str).astype(np.float64)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _as_json(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else _plain(value)
