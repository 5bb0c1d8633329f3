"""Treelite forests on the host, run by Treelite's own engine; and rounding of thresholds to single precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, needs

Predict: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]

_DOWN, _UP = -np.inf, np.inf
# By Treelite's Operator (<, <=, >, >=): the direction in which rounding a threshold keeps every row on its side.
_SIDES: Mapping[int, float] = {2: _UP, 3: _DOWN, 4: _DOWN, 5: _UP}


def load_forest(path: Path) -> Predict:
    """Load a forest as a function from features, FP32 ``[rows, features]``, to FP32 ``[rows, outputs]``; one thread.

    A regressor gives one score, a classifier the probabilities of its classes; with two classes possibly only the
    second's (see ``Forest.num_classes`` of `shoal.forests.checkpoints`).

    Raises:
        SetupError: Treelite is not installed.
    """
    with needs("serve"):
        import treelite

    model = treelite.Model.deserialize(str(path))
    header = model.get_header_accessor()
    # Every target has as many values as the one with the most classes.
    num_outputs = int(header.get_field("num_target")[0]) * int(max(header.get_field("num_class")))

    def predict(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        # At the size of a request threads cost more than they save.
        values = treelite.gtil.predict(model, rows, nthread=1)
        return np.asarray(values.reshape(len(rows), num_outputs), np.float32)

    return predict


def find_categories(path: Path) -> tuple[int, ...]:
    """Return the features that a checkpoint's splits take for category codes, in order."""
    with needs("serve"):
        import treelite

    model = treelite.Model.deserialize(str(path))
    found: set[int] = set()
    for index in range(model.num_tree):
        tree = model.get_tree_accessor(index)
        begin, end = tree.get_field("category_list_begin"), tree.get_field("category_list_end")
        found.update(tree.get_field("split_index")[: len(begin)][end > begin].tolist())
    return tuple(sorted(found))


def check_categories(rows: NDArray[np.float32], categories: Sequence[int], name: str) -> None:
    """Check that category codes are whole numbers, or NaN where one is missing.

    For other numbers each library has a rule of its own: LightGBM drops the fraction, scikit-learn treats the code as
    unknown.

    Raises:
        InputError: one is not; the message names row and feature.
    """
    for feature in categories:
        codes = rows[:, feature]
        is_wrong = ~(np.isnan(codes) | (np.isfinite(codes) & (codes == np.floor(codes))))
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise InputError(
                f"{name}[{row}] has {codes[row]} for feature {feature}, a category code; it must be a whole number.",
                "Send the code that the model was trained with, or NaN where it is missing.",
            )


def round_forest(model: Any) -> bool:
    """Round every threshold of a Treelite model to single precision; return whether that changed any.

    Rows are FP32 and end in the same leaves as before. An engine that computes in single precision, such as nvForest on
    a GPU, would otherwise round to the nearest value and send some of them the other way.
    """
    is_changed = False
    for index in range(model.num_tree):
        tree = model.get_tree_accessor(index)
        thresholds = tree.get_field("threshold")
        if thresholds.dtype == np.float32:
            return False
        rounded = round_thresholds(thresholds, tree.get_field("cmp")).astype(thresholds.dtype)
        is_changed = is_changed or not np.array_equal(rounded, thresholds)
        tree.set_field("threshold", rounded)
    return is_changed


def round_thresholds(thresholds: NDArray[Any], comparisons: NDArray[Any]) -> NDArray[np.float32]:
    """Round thresholds to single precision so that every comparison with an FP32 number keeps its result.

    ``x <= t`` and ``x > t`` are unchanged if ``t`` is rounded down to FP32, ``x < t`` and ``x >= t`` if it is rounded
    up.
    """
    sides = np.array([_SIDES.get(code, _DOWN) for code in range(int(comparisons.max()) + 1)])
    side = sides[comparisons]
    with np.errstate(over="ignore"):  # a number beyond single precision becomes infinity
        rounded = thresholds.astype(np.float32)
        beyond = np.where(side == _DOWN, rounded > thresholds, rounded < thresholds)
        return np.where(beyond, np.nextafter(rounded, side.astype(np.float32)), rounded)
