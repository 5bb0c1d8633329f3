"""Rules of Triton's core, with its error messages, for the steps and tensors of an ensemble's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from shoal.authoring.check.findings import Finding, Findings, Rule, Severity
from shoal.authoring.check.models import ENSEMBLE, Model, Repository
from shoal.authoring.repository.graph import find_rounds

BACKEND = Rule("ensemble-backend", Severity.ERROR, is_core=True)
STEPS = Rule("ensemble-without-steps", Severity.ERROR, is_core=True)
CARRIES = Rule("ensemble-carries", Severity.ERROR, is_core=True)
STEP = Rule("step-incomplete", Severity.ERROR, is_core=True)
TWICE = Rule("tensor-written-twice", Severity.ERROR, is_core=True)
INPUT = Rule("ensemble-input-unused", Severity.ERROR, is_core=True)
OUTPUT = Rule("ensemble-output-unwritten", Severity.ERROR, is_core=True)
UNUSED = Rule("ensemble-tensor-unused", Severity.ERROR, is_core=True)
INSIDE = Rule("output-read-inside", Severity.WARNING)

_MAX_COMPARED = 100  # names; each comparison takes a while


def find(model: Model, _: Repository) -> Findings:
    """Find mistakes in an ensemble's configuration that can be seen without the models of its steps."""
    message = model.message
    if message is None:
        return
    if message.backend == ENSEMBLE or (message.platform == ENSEMBLE and message.backend):
        yield BACKEND.at(
            model.at("backend"),
            f"Ensemble model '{model.name}' must have platform type 'ensemble' and empty backend type; its backend is"
            f" '{message.backend}'.",
            'Write platform: "ensemble" and remove backend.',
        )
    if message.HasField("ensemble_scheduling") and not model.is_misplatformed:
        yield from _carries(model)
        yield from _steps(model)
    elif message.HasField("ensemble_scheduling"):
        yield STEPS.at(
            model.at("ensemble_scheduling"),
            f"ensemble scheduling cannot be set for model '{model.name}' whose platform is not ensemble; it is"
            f" '{message.platform}'.",
            'Write platform: "ensemble".',
        )
    elif message.platform == ENSEMBLE:
        yield STEPS.at(
            model.at("platform"),
            f"ensemble scheduling must be set for ensemble {model.name} whose platform is ensemble.",
            "Add ensemble_scheduling { step [ ... ] }.",
        )


def _carries(model: Model) -> Findings:
    named = {field.name for field, _ in model.message.ListFields()}
    for field, what in (
        ("instance_group", "instance group should not be specified"),
        ("optimization", "optimization should not be specified"),
        ("model_warmup", "model_warmup can not be specified"),
    ):
        if field in named:
            what = f"{what} for ensemble '{model.name}'."
            yield CARRIES.at(model.at(field), what, "Move it to the models that the steps name.")


def _steps(model: Model) -> Findings:
    steps = model.message.ensemble_scheduling.step
    if not steps:
        what = f"must specify 'step' for ensemble '{model.name}'."
        yield STEPS.at(model.at("ensemble_scheduling"), what, "Add step [ { ... } ].")
        return
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield STEP.at(
                    model.at("ensemble_scheduling", "step", index),
                    f"must specify '{field}' in step {index} of ensemble '{model.name}'.",
                    f"Add {field}.",
                )
    yield from _written(model, steps)
    yield from _flow(model, steps)


def _written(model: Model, steps: Iterable[Any]) -> Findings:
    writers, inputs = dict[str, int](), {tensor.name for tensor in model.message.input}
    for index, step in enumerate(steps):
        for key, tensor in sorted(step.output_map.items()):
            if tensor in inputs:
                what = f"Step {index} of ensemble '{model.name}' writes '{tensor}', which the request gives."
                place = model.at_entry("ensemble_scheduling", "step", index, "output_map", key=key)
                yield TWICE.at(place, what, "Give each tensor its own name.")
            if tensor in writers:
                yield TWICE.at(
                    model.at_entry("ensemble_scheduling", "step", index, "output_map", key=key),
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{model.name}' step"
                    f" {index}; step {writers[tensor]} writes it too.",
                    "Give each tensor its own name.",
                )
            writers.setdefault(tensor, index)


def _flow(model: Model, steps: Iterable[Any]) -> Findings:
    """Find tensors that no chain of steps connects with the ensemble's inputs, by the method of Triton's core.

    At first, the ensemble's inputs are ready. A step whose inputs are all ready makes its outputs ready, and so on.
    """
    reads = {tensor for step in steps for tensor in step.input_map.values()}
    made = {tensor: step for step in steps for tensor in step.output_map.values()}
    ready = {tensor.name for tensor in model.message.input}
    for index, tensor in enumerate(model.message.input):
        if tensor.name not in reads and tensor.name not in made:
            yield INPUT.at(
                model.at("input", index, "name"),
                f"ensemble input '{tensor.name}' for ensemble {model.name}' is not used.",
                f"Map it in a step, or remove it; the steps read: {', '.join(sorted(reads)) or 'nothing'}.",
            )
    waiting = [(step.input_map.values(), step.output_map.values()) for step in steps if step.input_map]
    for indices in find_rounds(waiting, ready):
        ready |= {tensor for index in indices for tensor in waiting[index][1]}
    found = [*_outputs(model, made, reads, ready), *_leftovers(model, made, reads, ready)]
    yield from found or _circles(model, reads, ready)


def _outputs(model: Model, made: dict[str, Any], reads: set[str], ready: set[str]) -> Findings:
    for index, tensor in enumerate(model.message.output):
        name, place = tensor.name, model.at("output", index, "name")
        if name not in made and name not in reads:
            what = f"ensemble output '{name}' for ensemble {model.name}' is not used."
            known = ", ".join(sorted(made)) or "nothing"
            yield OUTPUT.at(place, what, f"Let a step write it; the steps write: {known}.")
        elif name not in ready:
            source = _source(name, made, ready)
            why = "" if source == name else f": at least one of its depending tensors, '{source}', is not connected"
            what = f"output '{name}' for ensemble '{model.name}' is not written{why}."
            fix = "Remove one step from the circle." if source in made else f"Let a step write '{source}'."
            yield OUTPUT.at(place, what, fix)
        elif name in reads and name in made:
            what = f"Output '{name}' of ensemble '{model.name}' is also read by a step."
            yield INSIDE.at(place, what, "Let the step that reads it return it too, under another name.")


def _source(name: str, made: dict[str, Any], ready: set[str]) -> str:
    """Return the tensor that Triton's message names as the reason why the output ``name`` is not written.

    Either no step writes that tensor, or the step that writes it depends on its own output.
    """
    seen: set[str] = set()
    while True:
        before = sorted(made[name].input_map.values()) if name in made else []
        missing = [tensor for tensor in before if tensor not in ready and tensor not in seen]
        if not missing:
            return name
        name = missing[0]
        seen.add(name)


def _leftovers(model: Model, made: dict[str, Any], reads: set[str], ready: set[str]) -> Findings:
    """Find tensors that a step writes and nothing reads, or that a step reads and nothing writes."""
    outputs, inputs = ({t.name for t in tensors} for tensors in (model.message.output, model.message.input))
    for index, step in enumerate(model.message.ensemble_scheduling.step):
        for key, name in sorted(step.output_map.items()):
            if name not in outputs and name not in reads:
                yield _unused(model, index, "output_map", key, name)
        for key, name in sorted(step.input_map.items()):
            if name not in ready and name not in made and name not in inputs:
                close = difflib.get_close_matches(name, [*made, *inputs][:_MAX_COMPARED], 1)
                yield _unused(model, index, "input_map", key, name, f"Write {close[0]}." if close else "")


def _circles(model: Model, reads: set[str], ready: set[str]) -> Findings:
    """Find steps that wait for one another in a circle that no output depends on."""
    for index, step in enumerate(model.message.ensemble_scheduling.step):
        for key, name in sorted(step.output_map.items()):
            if name in reads and name not in ready:
                fix = "Remove one step from the circle."
                yield _unused(model, index, "output_map", key, name, fix, "steps wait for one another in a circle")
                return


def _unused(model: Model, index: int, field: str, key: str, name: str, fix: str = "", why: str = "") -> Finding:
    is_written = field == "output_map"
    fixes = (f"Remove {key} from the output_map; outputs that are not mapped are dropped.", "Let a step write it.")
    return UNUSED.at(
        model.at_entry("ensemble_scheduling", "step", index, field, key=key),
        f"ensemble tensor '{name}' is unused in ensemble '{model.name}':"
        f" {why or ('no step reads it' if is_written else 'no step writes it')}.",
        fix or fixes[not is_written],
    )
