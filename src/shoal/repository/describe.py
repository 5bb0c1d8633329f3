"""A graph in words and numbers: what its picture shows, and what a picture has no room for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.component.spec import TensorSpec
from shoal.repository.config import ModelConfig, Step
from shoal.repository.graph import Graph

REQUEST, ANSWER = "request", "answer"


def describe(graph: Graph) -> dict[str, Any]:
    """The steps and the tensors of a graph, as JSON holds it.

    A step's ``level`` counts the steps on the longest way to it: those of one level run side by side. ``instances`` are
    on each GPU where ``device`` is ``GPU``. A tensor stands once for each step that reads it, as that one declares it;
    ``dims`` exclude the batch dimension.

    Raises:
        ArtifactError: steps wait for one another in a circle, or for a tensor that nobody writes.
    """
    names = _step_names(graph)
    levels = graph.levels()
    return {
        "name": graph.config.name,
        "max_batch_size": graph.config.spec.max_batch_size,
        "steps": [
            {
                "name": names[index],
                "level": levels[index],
                **_describe_model(graph.members[step.model]),
                "device": graph.device(index),
                **_describe_tensors(step, graph.members[step.model]),
            }
            for index, step in enumerate(graph.steps)
        ],
        "tensors": [
            {
                "name": edge.name,
                **_type(edge.tensor),
                "from": REQUEST if edge.source is None else names[edge.source],
                "to": ANSWER if edge.target is None else names[edge.target],
                "crossing": edge.crossing,
            }
            for edge in graph.edges()
        ],
    }


def _step_names(graph: Graph) -> list[str]:
    """The models; one that several steps call with the number of the step."""
    calls = Counter(step.model for step in graph.steps)
    return [
        step.model if calls[step.model] == 1 else f"{step.model} #{number}"
        for number, step in enumerate(graph.steps, start=1)
    ]


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    return {
        "model": config.name,
        "backend": config.backend or config.platform,
        "instances": None if config.is_ensemble else config.spec.num_instances,
        "max_batch_size": config.spec.max_batch_size,
        "batching": _batching(config),
    }


def _batching(config: ModelConfig) -> str:
    """What Triton joins requests with: ``dynamic``, with its delay where it has one, ``sequence``, or ``none``."""
    choice = config.message.WhichOneof("scheduling_choice")
    delay = config.message.dynamic_batching.max_queue_delay_microseconds
    if choice == "dynamic_batching":
        return f"dynamic, {delay} us" if delay else "dynamic"
    return "sequence" if choice == "sequence_batching" else "none"


def _describe_tensors(step: Step, config: ModelConfig) -> dict[str, Any]:
    """The model's tensors, each with the ensemble's that it is; None where it is not mapped."""
    return {
        kind: [{"name": t.name, **_type(t), "tensor": mapped.get(t.name)} for t in tensors]
        for kind, tensors, mapped in (
            ("inputs", config.spec.inputs, step.inputs),
            ("outputs", config.spec.outputs, step.outputs),
        )
    }


def _type(tensor: TensorSpec) -> dict[str, Any]:
    return {"dtype": tensor.dtype.removeprefix("TYPE_"), "dims": list(tensor.dims)}
