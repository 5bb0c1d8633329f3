"""Steps of composing: each takes the models and what is asked for, and returns the models with notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shoal.authoring.composition import labels
from shoal.authoring.composition.artifacts import find_host_reasons
from shoal.authoring.composition.notes import find_notes
from shoal.authoring.composition.swap import exchange_models
from shoal.authoring.composition.tuned import Tuned, decide, take_quantised
from shoal.authoring.composition.weights import Found, give, quantize
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.placement import place_all, tune
from shoal.authoring.repository.plan import Plan


@dataclass(frozen=True)
class Order:
    """Arguments of ``compose``; the files that they name are read. ``quantize`` is empty, ``int8`` or ``int4``."""

    plan: Plan
    artifacts: Path | None
    weights: Found | None
    tuned: Tuned | None
    accepts_error: bool
    quantize: str

    def settle(self, models: Sequence[ModelConfig]) -> tuple[Plan, list[str]]:
        """Return the plan with the precision that the plan file decides for these models, and notes."""
        return decide(models, self.artifacts, self.plan, self.tuned)


Models: TypeAlias = list[ModelConfig]


def gather(names: Sequence[str], folders: Mapping[str, ModelConfig], swap: Mapping[str, str]) -> Models:
    """Return the models that the ensembles ``names`` need, each once, with models exchanged as ``swap`` says."""
    available = exchange_models(folders, names, swap)
    return list({model.name: model for name in names for model in collect(name, available)}.values())


def _give_weights(models: Models, order: Order) -> tuple[Models, list[str]]:
    return give(models, order.weights), []


def _give_labels(models: Models, _: Order) -> tuple[Models, list[str]]:
    return labels.give(models), []


def _tune_batches(models: Models, order: Order) -> tuple[Models, list[str]]:
    return tune(models, order.plan.tuning), []


def _quantize_engines(models: Models, order: Order) -> tuple[Models, list[str]]:
    return quantize(models, order.quantize) if order.quantize else models, []


def _quantize_encoders(models: Models, order: Order) -> tuple[Models, list[str]]:
    return take_quantised(models, order.plan, order.tuned, accepts_error=order.accepts_error), []


def _place(models: Models, order: Order) -> tuple[Models, list[str]]:
    reasons = find_host_reasons(models, order.artifacts)
    placed = place_all(models, order.plan, reasons)
    return placed, find_notes(placed, order.plan, reasons)


# In this order: an engine has its weights before they are quantised, and a model its backend before it is placed.
TRANSFORMS: tuple[Callable[[Models, Order], tuple[Models, list[str]]], ...] = (
    _give_weights,
    _give_labels,
    _tune_batches,
    _quantize_engines,
    _quantize_encoders,
    _place,
)


def transform(models: Models, order: Order) -> tuple[Models, list[str]]:
    """Return the models as they are written, but for what the written files decide; and notes for the user."""
    notes = []
    for step in TRANSFORMS:
        models, more = step(models, order)
        notes += more
    return models, notes
