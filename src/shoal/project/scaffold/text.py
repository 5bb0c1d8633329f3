"""Text of new files: templates, tensor declarations for ``config.pbtxt``, and arrays as Python source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from shoal.component.spec import DTYPES, STRING, TensorSpec
from shoal.repository.config import Step
from shoal.repository.ensemble_config import make_ensemble

_TEMPLATES = Path(__file__).parent / "templates"
LINE = 120  # longest line of Python
ROWS, WIDTH = 2, 4  # of a test's request; the width is the size of variable dimensions
TEXTS = ("A cat sat.", "Füße")  # one per row; the second has more bytes than characters


def fill(template: str, **values: object) -> str:
    """Fill in the ``$names`` of a file in ``templates/``."""
    text = (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute({name: str(value) for name, value in values.items()})


# --- config.pbtxt ------------------------------------------------------------------------------------------------


def write_tensors(inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> str:
    """Write the fields ``input`` and ``output``."""
    return f"input [\n{_join(map(_entry, inputs))}\n]\noutput [\n{_join(map(_entry, outputs))}\n]"


def _entry(tensor: TensorSpec) -> str:
    lines = [f'name: "{tensor.name}"', f"data_type: {tensor.dtype}", f"dims: [ {', '.join(map(str, tensor.dims))} ]"]
    if tensor.dtype == STRING:
        lines[0] += "  # UTF-8"
    if tensor.is_optional:
        lines.append("optional: true")
    return "\n".join(["  {", *(f"    {line}" for line in lines), "  }"])


def _join(blocks: Iterable[str]) -> str:
    return ",\n".join(blocks)


def write_parameter(key: str, value: str) -> str:
    """Write an entry of ``parameters``."""
    return f'parameters {{\n  key: "{key}"\n  value: {{ string_value: {quote(value)} }}\n}}\n'


def quote(text: str) -> str:
    """Quote a text for Protobuf's text format."""
    from google.protobuf.text_encoding import CEscape

    return f'"{CEscape(text, as_utf8=True)}"'


def write_ensemble(message: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Write an ensemble's ``config.pbtxt``; ``message`` is its ModelConfig with ``inputs`` and ``outputs``."""
    steps = message.ensemble_scheduling.step
    way = " -> ".join(step.model_name for step in steps)
    names = (", ".join(tensor.name for tensor in tensors) for tensors in (inputs, outputs))
    return "\n".join(
        [
            f"# {' in, '.join(names)} out: {way}.",
            f'name: "{message.name}"',
            'platform: "ensemble"',
            f"max_batch_size: {message.max_batch_size}",
            "",
            write_tensors(inputs, outputs),
            "",
            "ensemble_scheduling {",
            "  step [",
            _join(map(_step, steps)),
            "  ]",
            "}",
            "",
        ]
    )


def _step(step: Any) -> str:
    maps = [
        f'{field} {{ key: "{key}" value: "{name}" }}'
        for field, mapping in (("input_map", step.input_map), ("output_map", step.output_map))
        for key, name in sorted(mapping.items())
    ]
    lines = [f'model_name: "{step.model_name}"', f"model_version: {step.model_version}", *maps]
    return "\n".join(["    {", *(f"      {line}" for line in lines), "    }"])


def write_alone(name: str, model: str, size: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Write the ``config.pbtxt`` of an ensemble of one model, whose tensors keep their names."""
    step = Step(model, -1, {t.name: t.name for t in inputs}, {t.name: t.name for t in outputs})
    return write_ensemble(make_ensemble(name, size, inputs, outputs, [step]), inputs, outputs)


# --- Python ------------------------------------------------------------------------------------------------------


def name_dtype(tensor: TensorSpec) -> str:
    """Return a tensor's dtype as Python source: ``np.float32``."""
    odd = {"TYPE_BOOL": "np.bool_", STRING: "np.object_"}  # whose names differ between NumPy 1 and 2
    return odd.get(tensor.dtype) or f"np.{np.dtype(DTYPES[tensor.dtype]).name}"


def describe(tensor: TensorSpec, rows: str = "rows") -> str:
    """Describe dtype and shape: ``FP32 [rows, 4]``."""
    sizes = [*([rows] if rows else []), *("any" if size == -1 else str(size) for size in tensor.dims)]
    return f"{tensor.dtype.removeprefix('TYPE_')} [{', '.join(sizes)}]"


def write_nothing(tensor: TensorSpec, rows: str | int = ROWS) -> str:
    """Write an array of zeros or empty texts; variable dimensions have size 1."""
    shape = _shape(tensor, rows, 1)
    if tensor.dtype == STRING:
        return f'np.full({shape}, b"", np.object_)'
    return f"np.zeros({shape}, {name_dtype(tensor)})"


def write_sample(tensor: TensorSpec, *, is_batched: bool = True, width: int = WIDTH) -> str:
    """Write a sample array for a request: texts, floats in [0, 1), or integers 0 and 1."""
    shape = _shape(tensor, ROWS if is_batched else "", width)
    if tensor.dtype == STRING and is_batched and tensor.dims == (1,):
        return f"[{', '.join(_literal(text) for text in TEXTS)}]"
    if tensor.dtype == STRING:
        return f'np.full({shape}, b"A cat sat.", np.object_)'
    if tensor.dtype in ("TYPE_FP16", "TYPE_FP32", "TYPE_FP64"):
        return f"RANDOM.random({shape}).astype({name_dtype(tensor)})"
    return f"RANDOM.integers(0, 2, {shape}).astype({name_dtype(tensor)})"


def _literal(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _shape(tensor: TensorSpec, rows: str | int, width: int) -> str:
    sizes = [*([rows] if rows else []), *(width if size == -1 else size for size in tensor.dims)]
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def write_entries(entries: Iterable[tuple[str, str]], indent: int) -> str:
    """Write the lines of a dictionary, each a name and a call; break long lines as formatters do."""
    lines = []
    for name, value in entries:
        line = f'{" " * indent}"{name}": {value},'
        if len(line) > LINE and value.endswith(")"):
            function, _, arguments = value.partition("(")
            inner = f"{' ' * (indent + 4)}{arguments[:-1]}"
            line = f'{" " * indent}"{name}": {function}(\n{inner}\n{" " * indent}),'
        lines.append(line)
    return "\n".join(lines)
