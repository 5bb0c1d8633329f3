"""Description of a graph in words and numbers: all that its picture shows, and what the picture has no room for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.component.spec import TensorSpec
from shoal.repository.config import ModelConfig, Step
from shoal.repository.graph import Graph

REQUEST, ANSWER = "request", "answer"


def describe(graph: Graph) -> dict[str, Any]:
    """Return the steps and the tensors of a graph, ready for JSON.

    A step's ``level`` counts the steps on the longest path to it: those of one level run in parallel. ``instances`` are
    on each GPU where ``device`` is ``GPU``; ``calls`` are the models that the step's code calls. A tensor is listed
    once for each step that reads it, as that one declares it; ``dims`` exclude the batch dimension; ``is_repeated``:
    it comes any number of times per request.

    Raises:
        ArtifactError: steps wait for one another in a circle, or for a tensor that no step writes.
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
                "calls": list(graph.members[step.model].calls),
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
                "is_repeated": edge.is_repeated,
            }
            for edge in graph.edges()
        ],
    }


def _step_names(graph: Graph) -> list[str]:
    """Return each step's model name, with the step's number where several steps call the model."""
    calls = Counter(step.model for step in graph.steps)
    return [
        step.model if calls[step.model] == 1 else f"{step.model} #{number}"
        for number, step in enumerate(graph.steps, start=1)
    ]


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    return {
        "model": config.name,
        "content": config.spec.parameters.get("content", ""),
        "backend": config.backend or config.platform,
        "instances": None if config.is_ensemble else config.spec.num_instances,
        "max_batch_size": config.spec.max_batch_size,
        "batching": _batching(config),
    }


def _batching(config: ModelConfig) -> str:
    """Return the batching scheduler: ``dynamic``, with its delay where it has one, ``sequence``, or ``none``."""
    choice = config.message.WhichOneof("scheduling_choice")
    delay = config.message.dynamic_batching.max_queue_delay_microseconds
    if choice == "dynamic_batching":
        return f"dynamic, {delay} us" if delay else "dynamic"
    return "sequence" if choice == "sequence_batching" else "none"


def _describe_tensors(step: Step, config: ModelConfig) -> dict[str, Any]:
    """Return the model's tensors, each with the ensemble tensor it is mapped to, None if it is not mapped."""
    return {
        kind: [{"name": t.name, **_type(t), "tensor": mapped.get(t.name)} for t in tensors]
        for kind, tensors, mapped in (
            ("inputs", config.spec.inputs, step.inputs),
            ("outputs", config.spec.outputs, step.outputs),
        )
    }


def _type(tensor: TensorSpec) -> dict[str, Any]:
    return {"dtype": tensor.dtype.removeprefix("TYPE_"), "dims": list(tensor.dims)}
