"""Treelite forests on the host. Treelite's engine runs them; the answers have the form of Triton's FIL backend.

Also rounds thresholds to FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, needs
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import Array, ModelSpec
from shoal.kit.component.tensors import namespace

Predict: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]

_DOWN, _UP = -np.inf, np.inf
# By Treelite's Operator (<, <=, >, >=): the direction in which rounding a threshold keeps every row on its side.
_SIDES: Mapping[int, float] = {2: _UP, 3: _DOWN, 4: _DOWN, 5: _UP}


def load_forest(path: Path) -> Predict:
    """Load a forest as a function from features, FP32 ``[rows, features]``, to values, FP32 ``[rows, outputs]``.

    A regressor gives one score, a classifier the probabilities of its classes. For two classes, this may be only the
    probability of the second class (see ``Forest.num_classes``). The function uses one thread.

    Raises:
        SetupError: Treelite is not installed.
    """
    return make_predict(load_model(path))


def load_model(path: Path) -> Any:
    """Load Treelite's model from a checkpoint. Call ``read_forest`` first: a damaged checkpoint may crash Treelite.

    Raises:
        SetupError: Treelite is not installed.
    """
    with needs("serve"):
        import treelite

    return treelite.Model.deserialize(str(path))


def make_predict(model: Any) -> Predict:
    """Make the function that ``load_forest`` returns from Treelite's model."""
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
    """Return the sorted indices of the features whose values are category codes in Treelite's model."""
    found: set[int] = set()
    for index in range(model.num_tree):
        tree = model.get_tree_accessor(index)
        begin, end = tree.get_field("category_list_begin"), tree.get_field("category_list_end")
        found.update(tree.get_field("split_index")[: len(begin)][end > begin].tolist())
    return tuple(sorted(found))


def check_categories(rows: NDArray[np.float32], categories: Sequence[int], name: str) -> None:
    """Check that category codes are whole numbers, or NaN if a code is missing.

    ``categories`` are the indices of the features that are category codes; ``name`` is the input's name. Libraries
    treat other numbers differently: LightGBM drops the fraction, scikit-learn treats the code as unknown.

    Raises:
        InputError: a code is invalid; the message names the row and the feature.
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
class FilSettings:
    """Parameters of a model of Triton's ``fil`` backend that decide the form of its answers.

    ``gives_class``: the answer is the number of the predicted class (parameter ``output_class``, called
    ``is_classifier`` from Triton 25.09 on); with two classes, ``threshold`` decides. ``gives_chances``: the answer is
    the probabilities of the classes instead (parameter ``predict_proba``).
    """

    gives_class: bool = False
    gives_chances: bool = False
    threshold: float = 0.5
    given: tuple[str, ...] = ()  # the settings that are true, as written in config.pbtxt

    @classmethod
    def read(cls, spec: ModelSpec) -> FilSettings:
        """Read the settings from a model's parameters.

        Raises:
            ArtifactError: a setting is neither true nor false, or the threshold is not a number.
        """
        texts, parameters = spec.parameters, Parameters(spec)
        names = [name for name in ("output_class", "is_classifier", "predict_proba") if name in texts]
        given = [name for name in names if parameters.flag(name, default=False)]
        return cls(
            texts.get("is_classifier", texts.get("output_class")) == "true",
            texts.get("predict_proba") == "true",
            parameters.number("threshold", 0.5),
            tuple(f"{name} true" for name in given),
        )

    def widths(self, num_outputs: int, *, is_classifier: bool) -> Collection[int]:
        """Return the output widths that may be declared for a forest with ``num_outputs`` values per row.

        There is none for a regressor with settings of a classifier, because FIL would apply the settings, and answer 0
        or 1 instead of the regressor's values.
        """
        if not is_classifier:
            return () if self.gives_class or self.gives_chances else (num_outputs,)
        if self.gives_chances:
            return (num_outputs,) if num_outputs > 1 else (2, 1)  # 1: from 25.09 on, only the second class's
        return (1,) if self.gives_class else (num_outputs,)

    def answer(self, values: Array, width: int) -> Array:
        """Compute the answers of Triton's FIL backend, FP32 ``[rows, width]``, from the forest's values.

        The values are FP32 ``[rows, outputs]``, a NumPy or CuPy array. If several classes have the highest probability,
        the first of them is the answer. Source: fil_backend, src/tl_model.h, src/cpu_forest_model.h and
        src/detail/postprocess_cpu.cc.
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
    """Round every threshold of a Treelite model to FP32, in place; return whether a threshold changed.

    FP32 rows end in the same leaves as before. Otherwise an engine that computes in FP32, such as nvForest on a GPU,
    would round each threshold to the nearest value, and send some rows to the other branch.
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
    """Round thresholds to FP32 so that every comparison of an FP32 number with a threshold keeps its result.

    ``comparisons`` are Treelite's codes of the operators. ``x <= t`` and ``x > t`` keep their results if ``t`` is
    rounded down, ``x < t`` and ``x >= t`` if it is rounded up.
    """
    sides = np.array([_SIDES.get(code, _DOWN) for code in range(int(comparisons.max()) + 1)])
    side = sides[comparisons]
    with np.errstate(over="ignore"):  # a number beyond single precision becomes infinity
        rounded = thresholds.astype(np.float32)
        beyond = np.where(side == _DOWN, rounded > thresholds, rounded < thresholds)
        return np.where(beyond, np.nextafter(rounded, side.astype(np.float32)), rounded)
