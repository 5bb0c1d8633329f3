"""A Treelite forest on the host, computed by Treelite's own engine; and thresholds that single precision can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import needs

Predict: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]

_DOWN, _UP = -np.inf, np.inf
# By Treelite's Operator (<, <=, >, >=), the side to which a threshold may be rounded without parting rows differently.
_SIDES: Mapping[int, float] = {2: _UP, 3: _DOWN, 4: _DOWN, 5: _UP}


def load_forest(path: Path) -> Predict:
    """What a forest says of features FP32 ``[rows, features]``: FP32 ``[rows, outputs]``; on one thread.

    A regressor gives one score, a classifier the chances of its classes; one of two classes may give the second's alone
    (``Forest.num_classes`` of `shoal.forests.checkpoints` tells).

    Raises:
        SetupError: Treelite is not installed.
    """
    with needs("serve"):
        import treelite

    model = treelite.Model.deserialize(str(path))
    header = model.get_header_accessor()
    # Every target has as many values as the one with the most classes.
    num_outputs = int(header.get_field("num_target")[0]) * int(header.get_field("num_class").max())

    def predict(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        # At the sizes of a request threads cost more than they bring.
        values = treelite.gtil.predict(model, rows, nthread=1)
        return np.asarray(values.reshape(len(rows), num_outputs), np.float32)

    return predict


def round_forest(model: Any) -> bool:
    """Round every threshold of a Treelite model to single precision; whether that changed any.

    Rows are FP32 and end in the same leaves as before. An engine that computes in single precision, as nvForest does on
    a GPU, would else round to the nearest and send some of them the other way.
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
    """Thresholds in single precision that part single-precision numbers as ``thresholds`` do.

    ``x <= t`` and ``x > t`` hold for the same numbers with the greatest one not above ``t``, ``x < t`` and ``x >= t``
    with the least one not below it.
    """
    sides = np.array([_SIDES.get(code, _DOWN) for code in range(int(comparisons.max()) + 1)])
    side = sides[comparisons]
    with np.errstate(over="ignore"):  # infinity is a number beyond single precision
        rounded = thresholds.astype(np.float32)
        beyond = np.where(side == _DOWN, rounded > thresholds, rounded < thresholds)
        return np.where(beyond, np.nextafter(rounded, side.astype(np.float32)), rounded)
