"""Scores of classes: fit to be compared, and the best of them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.component.ledger import CONTROL
from shoal.component.parameters import Parameters
from shoal.component.tensors import Array, Arrays, Device, namespace
from shoal.errors import ArtifactError, InputError

_LOOK = "Look at what the model before it gives for this row."


def check_numbers(arrays: Arrays, device: Device) -> None:
    """Check that no value is NaN, which loses and wins no comparison.

    ``arrays`` are FP32 ``[rows, ...]`` by name, with the same rows. From a GPU a byte comes down for each row of each.

    Raises:
        InputError: it names the first row that holds one.
    """
    _check(arrays, device, lambda array: ~namespace(array).isnan(array), "NaN, which is no number")


def check_finite(arrays: Arrays, device: Device) -> None:
    """As ``check_numbers``, and no value may be infinite."""
    _check(arrays, device, lambda array: namespace(array).isfinite(array), "NaN or infinity; it must be finite")


def _check(arrays: Arrays, device: Device, is_fit: Callable[[Array], Array], what: str) -> None:
    xp = namespace(*arrays.values())
    fit = [xp.all(is_fit(array), axis=tuple(range(1, array.ndim))) for array in arrays.values()]
    for which, row in np.argwhere(~device.fetch(xp.stack(fit), CONTROL)):
        raise InputError(f"{[*arrays][which]}[{row}] holds {what}.", _LOOK)


@dataclass(frozen=True)
class Choices:
    """The best classes of each row: by their labels, or by the numbers of their columns where there are none.

    ``scores`` is the input's name; ``num_best`` 0 gives all classes. It runs on the host, where strings are made.
    """

    scores: str
    labels: tuple[str, ...] = ()
    num_best: int = 0

    @classmethod
    def read(cls, parameters: Parameters, scores: str, num_best: int) -> Choices:
        """With the parameter ``labels``. The size ``n`` of ``parameters`` is the number of classes.

        Raises:
            ArtifactError: the labels, or the best, are not as many as the scores can bring.
        """
        labels = tuple(parameters.texts("labels"))
        if labels:
            parameters.expect("n", len(labels), "its parameter labels has")
        num_classes = len(labels) or parameters.sizes.get("n", num_best)
        if num_best > num_classes:
            raise ArtifactError(
                f"{scores} has {num_classes} scores a row; the best {num_best} are wanted.",
                f"Take {num_classes} at most, in the parameter k and in the dims of the outputs.",
            )
        return cls(scores, labels, num_best)

    def __call__(self, scores: NDArray[np.float32]) -> tuple[NDArray[np.object_], NDArray[np.float32]]:
        """Names as ``bytes``, and scores, ``[rows, best]`` each, the best first; of equal ones the first column's.

        Raises:
            InputError: a score is NaN, or there are not as many as there are labels.
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
    """The columns of the best scores of each row, the best first: ``[rows, number]``."""
    best = scores.argmax(axis=1)[:, None] if number == 1 else np.argsort(-scores, axis=1, kind="stable")
    columns: NDArray[np.intp] = best[:, :number]
    return columns
