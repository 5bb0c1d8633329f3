"""Treelite forests on the host: run by Treelite's own engine, and answers in the form that Triton's FIL backend gives.

Also rounds thresholds to single precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.component.spec import ModelSpec
from shoal.component.tensors import Array, namespace
from shoal.errors import ArtifactError, InputError, needs

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
    return make_predict(load_model(path))


def load_model(path: Path) -> Any:
    """Load Treelite's model from a checkpoint that ``read_forest`` accepts: Treelite may crash on a damaged one.

    Raises:
        SetupError: Treelite is not installed.
    """
    with needs("serve"):
        import treelite

    return treelite.Model.deserialize(str(path))


def make_predict(model: Any) -> Predict:
    """Make the function that ``load_forest`` returns, of Treelite's model."""
    from treelite import gtil

    header = model.get_header_accessor()
    # Every target has as many values as the one with the most classes.
    num_outputs = int(header.get_field("num_target")[0]) * int(max(header.get_field("num_class")))

    def predict(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        # At the size of a request threads cost more than they save.
        values = gtil.predict(model, rows, nthread=1)
        return np.asarray(values.reshape(len(rows), num_outputs), np.float32)

    return predict


def find_categories(model: Any) -> tuple[int, ...]:
    """Return the features that the splits of Treelite's model take for category codes, in order."""
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


# --- answers as those of FIL, on the host and the GPU ---------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Parameters of a ``fil`` model that decide the form of its answers.

    ``gives_class``: the number of the class (``output_class``, called ``is_classifier`` from 25.09 on), for two classes
    by ``threshold``. ``gives_chances``: the probabilities of the classes instead (``predict_proba``).
    """

    gives_class: bool = False
    gives_chances: bool = False
    threshold: float = 0.5
    given: tuple[str, ...] = ()  # those that are true, as they were written

    @classmethod
    def read(cls, spec: ModelSpec) -> Settings:
        """Read the settings of a model.

        Raises:
            ArtifactError: a setting is neither true nor false, or the threshold is not a number.
        """
        texts = spec.parameters
        names = [name for name in ("output_class", "is_classifier", "predict_proba") if name in texts]
        for name in names:
            if texts[name] not in ("true", "false"):
                raise ArtifactError(
                    f"{name} of {spec.name} is {texts[name]!r}.", "Write true or false, in small letters."
                )
        try:
            threshold = float(texts.get("threshold", "0.5"))
        except ValueError:
            raise ArtifactError(
                f"threshold of {spec.name} is {texts['threshold']!r}.", "Write a number, as 0.5."
            ) from None
        return cls(
            texts.get("is_classifier", texts.get("output_class")) == "true",
            texts.get("predict_proba") == "true",
            threshold,
            tuple(f"{name} true" for name in names if texts[name] == "true"),
        )

    def widths(self, num_outputs: int, *, is_classifier: bool) -> Collection[int]:
        """Return the output widths that may be declared, for a forest with ``num_outputs`` values per row.

        Empty if a regressor has settings of a classifier: FIL would apply them, and answer 0 or 1 instead of values.
        """
        if not is_classifier:
            return () if self.gives_class or self.gives_chances else (num_outputs,)
        if self.gives_chances:
            return (num_outputs,) if num_outputs > 1 else (2, 1)  # 1: from 25.09 on, only the second class's
        return (1,) if self.gives_class else (num_outputs,)

    def answer(self, values: Array, width: int) -> Array:
        """Compute answers, FP32 ``[rows, width]``, from the forest's values, FP32 ``[rows, outputs]``.

        The arrays are of NumPy or CuPy. Of equally likely classes the first wins. Source: fil_backend, src/tl_model.h,
        src/cpu_forest_model.h and src/detail/postprocess_cpu.cc.
        """
        xp = namespace(values)
        if self.gives_chances:
            return xp.concat([1 - values, values], axis=1) if values.shape[1] < width else values
        if not self.gives_class:
            return values
        is_several = values.shape[1] > 1
        classes: Any = xp.argmax(values, axis=1)[:, None] if is_several else values > self.threshold
        return xp.astype(classes, xp.float32)


# --- rounding of thresholds ------------------------------------------------------------------------------------------


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
