"""Description of an ensemble's graph as data: all that the picture of `shoal graph` shows, and more."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.authoring.repository.apis import find_served
from shoal.authoring.repository.call_graph import mark_decoupled
from shoal.authoring.repository.config import ModelConfig, Step
from shoal.authoring.repository.graph import Graph
from shoal.kit.component.spec import TensorSpec

REQUEST, ANSWER = "request", "answer"


def describe(graph: Graph) -> dict[str, Any]:
    """Return the steps and the tensors of a graph, ready for JSON.

    A step's ``level`` is the number of steps on the longest path to it; steps of the same level run in parallel.
    ``instances`` is the number of instances of the step's model: per GPU if ``device`` is ``GPU``, else in all.
    ``calls`` are the models that the step's code calls, ``hosts`` those of them that run in its process. A tensor is
    listed once for each step that reads it, with the dtype and dims that this step declares. ``dims`` do not include
    the batch dimension. ``is_repeated`` is True if a decoupled model sends the tensor any number of times per request.
    ``api`` is what the ensemble serves in OpenAI's API, as a value of the parameter ``api``.

    Raises:
        ArtifactError: steps wait for one another in a circle, or for a tensor that no step writes; or the parameter
            ``api`` does not fit the ensemble.
    """
    names = _step_names(graph)
    levels = graph.levels()
    return {
        "name": graph.config.name,
        "max_batch_size": graph.config.spec.max_batch_size,
        "api": str(find_served(mark_decoupled({"": graph.config}, graph.members.get)[""], graph.members)),
        "steps": [
            {
                "name": names[index],
                "level": levels[index],
                **_describe_model(graph.members[step.model]),
                "device": graph.device(index),
                "calls": list(graph.members[step.model].calls),
                "hosts": list(graph.members[step.model].hosts),
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
    """Return a name for each step: its model's name, with the number of the step if several steps use that model."""
    calls = Counter(step.model for step in graph.steps)
    return [
        step.model if calls[step.model] == 1 else f"{step.model} #{number}"
        for number, step in enumerate(graph.steps, start=1)
    ]


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    return {
        "model": config.name,
        "content": config.content,
        "backend": config.backend or config.platform,
        "instances": None if config.is_ensemble else config.spec.num_instances,
        "max_batch_size": config.spec.max_batch_size,
        "batching": _batching(config),
    }


def _batching(config: ModelConfig) -> str:
    """Return a model's batching: ``dynamic``, with the queue delay if there is one; ``sequence``; or ``none``."""
    choice = config.message.WhichOneof("scheduling_choice")
    delay = config.message.dynamic_batching.max_queue_delay_microseconds
    if choice == "dynamic_batching":
        return f"dynamic, {delay} us" if delay else "dynamic"
    return "sequence" if choice == "sequence_batching" else "none"


def _describe_tensors(step: Step, config: ModelConfig) -> dict[str, Any]:
    """Return the tensors of a step's model, each with the ensemble tensor that the step maps it to, if any."""
    return {
        kind: [{"name": t.name, **_type(t), "tensor": mapped.get(t.name)} for t in tensors]
        for kind, tensors, mapped in (
            ("inputs", config.spec.inputs, step.inputs),
            ("outputs", config.spec.outputs, step.outputs),
        )
    }


def _type(tensor: TensorSpec) -> dict[str, Any]:
    return {"dtype": tensor.dtype.removeprefix("TYPE_"), "dims": list(tensor.dims)}
