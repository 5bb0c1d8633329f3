"""Compatibility of one model's output with another's input: the rules of Triton's core for dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.component.spec import TensorSpec


@dataclass(frozen=True)
class Declared:
    """One model's declaration of a tensor; ``is_batched``: a row dimension precedes its dims."""

    who: str
    tensor: TensorSpec
    is_batched: bool

    @property
    def full(self) -> tuple[int, ...]:
        """Its shape with the row dimension."""
        return (-1, *self.tensor.dims) if self.is_batched else self.tensor.dims

    def fits(self, other: Declared) -> bool:
        """Whether the shapes may match: -1 is any size, and a model without batches may declare the rows in its dims.

        See ValidateTensorConsistency in core, src/ensemble_scheduler/ensemble_utils.cc.
        """
        return _fits(self.tensor.dims, other.tensor.dims) or _fits(self.full, other.full)


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def show(dims: tuple[int, ...]) -> str:
    """Format a shape as core does: ``[-1,31]``."""
    return f"[{','.join(map(str, dims))}]"
