"""Weighted blend of two scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.component.tensors import Array, namespace
from shoal.errors import InputError


def blend(weight: Array | float, first: Array, second: Array) -> Array:
    """Return ``weight * first + (1 - weight) * second``, element by element, in the arrays' own dtype."""
    if isinstance(weight, float):  # rounded as a weight given as a tensor is
        weight = namespace(first).full_like(first, weight)
    return weight * first + (1 - weight) * second


def check_weight(weight: np.ndarray[Any, Any], *, name: str) -> None:
    """Check that each weight is between 0 and 1.

    Raises:
        InputError: a weight is not, or is NaN; the error names the first such row.
    """
    for row in np.flatnonzero(~((weight >= 0) & (weight <= 1))):
        value = weight.reshape(-1)[row]
        raise InputError(f"{name}[{row}] is {value:g}; it must lie between 0 and 1.", "Leave it out for the default.")
