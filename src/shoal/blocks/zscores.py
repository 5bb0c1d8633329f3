"""Reader for ``zscore.json``, the mean and standard deviation of each column of a training set."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as shorten

from shoal.component.artifact_files import GREATEST, is_number, read_object, refusal
from shoal.component.tensors import Array, namespace

_KIND = "list of means and deviations"


def read_zscore(path: Path) -> tuple[list[float], list[float]]:
    """Read ``mean`` and ``std`` from a JSON object with these two lists, one number per column.

    Raises:
        ArtifactError: it is not such a file, or a value cannot be used.
    """
    entries = read_object(path, _KIND, ["mean", "std"])
    for name, numbers in entries.items():
        if not isinstance(numbers, list) or not numbers:
            raise refusal(path, _KIND, f"{name} is {shorten(numbers)}, expected a list of numbers")
        if odd := [number for number in numbers if not is_number(number)]:
            raise refusal(path, _KIND, f"{name} holds {shorten(odd[0])}, expected finite numbers")
    mean, std = entries["mean"], entries["std"]
    if len(mean) != len(std):
        raise refusal(path, _KIND, f"mean has {len(mean)} entries and std {len(std)}, expected as many")
    for column, (middle, spread) in enumerate(zip(mean, std, strict=True)):
        if spread <= 0:
            raise refusal(path, _KIND, f"std of column {column} is {spread:g}, expected a number above 0")
        if (1 + abs(middle)) / spread > GREATEST:
            why = f"mean {middle:g} and std {spread:g} of column {column} give z-scores that FP32 cannot hold"
            raise refusal(path, _KIND, why)
    return [*map(float, mean)], [*map(float, std)]


def normalise(raw: Array, mean: Array, std: Array) -> Array:
    """Return z-scores, FP32 ``[rows, features]``."""
    xp = namespace(raw)
    return xp.astype((raw - mean) / std, xp.float32)
