"""Rules of Triton's core, with its error messages, for an ensemble and the models of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.repository.ensemble_config import Declared, show
from shoal.authoring.repository.graph import find_rounds
from shoal.kit.component.spec import TensorSpec

MISSING = Rule("member-missing", Severity.ERROR, is_core=True)
VERSION = Rule("member-version", Severity.ERROR, is_core=True)
CIRCLE = Rule("ensemble-in-itself", Severity.ERROR, is_core=True)
BATCH = Rule("ensemble-batch-size", Severity.ERROR, is_core=True)
INPUT = Rule("step-input-unknown", Severity.ERROR, is_core=True)
OUTPUT = Rule("step-output-unknown", Severity.ERROR, is_core=True)
OUTPUT_TWICE = Rule("step-output-twice", Severity.ERROR, is_core=True)
UNMAPPED = Rule("step-input-unmapped", Severity.ERROR, is_core=True)
OPTIONAL = Rule("optional-input-required", Severity.ERROR)
DTYPE = Rule("step-dtype", Severity.ERROR, is_core=True)
SHAPE = Rule("step-shape", Severity.ERROR, is_core=True)
DECOUPLED = Rule("decoupled-joined", Severity.ERROR, is_core=True)
_MAX_SHOWN = 20  # names in a message
SEQUENCE = Rule("sequence-in-ensemble", Severity.WARNING)


def find(model: Model, repository: Repository) -> Findings:
    """Find mismatches between an ensemble and the models of its steps."""
    if model.message is None or not model.message.HasField("ensemble_scheduling"):
        return
    steps = list(model.message.ensemble_scheduling.step)
    circle = repository.find_circle(model.name)
    if circle:
        index = next((i for i, step in enumerate(steps) if step.model_name == circle[1]), 0)
        yield CIRCLE.at(
            model.at("ensemble_scheduling", "step", index, "model_name"),
            f"circular dependency between ensembles: {' -> '.join(circle[:_MAX_SHOWN])}"
            f"{' -> ...' if len(circle) > _MAX_SHOWN else ''}.",
            "Remove one of these steps.",
        )
        return
    for index, step in enumerate(steps):
        member = repository.known.get(step.model_name)
        if member is None:
            yield from _missing(model, index, step.model_name, repository)
        elif member.message is not None:
            yield from _sizes(model, index, step, member)
            yield from _names(model, index, step, member)
            yield from _requests(model, index, step, member)
    yield from _check_tensors(model, steps, repository)
    yield from _decoupled(model, steps, repository)


def _missing(model: Model, index: int, name: str, repository: Repository) -> Findings:
    if name:  # a step without a name is reported already
        others = sorted(other for other in repository.known if other != model.name)
        yield MISSING.at(
            model.at("ensemble_scheduling", "step", index, "model_name"),
            f"ensemble {model.name} contains models that are not available or ambiguous: {name}.",
            f"The repository has: {', '.join(others[:20]) or 'no other model'}.",
        )


def _sizes(model: Model, index: int, step: Any, member: Model) -> Findings:
    ours, theirs = model.message.max_batch_size, member.message.max_batch_size
    if 0 < theirs < ours and not member.is_completed:
        yield BATCH.at(
            model.at("ensemble_scheduling", "step", index, "model_name"),
            f"ensemble {model.name} allows maximum batch size {ours}, but it contains model {member.name} which only"
            f" allows maximum batch size to be {theirs}.",
            f"Write max_batch_size: {theirs} in {model.name}, or increase it in {member.name}.",
        )
    version, served = step.model_version, member.served_versions
    if member.is_model_folder and not member.versions:
        served = (1,)  # compose makes it
    is_unknown = bool(version) and not served and not member.versions  # git keeps no empty folders
    if version != -1 and version not in served and not is_unknown:
        unset = "" if version else " (the default)"
        yield VERSION.at(
            model.at("ensemble_scheduling", "step", index, "model_version"),
            f"ensemble '{model.name}' depends on '{member.name}' whose required version {version}{unset} is not"
            " loaded.",
            f"Write model_version: -1 for the latest; Triton loads {list(served)} of {member.name}.",
        )


def _names(model: Model, index: int, step: Any, member: Model) -> Findings:
    if member.is_completed:
        return
    inputs, outputs = ({t.name: t for t in tensors} for tensors in (member.inputs, member.outputs))
    where = ("ensemble_scheduling", "step", index)
    for key, tensor in sorted(step.input_map.items()):
        if key not in inputs:
            yield INPUT.at(
                model.at_entry(*where, "input_map", key=key),
                f"in ensemble {model.name}, ensemble tensor {tensor} is mapping to non-existing input {key} in model"
                f" {member.name}.",
                f"Its inputs are: {', '.join(sorted(inputs)) or 'none'}.",
            )
    for key, tensor in sorted(step.output_map.items()):
        if key not in outputs:
            yield OUTPUT.at(
                model.at_entry(*where, "output_map", key=key),
                f"in ensemble {model.name}, ensemble tensor {tensor} is mapped from non-existing output {key} in model"
                f" {member.name}.",
                f"Its outputs are: {', '.join(sorted(outputs)) or 'none'}.",
            )
        elif [spec.name for spec in member.outputs].count(key) > 1:
            yield OUTPUT_TWICE.at(
                model.at_entry(*where, "output_map", key=key),
                f"in ensemble {model.name}, multiple outputs in model {member.name} are mapped to the same ensemble"
                f" tensor {tensor}.",
                f"Declare {key} once in {member.name}.",
            )
    for name, spec in inputs.items():
        if name not in step.input_map and not spec.is_optional:
            yield UNMAPPED.at(
                model.at(*where),
                f"in ensemble {model.name}, input {name} in model {member.name} is not mapped to any ensemble tensors.",
                f'Add input_map {{ key: "{name}" value: "..." }}, or declare it optional: true in {member.name}.',
            )


def _requests(model: Model, index: int, step: Any, member: Model) -> Findings:
    """Find steps that refuse requests which the ensemble itself accepts."""
    where = ("ensemble_scheduling", "step", index)
    optional = {spec.name for spec in model.inputs if spec.is_optional}
    required = {spec.name for spec in member.inputs if not spec.is_optional} if not member.is_completed else set()
    for key, tensor in sorted(step.input_map.items()):
        if tensor in optional and key in required:
            yield OPTIONAL.at(
                model.at_entry(*where, "input_map", key=key),
                f"Input {tensor} of ensemble {model.name} is optional, but input {key} of model {member.name} is"
                f" required: each request without {tensor} fails.",
                f"Write optional: true for {key} in {member.name}, or remove it from {tensor} in {model.name}.",
            )
    if member.message.HasField("sequence_batching"):
        yield SEQUENCE.at(
            model.at(*where, "model_name"),
            f"Model {member.name} has sequence_batching: a request to ensemble {model.name} fails unless it has a"
            " sequence id.",
            f"Let every client send sequence_id, sequence_start and sequence_end, or remove sequence_batching from"
            f" {member.name}.",
        )


# --- data types and shapes -------------------------------------------------------------------------------------------


def _check_tensors(model: Model, steps: list[Any], repository: Repository) -> Findings:
    """Find steps that declare an ensemble tensor with another dtype or shape than the ensemble or an earlier step."""
    declared: dict[str, Declared] = {}
    for name, tensor in _own(model):
        declared.setdefault(name, Declared(model.name, tensor, model.message.max_batch_size > 0))
    own = [*model.message.input, *model.message.output]
    scalars = {entry.name for entry in own if entry.HasField("reshape") and not entry.reshape.shape}
    for index, step in enumerate(steps):
        member = repository.known.get(step.model_name)
        if member is not None and member.message is not None:
            yield from _meanings(model, index, step, member, declared, scalars)


def _own(model: Model) -> Iterator[tuple[str, TensorSpec]]:
    """Yield name and declaration of each input and output of the ensemble, with the shape that its steps see."""
    for entry, tensor in zip(
        [*model.message.input, *model.message.output], [*model.inputs, *model.outputs], strict=True
    ):
        shape = tuple(entry.reshape.shape) if entry.HasField("reshape") else tensor.dims
        yield tensor.name, TensorSpec(tensor.name, tensor.dtype, shape)


def _meanings(
    model: Model, index: int, step: Any, member: Model, declared: dict[str, Declared], scalars: set[str]
) -> Findings:
    """Compare a step's declaration of each ensemble tensor with the first declaration, as Triton's core does.

    ``declared`` holds the first declarations, of the ensemble or of earlier steps. For a tensor that it does not hold
    yet, this step's declaration is added. ``scalars`` are tensors whose empty shape is declared, not left out.
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
            if (first.tensor.dims or name in scalars) and first.tensor.dtype != "TYPE_INVALID":
                yield from _compare(model, name, first, here, place)
                is_flat = first.is_batched and not is_batched and len(first.tensor.dims) == len(here.tensor.dims)
                if is_flat and field == "input_map" and model.message.max_batch_size > 1 and first.fits(here):
                    what = f"unexpected shape for input '{key}' for model '{member.name}' of max_batch_size 0: ensemble"
                    yield BATCH.at(
                        place,
                        f"{what} {model.name} passes all rows of a request.",
                        f"Write max_batch_size: 1 in {model.name}, or let {member.name} take more.",
                    )


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
    number = 0
    tensors = [([*step.input_map.values()] or [""], step.output_map.values()) for step in steps]  # "": never known
    for indices in find_rounds(tensors, labels):
        for index in indices:
            step = steps[index]
            found = {labels[tensor] for tensor in step.input_map.values()}
            if len(found) > 1:
                yield DECOUPLED.at(
                    model.at("ensemble_scheduling", "step", index),
                    f"in ensemble {model.name}, step of model '{step.model_name}' receives inputs originated from"
                    " different decoupled models.",
                    "Pass what it needs through one of them.",
                )
            label = min(found, default=0)  # 0: a step without inputs
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
