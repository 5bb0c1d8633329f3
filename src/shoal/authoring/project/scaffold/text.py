"""Text of new files: templates, tensor declarations for ``config.pbtxt``, and arrays as Python source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from shoal.authoring.repository.config import ModelConfig, Step
from shoal.authoring.repository.ensemble_config import make_ensemble
from shoal.kit.component.spec import DTYPES, STRING, TensorSpec
from shoal.system.files import parse_json, read_json

_TEMPLATES = Path(__file__).parent / "templates"
LINE = 120  # longest line of Python
ROWS, WIDTH = 2, 4  # of a test's request; the width is the size of variable dimensions
TEXTS = ("A cat sat.", "Füße")  # one per row; the second has more bytes than characters
_MAX_BYTES = 2**20  # of a JSON artifact that is read for its lists
_EXACT = "        np.testing.assert_array_equal(served[name], expected)"
_CLOSE = """\
        if expected.dtype == np.object_:  # texts
            np.testing.assert_array_equal(served[name], expected)
        else:
            np.testing.assert_allclose(served[name], expected, rtol=1e-5, atol=1e-5)"""


def fill(template: str, **values: object) -> str:
    """Fill in the ``$names`` of a file in ``templates/``."""
    text = (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute({name: str(value) for name, value in values.items()})


# --- config.pbtxt ------------------------------------------------------------------------------------------------


def write_tensors(inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> str:
    """Write the fields ``input`` and ``output`` of a ``config.pbtxt``."""
    takes, gives = (",\n".join(map(write_tensor, tensors)) for tensors in (inputs, outputs))
    return f"input [\n{takes}\n]\noutput [\n{gives}\n]"


def write_tensor(tensor: TensorSpec) -> str:
    """Write an entry of ``input`` or ``output`` in a ``config.pbtxt``."""
    name = f'name: "{tensor.name}"{"  # UTF-8" if tensor.dtype == STRING else ""}'
    optional = "\n    optional: true" if tensor.is_optional else ""
    return f"  {{\n    {name}\n    data_type: {tensor.dtype}\n    dims: {write_dims(tensor)}{optional}\n  }}"


def write_dims(tensor: TensorSpec) -> str:
    """Write a tensor's dims for ``config.pbtxt``, such as ``[ -1, 4 ]``."""
    return f"[ {', '.join(map(str, tensor.dims))} ]"


def write_ensemble(message: Any) -> str:
    """Write the ``config.pbtxt`` of an ensemble from its ModelConfig."""
    from google.protobuf import text_format

    way = " -> ".join(step.model_name for step in message.ensemble_scheduling.step)
    takes, gives = (", ".join(tensor.name for tensor in tensors) for tensors in (message.input, message.output))
    return f"# {takes} in, {gives} out: {way}.\n{text_format.MessageToString(message, as_utf8=True)}"


def write_alone(name: str, model: str, size: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Write the ``config.pbtxt`` of an ensemble that runs only ``model``; ``size`` is its ``max_batch_size``.

    Tensors keep their names, except an output with the name of an input: its name in the ensemble is ``MODEL_OUTPUT``,
    because the tensors of an ensemble share one namespace.
    """
    taken = {tensor.name for tensor in inputs}
    names = {t.name: f"{model}_{t.name}" if t.name in taken else t.name for t in outputs}
    step = Step(model, -1, {t.name: t.name for t in inputs}, names)
    returned = [replace(tensor, name=names[tensor.name]) for tensor in outputs]
    return write_ensemble(make_ensemble(name, size, inputs, returned, [step]))


# --- Python ------------------------------------------------------------------------------------------------------


def name_dtype(tensor: TensorSpec) -> str:
    """Return a tensor's dtype as Python source, such as ``np.float32``."""
    odd = {"TYPE_BOOL": "np.bool_", STRING: "np.object_"}  # whose names differ between NumPy 1 and 2
    return odd.get(tensor.dtype) or f"np.{np.dtype(DTYPES[tensor.dtype]).name}"


def describe(tensor: TensorSpec, rows: str = "rows") -> str:
    """Describe a tensor's dtype and shape, such as ``FP32 [rows, 4]``; if ``rows`` is empty, only the dims."""
    sizes = [*([rows] if rows else []), *("any" if size == -1 else str(size) for size in tensor.dims)]
    return f"{tensor.dtype.removeprefix('TYPE_')} [{', '.join(sizes)}]"


def write_nothing(tensor: TensorSpec, rows: str | int = ROWS) -> str:
    """Write an array of zeros or empty texts as Python source; variable dimensions have size 1."""
    shape = _shape(tensor, rows, 1)
    if tensor.dtype == STRING:
        return f'np.full({shape}, b"", np.object_)'
    return f"np.zeros({shape}, {name_dtype(tensor)})"


def write_sample(tensor: TensorSpec, *, is_batched: bool = True, width: int = WIDTH) -> str:
    """Write a sample array for a request as Python source: texts, floats in [0, 1), or integers 0 and 1.

    Variable dimensions have size ``width``.
    """
    shape = _shape(tensor, ROWS if is_batched else "", width)
    if tensor.dtype == STRING and is_batched and tensor.dims == (1,):
        return "[" + ", ".join(f'"{text}"' for text in TEXTS) + "]"
    if tensor.dtype == STRING:
        return f'np.full({shape}, b"A cat sat.", np.object_)'
    if tensor.dtype in ("TYPE_FP16", "TYPE_FP32", "TYPE_FP64"):
        return f"RANDOM.random({shape}).astype({name_dtype(tensor)})"
    return f"RANDOM.integers(0, 2, {shape}).astype({name_dtype(tensor)})"


def find_width(parameters: Mapping[str, str], files: Iterable[Path]) -> int:
    """Return a size for the variable dimensions of a component's sample request, one that the component may require.

    It is the length of the first list in the parameters (such as labels) or in the JSON artifacts ``files`` (such as
    means); 4 if there is no list.
    """
    reads: list[Callable[[], Any]] = [partial(parse_json, text) for text in parameters.values()]
    reads += [partial(read_json, path, _MAX_BYTES) for path in sorted(files)]
    for read in reads:
        try:
            value = read()
        except (OSError, ValueError):
            continue
        for each in value.values() if isinstance(value, dict) else [value]:
            if isinstance(each, list) and each:
                return len(each)
    return WIDTH


def _shape(tensor: TensorSpec, rows: str | int, width: int) -> str:
    sizes = [*([rows] if rows else []), *(width if size == -1 else size for size in tensor.dims)]
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def write_entries(entries: Iterable[tuple[str, str]], indent: int) -> str:
    """Write the lines of a dictionary from names and Python source of values; break long lines as formatters do."""
    lines = []
    for name, value in entries:
        line = f'{" " * indent}"{name}": {value},'
        if len(line) > LINE and value.endswith(")"):
            function, _, arguments = value.partition("(")
            inner = f"{' ' * (indent + 4)}{arguments[:-1]}"
            line = f'{" " * indent}"{name}": {function}(\n{inner}\n{" " * indent}),'
        lines.append(line)
    return "\n".join(lines)


def write_test(
    name: str,
    pipeline: str,
    inputs: Sequence[TensorSpec],
    models: Iterable[ModelConfig],
    *,
    is_batched: bool,
    widths: Mapping[str, int] | None = None,
    artifacts: Sequence[str] = (),
) -> str:
    """Write a test of ``pipeline``: the server must give the same answer to a sample request as the test's own process.

    ``inputs`` are the request's tensors, and ``widths`` the sizes of their variable dimensions, by tensor name.
    ``artifacts`` are the files that no model folder contains: the test takes them from ``build/artifacts``. Answers
    must be equal to the last bit if all models are Python components; otherwise they may differ by 1e-5.
    """
    known = widths or {}
    entries = [
        (t.name, write_sample(t, is_batched=is_batched, width=known.get(t.name, WIDTH)))
        for t in inputs
        if not t.is_optional
    ]
    before = ""
    if artifacts:
        line = f'ARTIFACTS = PROJECT / "build" / "artifacts"  # {", ".join(artifacts)}'
        before += (line if len(line) <= LINE else line.partition("  #")[0]) + "\n"
    if any("RANDOM." in value for _, value in entries):
        before += "RANDOM = np.random.default_rng(0)\n"
    is_exact = all(model.backend == "python" for model in models)
    return fill(
        "test_equal.py",
        name=name,
        pipeline=pipeline,
        before=before,
        artifacts="artifacts=ARTIFACTS, " if artifacts else "",
        request=write_entries(entries, 4),
        compare=_EXACT if is_exact else _CLOSE,
    )
