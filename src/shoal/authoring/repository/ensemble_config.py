"""Make the configuration message of an ensemble, find its first steps, and compare two declarations of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.authoring.repository.config import Step
from shoal.kit.component.spec import TensorSpec


def make_ensemble(
    name: str, max_batch_size: int, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec], steps: Iterable[Step]
) -> Any:
    """Make the ModelConfig message of an ensemble."""
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig()
    message.name, message.platform, message.max_batch_size = name, "ensemble", max_batch_size
    for tensors, entries in ((inputs, message.input), (outputs, message.output)):
        for tensor in tensors:
            entry = entries.add(name=tensor.name, dims=tensor.dims)
            entry.data_type = model_config_pb2.DataType.Value(tensor.dtype)
            if tensor.is_optional:
                entry.optional = True
    for step in steps:
        added = message.ensemble_scheduling.step.add(model_name=step.model, model_version=step.version)
        added.input_map.update(step.inputs)
        added.output_map.update(step.outputs)
    return message


def first_steps(message: Any) -> list[int]:
    """Return the indices of the steps that run first, in parallel: those that read only inputs of the request."""
    requested = {tensor.name for tensor in message.input}
    return [
        index
        for index, step in enumerate(message.ensemble_scheduling.step)
        if set(step.input_map.values()) <= requested
    ]


# --- do two declarations of a tensor fit? Core's rules for dtype and shape ------------------------------------------


@dataclass(frozen=True)
class Declared:
    """A tensor as the model ``who`` declares it; ``is_batched`` is True if a batch dimension precedes its dims."""

    who: str
    tensor: TensorSpec
    is_batched: bool

    @property
    def full(self) -> tuple[int, ...]:
        """Shape of the tensor, with the batch dimension if there is one."""
        return (-1, *self.tensor.dims) if self.is_batched else self.tensor.dims

    def fits(self, other: Declared) -> bool:
        """Whether the two shapes can match: -1 fits any size, and without batching the dims may include the rows.

        See ValidateTensorConsistency in core, src/ensemble_scheduler/ensemble_utils.cc.
        """
        return _fits(self.tensor.dims, other.tensor.dims) or _fits(self.full, other.full)


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def show(dims: tuple[int, ...]) -> str:
    """Format a shape as Triton's core does: ``[-1,31]``."""
    return f"[{','.join(map(str, dims))}]"
