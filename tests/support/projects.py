"""A user's project of small models, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shoal

CONFIG = """name: "{name}"
backend: "python"
max_batch_size: {rows}
input [ {inputs} ]
output [ {outputs} ]
"""
MODEL = """import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

from shoal.kit.component.base import Component
from shoal.kit.component.spec import Arrays


class Blank(Component):
    \"\"\"Blank outputs of the declared shapes, as many rows as came; 3 where else any size will do.\"\"\"

    def run(self, batch: Arrays) -> Arrays:
        rows, outputs = len(next(iter(batch.values()))), {}
        for t in self.context.spec.outputs:
            shape = [3 if d == -1 else d for d in t.dims]
            if self.context.spec.is_batched:
                shape.insert(0, rows)
            elif t.dims[0] == -1:
                shape[0] = rows
            outputs[t.name] = np.full(shape, b"x" if t.dtype == "TYPE_STRING" else 1).astype(t.numpy_dtype)
        return outputs


TritonPythonModel = Blank.for_triton()
"""


def tensor(name: str, dtype: str, dims: list[int], *, optional: bool = False) -> str:
    return f'{{ name: "{name}" data_type: TYPE_{dtype} dims: {dims}{" optional: true" if optional else ""} }}'


def write_model(
    room: Path, name: str, inputs: list[Any], outputs: list[Any], rows: int = 8, optional: tuple[str, ...] = ()
) -> None:
    folder = room / name
    (folder / "1").mkdir(parents=True)
    declared = (
        ", ".join(tensor(n, d, s, optional=n in optional) for n, d, s in tensors) for tensors in (inputs, outputs)
    )
    text = CONFIG.format(name=name, rows=rows, **dict(zip(("inputs", "outputs"), declared, strict=True)))
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    (folder / "1" / "model.py").write_text(MODEL, encoding="utf-8")


def write_project(root: Path) -> None:
    """Models of several dtypes, shapes and rows, as a user's project has them."""
    room = root / "models"
    text, numbers, wide, ids = ["T", "STRING", [1]], ["N", "FP32", [3]], ["W", "FP32", [-1]], ["I", "INT64", [-1]]
    write_model(room, "read", [text], [["A", "FP32", [3]], ["B", "INT64", [-1]], ["C", "STRING", [1]]])
    write_model(room, "narrow", [numbers], [["Y", "FP32", [1]]], rows=4)
    write_model(room, "wide", [wide], [["Y", "FP32", [-1]], ["L", "STRING", [1]]], rows=16)
    write_model(room, "count", [ids], [["Y", "INT64", [2]], ["Z", "FP32", [3]]])
    write_model(room, "join", [["X", "FP32", [-1]], ["V", "FP32", [-1]]], [["Y", "FP32", [3]]], optional=("V",))
    write_model(room, "mark", [["S", "STRING", [1]], ["X", "INT64", [-1]]], [["Y", "STRING", [1]]])
    write_model(room, "single", [["X", "FP32", [-1, 3]]], [["Y", "FP32", [-1, 3]]], rows=0)
    write_model(room, "flat", [["X", "FP32", [5]]], [["Y", "FP32", [5]]], rows=0)


def define(project: Path, name: str = "mine", **options: Any) -> shoal.Ensemble:
    return shoal.Ensemble(name, projects=[project], **options)
