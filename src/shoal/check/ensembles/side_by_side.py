"""Steps that an ensemble runs in parallel: faults of Triton before 26.05."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.environment.targets import FIRST_SIDE_BY_SIDE, Target
from shoal.repository.ensemble_config import first_steps

FIRST = Rule("several-first-steps", Severity.WARNING)
LIMIT = Rule("limit-side-by-side", Severity.WARNING)
RULES = (FIRST, LIMIT)


def find(model: Model, repository: Repository) -> Findings:
    """Find steps that may refuse a request that a parallel step runs, where the target is known and too old."""
    target = repository.target
    if model.message is not None and target is not None and target.release < FIRST_SIDE_BY_SIDE:
        yield from _first(model, target)
        yield from _limits(model, repository, target)


def _first(model: Model, target: Target) -> Findings:
    steps, first = model.message.ensemble_scheduling.step, first_steps(model.message)
    if len(first) > 1:
        names = ", ".join(steps[index].model_name for index in first)
        yield FIRST.at(
            model.at("ensemble_scheduling", "step", first[1], "model_name"),
            f"The steps {names} read the request in parallel; if one refuses it, Triton {target.version}"
            " may stop answering.",
            "Let one step read it first and pass it on, as shoal's checked_text does with a text, or serve with 26.05"
            " or later.",
        )


def _limits(model: Model, repository: Repository, target: Target) -> Findings:
    steps = list(model.message.ensemble_scheduling.step)
    before = _find_earlier(steps)
    for index, step in enumerate(steps):
        beside = [i for i in range(len(steps)) if i != index and i not in before[index] and index not in before[i]]
        member = repository.known.get(step.model_name)
        if member is None or member.message is None or not beside:
            continue
        batching = member.message.dynamic_batching
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        if any(policy.max_queue_size or policy.default_timeout_microseconds for policy in policies):
            other = steps[beside[0]].model_name
            yield LIMIT.at(
                model.at("ensemble_scheduling", "step", index, "model_name"),
                f"The queue of {step.model_name} has a limit, and {other} runs in parallel; if it refuses a request,"
                f" Triton {target.version} may never answer it.",
                f"Remove max_queue_size and default_timeout_microseconds from {step.model_name}, or serve with 26.05"
                " or later.",
            )


def _find_earlier(steps: Sequence[Any]) -> list[set[int]]:
    """Map each step to those that it waits for, directly or through others."""
    writers = {tensor: index for index, step in enumerate(steps) for tensor in step.output_map.values()}
    before = [{writers[tensor] for tensor in step.input_map.values() if tensor in writers} for step in steps]
    for _ in steps:  # the longest path has as many edges at most
        before = [found.union(*(before[index] for index in found)) for found in before]
    return before
