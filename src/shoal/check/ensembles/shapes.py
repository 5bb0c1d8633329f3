"""Data types and shapes of the tensors between an ensemble's models: rules of Triton's core, in its words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.check.ensembles.members import find_circle
from shoal.check.findings import Findings, Place, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.component.spec import TensorSpec
from shoal.repository.shapes import Declared, show

DTYPE = Rule("step-dtype", Severity.ERROR, is_core=True)
SHAPE = Rule("step-shape", Severity.ERROR, is_core=True)
DECOUPLED = Rule("decoupled-joined", Severity.ERROR, is_core=True)


def find(model: Model, repository: Repository) -> Findings:
    """Find models of an ensemble that declare a common tensor differently."""
    if model.message is None or find_circle(model, repository.known):
        return
    declared: dict[str, Declared] = {}
    for name, tensor in _own(model):
        declared.setdefault(name, Declared(model.name, tensor, model.message.max_batch_size > 0))
    steps = list(model.message.ensemble_scheduling.step)
    for index, step in enumerate(steps):
        member = repository.known.get(step.model_name)
        if member is not None and member.message is not None:
            yield from _meanings(model, index, step, member, declared)
    yield from _decoupled(model, steps, repository)


def _own(model: Model) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the ensemble's inputs and outputs by name, in the shape that its steps see."""
    for entry, tensor in zip(
        [*model.message.input, *model.message.output], [*model.inputs, *model.outputs], strict=True
    ):
        shape = tuple(entry.reshape.shape) if entry.HasField("reshape") else tensor.dims
        yield tensor.name, TensorSpec(tensor.name, tensor.dtype, shape)


def _meanings(model: Model, index: int, step: Any, member: Model, declared: dict[str, Declared]) -> Findings:
    """Compare a step's declarations with the first declaration of each tensor, as Triton's core does.

    The ensemble's own declarations come first, then those of its steps in their order.
    """
    is_batched = member.message.max_batch_size > 0
    is_open = member.is_completed and not is_batched  # the server may give it a batch dimension
    for field, mapping, tensors in (
        ("input_map", step.input_map, member.inputs),
        ("output_map", step.output_map, member.outputs),
    ):
        specs = {tensor.name: tensor for tensor in tensors}
        for key, name in sorted(mapping.items()):
            spec = specs.get(key)
            if spec is None or not spec.dims or spec.dtype == "TYPE_INVALID":
                continue
            here = Declared(member.name, spec, is_batched)
            first = declared.setdefault(name, here)
            place = model.at_entry("ensemble_scheduling", "step", index, field, key=key)
            if is_open:
                here = replace(here, tensor=replace(spec, dims=first.tensor.dims), is_batched=first.is_batched)
            if first.tensor.dims and first.tensor.dtype != "TYPE_INVALID":
                yield from _compare(model, name, first, here, place)


def _compare(model: Model, name: str, first: Declared, here: Declared, place: Place) -> Findings:
    about = f"in ensemble {model.name}, ensemble tensor {name}:"
    if first.tensor.dtype != here.tensor.dtype:
        yield DTYPE.at(
            place,
            f"{about} inconsistent data type: {first.tensor.dtype} is inferred from model {first.who} while"
            f" {here.tensor.dtype} is inferred from model {here.who}.",
            f"Declare {first.tensor.dtype} for {here.tensor.name} in {here.who}, or change {first.who}.",
        )
    if not first.fits(here):
        yield SHAPE.at(
            place,
            f"{about} inconsistent shape: {show(first.full)} is inferred from model {first.who} while"
            f" {show(here.full)} is inferred from model {here.who}.",
            f"Give {here.tensor.name} of {here.who} and {first.tensor.name} of {first.who} the same dims; -1 fits any.",
        )


def _decoupled(model: Model, steps: list[Any], repository: Repository) -> Findings:
    """Find steps that read tensors of different decoupled models, by the method of Triton's core.

    Each tensor has a label. A decoupled step gives its outputs a new label, and any other step passes on the label of
    its inputs; so a step whose inputs have different labels is a mistake.
    """
    labels: dict[str, int] = {tensor.name: 0 for tensor in model.inputs}
    waiting, number = list(enumerate(steps)), 0
    while True:
        now = [(i, s) for i, s in waiting if s.input_map and all(t in labels for t in s.input_map.values())]
        waiting = [(i, s) for i, s in waiting if (i, s) not in now]
        if not now:
            break
        for index, step in now:
            found = {labels[tensor] for tensor in step.input_map.values()}
            if len(found) > 1:
                yield DECOUPLED.at(
                    model.at("ensemble_scheduling", "step", index),
                    f"in ensemble {model.name}, step of model '{step.model_name}' receives inputs originated from"
                    " different decoupled models.",
                    "Pass what it needs through one of them.",
                )
            label = min(found)
            if repository.is_decoupled(step.model_name):
                number += 1
                label = number
            labels.update(dict.fromkeys(step.output_map.values(), label))
    outputs = {labels[tensor.name] for tensor in model.outputs if tensor.name in labels}
    if len(outputs) > 1:
        yield DECOUPLED.at(
            model.at("output"),
            f"in ensemble {model.name}, step of model '{model.name}' receives inputs originated from different"
            " decoupled models: its own outputs.",
            "Pass them all through one decoupled model.",
        )
