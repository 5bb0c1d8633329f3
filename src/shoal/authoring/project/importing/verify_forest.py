"""Export of a forest as a Treelite checkpoint, and comparison of its answers with the training library's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ArtifactError
from shoal.kit.forests.checkpoints import Forest, read_forest
from shoal.kit.forests.treelite import load_forest, round_forest

TOLERANCE = 1e-5  # absolute, or relative for scores beyond 1: FP32 holds seven digits
NUM_ROWS = 256
NUMERICAL, CATEGORICAL = 1, 2  # Treelite's TreeNodeType

_LEAST = 1e-30  # LightGBM treats values nearer to 0 than 1e-35 as 0

Rows: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """A forest that was read from a file or an object; ``name`` is used in errors.

    ``model`` is Treelite's model, ``what`` describes it, and ``said`` are notes for the user. ``is_classifier``: the
    forest answers with class probabilities, otherwise with one score. ``labels`` are the class names, in order. ``ask``
    returns the answers of the library that trained the forest, for rows FP32 ``[rows, features]``; they are class
    indices if ``gives_labels``. ``has_missing``: the rows for ``ask`` may contain NaN.
    """

    name: str
    model: Any
    what: str
    is_classifier: bool
    said: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = None
    ask: Callable[[Rows], Any] | None = None
    has_missing: bool = False
    gives_labels: bool = False


def write_proven(found: Found, path: Path) -> tuple[Forest, tuple[str, ...]]:
    """Write a forest to ``path`` as a Treelite checkpoint, and compare its answers with ``found.ask``, if given.

    Return the checkpoint's header and notes for the user. Thresholds are rounded to FP32 so that FP32 rows take the
    same branches: single-precision engines such as Triton's FIL would round each threshold to the nearest value, and
    send some rows to the other branch.

    Raises:
        ArtifactError: an answer differs by more than 1e-5, or the forest cannot be served.
    """
    said: tuple[str, ...] = ()
    if round_forest(found.model):
        said = ("thresholds are rounded to FP32, so that FP32 rows end in the same leaves",)
    found.model.serialize(str(path))
    forest = read_forest(path)
    if found.ask is not None:
        rows = draw_rows(found.model, has_missing=found.has_missing)
        said += (f"compared with the library on {NUM_ROWS} rows: {_compare(found, path, rows):.1g} at most",)
    return forest, said


def _compare(found: Found, path: Path, rows: Rows) -> float:
    """Return the greatest difference between the checkpoint's answers and the library's, relative for answers beyond 1.

    Raises:
        ArtifactError: the difference is above the tolerance.
    """
    values = load_forest(path)(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as missing feature names
        expected = np.asarray(found.ask(rows) if found.ask else values, np.float64).reshape(len(rows), -1)
    if found.gives_labels:
        values = values.argmax(axis=1)[:, None].astype(np.float32)
    if values.shape[1] < expected.shape[1]:  # the probability of the second class is enough
        expected = expected[:, -1:]
    difference = np.abs(values - expected) / np.maximum(1, np.abs(expected))
    greatest = float(difference.max())
    if not greatest <= TOLERANCE:
        row = int(np.nanargmax(difference.max(axis=1)))
        raise ArtifactError(
            f"{found.name} cannot be added: its checkpoint answers {values[row].tolist()}, and the library"
            f" {expected[row].round(7).tolist()}, for {rows[row].tolist()}.",
            f"Allowed: {TOLERANCE:g}. It uses something that a Treelite checkpoint cannot express.",
        )
    return greatest


def draw_rows(model: Any, *, has_missing: bool) -> Rows:
    """Draw rows, FP32 ``[256, features]``, at and near the forest's thresholds, where errors would show first.

    ``has_missing``: about a tenth of the values are NaN.
    """
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(NUM_ROWS, model.num_feature)).astype(np.float32)
    thresholds, categories = _values(model)
    with np.errstate(over="ignore"):
        for feature, values in thresholds.items():
            drawn = generator.choice(values, NUM_ROWS).astype(np.float32)
            finite = drawn[np.isfinite(drawn)]
            spread = np.float32(finite.std(dtype=np.float64) if finite.size else 0) or np.float32(1)
            about = (
                drawn,
                np.nextafter(drawn, np.float32(-np.inf)),
                np.nextafter(drawn, np.float32(np.inf)),
                drawn + generator.normal(size=NUM_ROWS).astype(np.float32) * spread,
            )
            drawn = np.choose(generator.integers(0, len(about), NUM_ROWS), about)
            rows[:, feature] = np.where(np.isfinite(drawn) & (np.abs(drawn) > _LEAST), drawn, 0)
    for feature, known in categories.items():
        rows[:, feature] = generator.choice([*known, max(known) + 1], NUM_ROWS)  # the last is an unknown category
    if has_missing:
        rows[generator.random(rows.shape) < 0.1] = np.nan
    return rows


def _values(model: Any) -> tuple[dict[int, NDArray[Any]], dict[int, set[int]]]:
    """Collect the thresholds of a forest's splits by feature, and the category codes by feature."""
    trees = [model.get_tree_accessor(index) for index in range(model.num_tree)]
    kinds, features, thresholds = (
        np.concatenate([tree.get_field(name) for tree in trees]) for name in ("node_type", "split_index", "threshold")
    )
    features, thresholds = features[kinds == NUMERICAL], thresholds[kinds == NUMERICAL]
    order = np.argsort(features, kind="stable")
    names, begins = np.unique(features[order], return_index=True)
    parts = np.split(thresholds[order], begins[1:]) if len(names) else []
    categories: dict[int, set[int]] = {}
    for tree in trees:
        listed, begin, end = (tree.get_field(f"category_list{suffix}") for suffix in ("", "_begin", "_end"))
        for node in np.flatnonzero(tree.get_field("node_type") == CATEGORICAL):
            known = listed[int(begin[node]) : int(end[node])].tolist()
            categories.setdefault(int(tree.get_field("split_index")[node]), {0}).update(known)
    return dict(zip(names.tolist(), parts, strict=True)), categories
