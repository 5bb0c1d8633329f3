"""Sequence batching: core's own rules of its control tensors, in core's words."""

from __future__ import annotations

from typing import Any

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository, enum_name

CONTROL = Rule("sequence-control", Severity.ERROR, is_core=True)
RULES = (CONTROL,)

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRELATION = "CONTROL_SEQUENCE_CORRID"
_CORRELATION_TYPES = {5: "UINT64", 9: "INT64", 4: "UINT32", 8: "INT32", 13: "STRING"}


def find(model: Model, _: Repository) -> Findings:
    """Find sequence settings that core refuses."""
    if model.message is None or not model.message.HasField("sequence_batching"):
        return
    seen, kinds = set(), set()
    for index, tensor in enumerate(model.message.sequence_batching.control_input):
        place = model.at("sequence_batching", "control_input", index)
        if not tensor.name:
            what = f"sequence batching control tensor must have a name for {model.name}."
            yield CONTROL.at(place, what, 'Add name: "...".')
        elif tensor.name in seen:
            what = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            yield CONTROL.at(place, f"{what} for {model.name}.", "Give each kind a tensor of its own.")
        seen.add(tensor.name)
        for control in tensor.control:
            kind = enum_name(control.Kind, control.kind)
            if kind in kinds:
                what = f"sequence batching specifies multiple {kind} tensors for {model.name}."
                yield CONTROL.at(place, what, "Keep one.")
            kinds.add(kind)
            what, fix = _values(control, kind)
            if what:
                yield CONTROL.at(place, f"{what} for {kind} for {model.name}.", fix)
    slots = model.message.sequence_batching.direct.minimum_slot_utilization
    if not 0 <= slots <= 1:
        yield CONTROL.at(
            model.at("sequence_batching", "direct", "minimum_slot_utilization"),
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model.name}; it is {slots}.",
            "Write a share of the slots, such as 0.5.",
        )


def _values(control: Any, kind: str) -> tuple[str, str]:
    given = [name for name in _VALUES if len(getattr(control, name))]
    if kind == _CORRELATION:
        if given:
            return f"sequence batching must not specify {given[0]}", "Take it out; CORRID has a data_type."
        if control.data_type not in _CORRELATION_TYPES:
            return "unexpected data type", "Allowed are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING."
        return "", ""
    example = "int32_false_true: [ 0, 1 ]"
    if not given:
        names = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        return f"sequence batching must specify either {names}", f"Add {example}."
    if len(given) > 1:
        return f"sequence batching specifies more than one from {' and '.join(given)}", f"Keep {given[0]}."
    if len(getattr(control, given[0])) != 2:
        return f"sequence batching control '{given[0]}' must have exactly 2 entries", f"For example: {example}"
    return "", ""
