"""The names of classes, which every model of a pipeline that knows them must know in one order."""

from __future__ import annotations

import json

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository

PARAMETER = "labels"  # of shoal's components, and of the models that `shoal add-model` writes
ORDER = Rule(
    "labels-in-another-order",
    Severity.WARNING,
    "The models of a pipeline name the same classes in one order",
    "Scores go from model to model by their columns. Where one names the columns in another order, answers get wrong"
    " names, and nothing fails.",
    "shoal's components: the parameter labels.",
    'topic: parameters { key: "labels" value { string_value: \'["billing", "other"]\' } }\n'
    'verdict: parameters { key: "labels" value { string_value: \'["other", "billing"]\' } }',
    'topic: parameters { key: "labels" value { string_value: \'["billing", "other"]\' } }\n'
    'verdict: parameters { key: "labels" value { string_value: \'["billing", "other"]\' } }',
)
RULES = (ORDER,)


def find(model: Model, repository: Repository) -> Findings:
    """Steps that name the classes of an earlier step in another order."""
    if model.message is None:
        return
    known: dict[frozenset[str], tuple[str, list[str]]] = {}
    for index, step in enumerate(model.message.ensemble_scheduling.step):
        member = repository.known.get(step.model_name)
        labels = _read(member) if member else []
        if not labels:
            continue
        first, theirs = known.setdefault(frozenset(labels), (step.model_name, labels))
        if labels != theirs:
            yield ORDER.at(
                model.at("ensemble_scheduling", "step", index, "model_name"),
                f"{step.model_name} names the classes {', '.join(labels)}; {first} has them as {', '.join(theirs)}.",
                f"Write the labels of both in the order of the columns, and look which one has it right: {first} or"
                f" {step.model_name}.",
            )


def _read(model: Model) -> list[str]:
    """A model's labels; empty where the parameter is missing, or is something else's."""
    try:
        labels = json.loads(model.parameters.get(PARAMETER, ""))
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    return labels if is_list else []
