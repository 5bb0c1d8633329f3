"""Symbolic tensors of an ensemble definition: dtype, shape and origin, and the check whether a step may read one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.component.spec import TensorSpec
from shoal.errors import InputError
from shoal.repository.config import ModelConfig
from shoal.repository.shapes import Declared, show


@dataclass(frozen=True)
class Tensor:
    """A tensor of a pipeline: an input of the request, or an output of a step.

    ``name`` is its name in the ensemble; ``declared`` holds dtype, shape, and the model that declares them. ``owner``
    is the definition that it belongs to; ``is_requested``: it is an input of the request.
    """

    name: str
    declared: Declared
    owner: Any = field(repr=False, compare=False)
    is_requested: bool = False

    @property
    def dtype(self) -> str:
        """Data type in Triton's form: ``TYPE_FP32``."""
        return self.declared.tensor.dtype

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions without the rows; -1 is any size."""
        return self.declared.tensor.dims


class Outputs(dict[str, Tensor]):
    """Outputs of a step, by its model's names for them."""

    def __init__(self, model: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._model = model

    def __missing__(self, name: str) -> Tensor:
        raise InputError(f"Model {self._model} has no output {name}.", f"It has: {', '.join(self)}.")


def check_fits(tensor: Tensor, config: ModelConfig, name: str, rows: tuple[bool, ...]) -> None:
    """Check that a model may read ``tensor`` as its input ``name``.

    ``rows``: whether a request has rows, every possible value; for an output of a step, its model decides.

    Raises:
        InputError: there is no such input, or dtype, shape, or leaving it out do not fit.
    """
    specs = {spec.name: spec for spec in config.spec.inputs}
    if name not in specs:
        raise InputError(f"Model {config.name} has no input {name}.", f"It has: {', '.join(specs)}.")
    wanted, given = Declared(config.name, specs[name], config.spec.is_batched), tensor.declared
    what = f"Input {name} of model {config.name}"
    if tensor.dtype != specs[name].dtype:
        raise InputError(
            f"{what} is {specs[name].dtype}, and {tensor.name} of {given.who} is {tensor.dtype}.",
            "Triton converts nothing: put a component between them.",
        )
    ways = [replace(given, is_batched=has_rows) for has_rows in rows] if tensor.is_requested else [given]
    if not any(way.fits(wanted) for way in ways):
        raise InputError(
            f"{what} has shape {show(wanted.full)}, and {tensor.name} of {given.who} {show(ways[0].full)}.",
            "Give them the same dims; -1 fits any.",
        )
    if given.tensor.is_optional and not specs[name].is_optional:
        raise InputError(
            f"{what} must be given, and {tensor.name} of {given.who} may be left out.",
            f"Declare {name} optional in {config.name}, or {tensor.name} not.",
        )


def dims_in(tensor: Tensor, *, has_rows: bool) -> tuple[int, ...]:
    """Return the dims of a step's tensor as an ensemble's output: either may have rows where the other has none."""
    full = tensor.declared.full
    if has_rows == tensor.declared.is_batched:
        return tensor.dims
    return full[1:] if has_rows and full[0] == -1 and len(full) > 1 else full


def describe(tensor: TensorSpec) -> str:
    """Format a declaration on one line: ``EMBEDDING FP32 [384]``."""
    return f"{tensor.name} {tensor.dtype.removeprefix('TYPE_')} {show(tensor.dims)}"
