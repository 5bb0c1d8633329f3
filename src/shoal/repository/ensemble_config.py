"""An ensemble's configuration message, made from its parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.component.spec import TensorSpec
from shoal.repository.config import Step


def make_ensemble(
    name: str,
    max_batch_size: int,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    steps: Iterable[Step],
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
    """Return the steps that an ensemble begins with, in parallel: those that read nothing but the request."""
    requested = {tensor.name for tensor in message.input}
    return [
        index
        for index, step in enumerate(message.ensemble_scheduling.step)
        if set(step.input_map.values()) <= requested
    ]
