"""Placement ``hybrid``: the client runs the Python components of an ensemble, the server the other models.

The ensemble ``ensemble_models`` runs these models in one request. It is not made for Triton releases that may crash if
one of several parallel models refuses a request; the client then sends a request to each model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shoal.component.spec import TensorSpec
from shoal.errors import InputError
from shoal.repository.config import ModelConfig, Step
from shoal.repository.ensemble_config import make_ensemble
from shoal.repository.graph import Graph

MODELS = "ensemble_models"


def models_ensemble(graph: Graph) -> Any:
    """Make the configuration message of the ensemble of all steps that are not Python components.

    Raises:
        InputError: there are none, or a Python component is between two of them.
    """
    if not graph.config.is_ensemble:
        raise InputError(f"{graph.config.name} is not an ensemble.", "Placement hybrid is for ensembles.")
    steps = _models(graph)
    _check_one_request(graph, steps)
    inputs, outputs = _boundary(graph, steps)
    taken, given = (
        [replace(t, name=name, is_optional=False) for name, t in each.items()] for each in (inputs, outputs)
    )
    called = [graph.steps[index] for index in steps]
    return make_ensemble(MODELS, graph.config.spec.max_batch_size, taken, given, called)


def outsource(graph: Graph, models: ModelConfig) -> Graph:
    """Replace the steps of ``models`` in ``graph`` by one step, whose tensors have the ensemble's names."""
    steps = _models(graph)
    inputs, outputs = ({t.name: t.name for t in tensors} for tensors in (models.spec.inputs, models.spec.outputs))
    kept = tuple(step for index, step in enumerate(graph.steps) if index not in steps)
    members = {name: member for name, member in graph.members.items() if member.backend == "python"}
    is_decoupled = any(graph.members[graph.steps[index].model].spec.is_decoupled for index in steps)
    models = replace(models, spec=replace(models.spec, is_decoupled=is_decoupled))
    return replace(graph, steps=(*kept, Step(MODELS, 1, inputs, outputs)), members={**members, MODELS: models})


def _models(graph: Graph) -> list[int]:
    return [i for i, step in enumerate(graph.steps) if graph.members[step.model].backend != "python"]


def _boundary(graph: Graph, steps: Iterable[int]) -> tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]]:
    """Return the tensors that enter ``steps`` from outside, and those that leave."""
    chosen = set(steps)
    inputs = {e.name: e.tensor for e in graph.edges() if e.target in chosen and e.source not in chosen}
    outputs = {e.name: e.tensor for e in graph.edges() if e.source in chosen and e.target not in chosen}
    return inputs, outputs


def _check_one_request(graph: Graph, steps: list[int]) -> None:
    """Check that one request can run ``steps``: nothing that the client runs may be between two of them."""
    if not steps:
        raise InputError(f"{graph.config.name} has no model but Python components.", "Use --placement cpu.")
    # A fixed point: each round adds the client's steps that read from a model or from a step found before. A model that
    # reads from one of them would need a second request.
    after: set[int] = set()  # steps that the client runs after a model
    for _ in graph.steps:
        after |= {e.target for e in graph.edges() if e.target is not None and e.source in (*steps, *after)} - set(steps)
    for edge in graph.edges():
        if edge.source in after and edge.target in steps and edge.target is not None:
            first, then = (graph.steps[index].model for index in (edge.source, edge.target) if index is not None)
            raise InputError(
                f"The component {first} is between two models: {then} needs it.",
                "Placement hybrid calls the models once; use --placement cpu or gpu.",
            )
