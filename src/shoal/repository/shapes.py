"""Whether what one model writes is what another reads: core's rules of dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.component.spec import TensorSpec


@dataclass(frozen=True)
class Declared:
    """What one model says of a tensor; ``is_batched``: a row dimension stands before its dims."""

    who: str
    tensor: TensorSpec
    is_batched: bool

    @property
    def full(self) -> tuple[int, ...]:
        """Its shape with the row dimension."""
        return (-1, *self.tensor.dims) if self.is_batched else self.tensor.dims

    def fits(self, other: Declared) -> bool:
        """Whether the shapes may meet: -1 is any size, and a model without batches may declare the rows in its dims.

        Of core, src/ensemble_scheduler/ensemble_utils.cc: ValidateTensorConsistency.
        """
        return _fits(self.tensor.dims, other.tensor.dims) or _fits(self.full, other.full)


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def show(dims: tuple[int, ...]) -> str:
    """A shape as core writes it: ``[-1,31]``."""
    return f"[{','.join(map(str, dims))}]"
