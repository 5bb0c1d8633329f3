"""Functions that several components share: ranking of classes, weighted mean of two scores, z-scores, and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ArtifactError, InputError
from shoal.kit.component.files import GREATEST, is_number, read_object, refusal
from shoal.kit.component.ledger import CONTROL
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import Array, Arrays
from shoal.kit.component.tensors import Device, namespace

__all__ = ["Choices", "blend", "check_finite", "check_numbers", "check_weight", "normalise", "read_zscore"]

_LOOK = "Look at the output of the previous model for this row."


def check_numbers(arrays: Arrays, device: Device) -> None:
    """Check that no value is NaN, because every comparison with NaN is false.

    ``arrays`` maps names to FP32 arrays ``[rows, ...]``, all with the same number of rows. If they are on a GPU, one
    byte per row and array is copied to the host.

    Raises:
        InputError: a value is NaN; the message gives the name of its array, and the row.
    """
    _check(arrays, device, lambda array: ~namespace(array).isnan(array), "NaN, which is not a number")


def check_finite(arrays: Arrays, device: Device) -> None:
    """Check that no value is NaN or infinite; arguments and error are those of ``check_numbers``."""
    _check(arrays, device, lambda array: namespace(array).isfinite(array), "NaN or infinity; it must be finite")


def _check(arrays: Arrays, device: Device, is_fit: Callable[[Array], Array], what: str) -> None:
    xp = namespace(*arrays.values())
    fit = [xp.all(is_fit(array), axis=tuple(range(1, array.ndim))) for array in arrays.values()]
    for which, row in np.argwhere(~device.fetch(xp.stack(fit), CONTROL)):
        raise InputError(f"{[*arrays][which]}[{row}] holds {what}.", _LOOK)


@dataclass(frozen=True)
class Choices:
    """Ranking of the best classes of each row. A class is named by its label, or by its column number without labels.

    ``scores`` is the name of the input tensor, for error messages. ``num_best`` is the number of classes to return, 0
    for all. The ranking runs on the host, because labels are strings.
    """

    scores: str
    labels: tuple[str, ...] = ()
    num_best: int = 0

    @classmethod
    def read(cls, parameters: Parameters, scores: str, num_best: int) -> Choices:
        """Create a ranking with the labels in the parameter ``labels``.

        Without labels, the number of classes is the size ``n`` that the model's tensors declare,
        ``parameters.sizes["n"]``.

        Raises:
            ArtifactError: there are not as many labels as scores per row, or fewer scores than ``num_best``.
        """
        labels = tuple(parameters.texts("labels"))
        if labels:
            parameters.expect("n", len(labels), "its parameter labels has")
        num_classes = len(labels) or parameters.sizes.get("n", num_best)
        if num_best > num_classes:
            raise ArtifactError(
                f"{scores} has {num_classes} scores per row, fewer than the best {num_best} that the model returns.",
                f"Write at most {num_classes} in the parameter k and in the dims of the outputs.",
            )
        return cls(scores, labels, num_best)

    def __call__(self, scores: NDArray[np.float32]) -> tuple[NDArray[np.object_], NDArray[np.float32]]:
        """Return the names, as ``bytes``, and the scores of the best classes of each row.

        Both arrays are ``[rows, classes returned]``, highest score first; equal scores are in column order.

        Raises:
            InputError: a score is NaN, or the number of scores does not fit the labels or ``num_best``.
        """
        width = scores.shape[1]
        if width != (len(self.labels) or width) or width < max(1, self.num_best):
            wanted = f"{len(self.labels)} labels" if self.labels else f"the best {max(1, self.num_best)}"
            raise InputError(f"{self.scores} has {width} columns for {wanted}.", "Send one score for each class.")
        check_numbers({self.scores: scores}, Device())
        columns = _rank(scores, self.num_best or width)
        names = np.array([label.encode() for label in self.labels or map(str, range(width))], np.object_)
        return names[columns], np.take_along_axis(scores, columns, axis=1)


def _rank(scores: NDArray[np.float32], number: int) -> NDArray[np.intp]:
    """Return the column numbers of the ``number`` highest scores of each row, highest first: ``[rows, number]``."""
    best = scores.argmax(axis=1)[:, None] if number == 1 else np.argsort(-scores, axis=1, kind="stable")
    columns: NDArray[np.intp] = best[:, :number]
    return columns


def blend(weight: Array | float, first: Array, second: Array) -> Array:
    """Return ``weight * first + (1 - weight) * second``, element by element, in the arrays' own dtype."""
    if isinstance(weight, float):  # round the number to the arrays' dtype, like a weight that comes as a tensor
        weight = namespace(first).full_like(first, weight)
    return weight * first + (1 - weight) * second


def check_weight(weight: np.ndarray[Any, Any], *, name: str) -> None:
    """Check that each weight is between 0 and 1.

    Raises:
        InputError: a weight is outside this range, or NaN; the message gives the first such row.
    """
    for row in np.flatnonzero(~((weight >= 0) & (weight <= 1))):
        value = weight.reshape(-1)[row]
        raise InputError(f"{name}[{row}] is {value:g}; it must lie between 0 and 1.", "Leave it out for the default.")


_KIND = "list of means and deviations"


def read_zscore(path: Path) -> tuple[list[float], list[float]]:
    """Read ``mean`` and ``std`` from a JSON object with these two lists, one number per column.

    Raises:
        ArtifactError: the file is not such an object, or a value cannot be used.
    """
    entries = read_object(path, _KIND, ["mean", "std"])
    mean, std = entries["mean"], entries["std"]
    if fault := find_fault(mean, std):
        raise refusal(path, _KIND, fault)
    return [*map(float, mean)], [*map(float, std)]


def find_fault(mean: Any, std: Any, *, largest: float = 1.0) -> str:
    """Describe the first fault of ``mean`` and ``std``, JSON lists with one number per column; empty if there is none.

    ``largest`` is the greatest raw value whose z-score FP32 must be able to hold.
    """
    for name, numbers in (("mean", mean), ("std", std)):
        if not isinstance(numbers, list | tuple) or not numbers:
            return f"{name} is {shorten(numbers)}, expected a list of numbers"
        if odd := [number for number in numbers if not is_number(number)]:
            return f"{name} holds {shorten(odd[0])}, expected finite numbers"
    if len(mean) != len(std):
        return f"mean has {len(mean)} entries and std {len(std)}, expected the same number"
    for column, (middle, spread) in enumerate(zip(mean, std, strict=True)):
        if spread <= 0:
            return f"std of column {column} is {spread:g}, expected a number above 0"
        if (largest + abs(middle)) / spread > GREATEST:
            return f"mean {middle:g} and std {spread:g} of column {column} give z-scores that FP32 cannot hold"
    return ""


def normalise(raw: Array, mean: Array, std: Array) -> Array:
    """Return z-scores, ``(raw - mean) / std``: FP32 ``[rows, features]``."""
    xp = namespace(raw)
    return xp.astype((raw - mean) / std, xp.float32)
