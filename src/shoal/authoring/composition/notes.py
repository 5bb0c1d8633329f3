"""Notes for the user: where models are placed other than asked for, and what composing changed of the user's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.devices import find_gpus, find_host_reason, gpus_of, is_single, show_groups
from shoal.authoring.repository.plan import GPU, HYBRID, Plan
from shoal.system.paths import shipped_root

MIXED = "mixed"  # in the manifest: models are placed one by one
_MAX_SHOWN = 60  # characters of a value
_GROUPS = "instance_group"


def name_placement(plan: Plan, gpus: Sequence[int]) -> str:
    """Return the manifest's name of the placement: the plan's, or ``mixed`` if it does not hold for all models."""
    is_said = plan.is_placed and all(settings.gpus is None for settings in plan.tuning.values())
    return plan.placement if is_said or plan.placement == HYBRID or not gpus else MIXED


def find_notes(models: Sequence[ModelConfig], plan: Plan, why_host: Mapping[str, str]) -> list[str]:
    """Return notes about placed models that are not on all GPUs of the plan; ``why_host`` is as in ``place_all``."""
    notes, wanted = [], plan.gpus or ()
    for model in (model for model in models if wanted and not model.is_ensemble):
        kinds = {group.kind for group in model.message.instance_group}
        is_placed = plan.placement == GPU or model.backend != "python"  # else it runs in the client
        if kinds == {model.message.instance_group[0].KIND_CPU} and is_placed:
            why = why_host.get(model.name) or find_host_reason(model, plan.target)
            notes.append(f"{model.name} is on the host{f': {why}' if why else ''}.")
        elif is_single(model) and is_placed and not set(wanted) <= set(gpus_of(model)):
            notes.append(f"{model.name} is not repeated on each GPU: {show_groups(model.message)}.")
    if unused := sorted(set(wanted) - set(find_gpus(models, plan))):
        notes.append(f"No model computes on GPU {', '.join(map(str, unused))}.")
    elif any(model.is_ensemble for model in models) and len([m for m in models if len(gpus_of(m)) > 1]) > 1:
        notes.append("Tensors between steps may be copied between GPUs; a repository for each GPU avoids that.")
    return notes


def find_changes(before: ModelConfig, message: Any, plan: Plan) -> Iterator[str]:
    """Yield a note on each value in the ``config.pbtxt`` of a user's model that composing replaced.

    ``before`` is the configuration in the model's folder, ``message`` the one that is written. Values that are only
    added are left out.
    """
    if before.folder.parent.parent == shipped_root():
        return
    place, old = f"{before.name}/config.pbtxt", before.message
    for field, value in old.ListFields():
        new = getattr(message, field.name)
        if field.name == "parameters":
            for key in sorted(value):
                if value[key] != new[key] and value[key].string_value:  # an empty one is there to be filled in
                    yield f"{place}: {key} {_show(value[key].string_value)} -> {_show(new[key].string_value)}"
        elif field.name == _GROUPS and show_groups(old) != show_groups(message):
            by = f" (--placement {plan.placement})" if plan.is_placed else ""
            yield f"{place}: {_GROUPS} {show_groups(old)} -> {show_groups(message)}{by}"
        elif field.name not in (_GROUPS, "input") and value != new:
            yield f"{place}: {field.name} {_show(value)} -> {_show(new)}"


def _show(value: Any) -> str:
    shown = " ".join(str(value).split()) or "(empty)"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
