"""Imported models for the shared server: one of each kind, and what they are asked.

Imported encoders are left out: one checks that the vocabulary it was made with is its repository's, and the
readability pipeline's is there already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.grown import SERVED
from tests.support.imports import Pooled, add, load_script, save_texts, script

RNG = np.random.default_rng(0)
WIDTH, NUM_ROWS = 24, 200
MASK = (np.arange(WIDTH) < RNG.integers(2, WIDTH + 1, NUM_ROWS)[:, None]).astype(np.int64)
IDS = RNG.integers(1, 50, (NUM_ROWS, WIDTH)) * MASK
TEXTS = np.array([f"word {i % 7}é".encode() for i in range(NUM_ROWS)], object)[:, None]
FORESTS = ("skops_three", "xgboost_three", "lightgbm_three")
IMPORTED: dict[str, dict[str, Any]] = {
    **{name: {"input__0": SERVED[name].rows} for name in FORESTS},
    "texts": {"a": TEXTS, "b": TEXTS[::-1].copy()},
    "pooled": {"ids": IDS, "mask": MASK},
}


def make_project(root: Path) -> Path:
    """A project with a leaf of each."""
    project, sources = root / "project", root / "sources"
    sources.mkdir()
    for name in FORESTS:
        (root / name).mkdir()
        add(project, SERVED[name].make(root / name)[0], name)
    save_texts(sources / "texts.onnx")
    add(project, sources / "texts.onnx", "texts")
    script(Pooled(), sources / "pooled.pt")
    tokens = ["ids:INT64:-1", "mask:INT64:-1"]
    add(project, load_script(sources / "pooled.pt"), "pooled", inputs=tokens, mask="mask")
    return project
