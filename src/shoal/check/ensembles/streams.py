"""Answers in pieces, in configurations: decoupled steps and what follows them, engines, and calls to other models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shoal.check.ensembles.members import find_circle
from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository, is_decoupled
from shoal.check.python.streams import is_stateful
from shoal.environment.targets import FIRST_SIDE_BY_SIDE
from shoal.errors import suggest

DIVIDED = Rule("stream-state-divided", Severity.ERROR)
UNMAPPED = Rule("stream-id-unmapped", Severity.ERROR)
CALLS = Rule("calls-unknown", Severity.ERROR)
VLLM = Rule("vllm-batch-size", Severity.ERROR)
LEAVING = Rule("leaving-client", Severity.ADVICE)
BATCHED = Rule("engine-batched-twice", Severity.ADVICE)
RULES = (DIVIDED, UNMAPPED, CALLS, VLLM, LEAVING, BATCHED)

STREAM_ID = "stream_id"


def find(model: Model, repository: Repository) -> Findings:
    """Find what makes streams fail, or mixes them."""
    if model.message is None:
        return
    yield from _calls(model, repository)
    yield from _engine(model)
    if model.message.HasField("ensemble_scheduling") and not find_circle(model, repository.known):
        behind = list(_find_behind(model, repository.known))
        for place in behind:
            yield from _state(place)
        if behind:
            yield from _leaving(model, repository)


def _calls(model: Model, repository: Repository) -> Findings:
    for name in model.parameters.get("calls", "").split():
        if name not in repository.known:
            yield CALLS.at(
                model.at_entry("parameters", key="calls", within=("value", "string_value")),
                f"Model {model.name} calls {name}, and there is no such model.",
                suggest(name, sorted(repository.known.keys() - {model.name})),
            )


def _engine(model: Model) -> Findings:
    message, is_vllm = model.message, model.message.backend == "vllm"
    if is_vllm and message.max_batch_size > 0:
        yield VLLM.at(
            model.at("max_batch_size"),
            f"configuration specified max_batch_size {message.max_batch_size}, but in auto-complete-config function"
            f" for model '{model.name}' specified max_batch_size 0.",
            "Write max_batch_size: 0. vLLM forms batches itself.",
        )
    batching = message.dynamic_batching
    waits = bool(batching.max_queue_delay_microseconds or batching.preferred_batch_size)
    field = "sequence_batching" if message.HasField("sequence_batching") else "dynamic_batching" if waits else ""
    if field and (is_vllm or (message.model_transaction_policy.decoupled and "slots" in model.parameters)):
        yield BATCHED.at(
            model.at(field),
            f"The engine {model.name} forms batches itself, and {field} lets its requests wait for others.",
            f"Remove {field}; a limit of the queue, default_queue_policy, is of use.",
        )


class _Behind(NamedTuple):
    """Step that runs once per answer of a decoupled step; ``gives_id``: that step returns a stream id."""

    ensemble: Model
    position: int
    step: Any
    member: Model
    gives_id: bool


def _find_behind(
    ensemble: Model, known: Mapping[str, Model], above: tuple[str, ...] = (), *, gives_id: bool = False
) -> Iterator[_Behind]:
    """Yield the steps behind decoupled ones, and those of ensembles there; ``above`` are the ensembles around this."""
    steps = [(i, s, known.get(s.model_name)) for i, s in enumerate(ensemble.message.ensemble_scheduling.step)]
    many = {tensor.name for tensor in ensemble.message.input} if above else set()
    found: dict[int, bool] = {}  # steps that answer many times, and whether what they read comes many times
    while new := {
        index: bool(many & set(step.input_map.values()))
        for index, step, member in steps
        if found.get(index) is not True
        and (many & set(step.input_map.values()) or (index not in found and member and is_decoupled(member, known)))
    }:
        found |= new
        many |= {tensor for index, step, _ in steps if index in new for tensor in step.output_map.values()}
    gives_id = gives_id or any(
        member is not None and is_decoupled(member, known) and STREAM_ID in [tensor.name for tensor in member.outputs]
        for _, _, member in steps
    )
    for index, step, member in steps:
        if found.get(index) and member is not None and member.message is not None and member.name not in above:
            yield _Behind(ensemble, index, step, member, gives_id)
            yield from _find_behind(member, known, (*above, ensemble.name), gives_id=gives_id)


def _state(place: _Behind) -> Findings:
    member = place.member
    ids = [tensor for tensor in member.inputs if tensor.name == STREAM_ID]
    groups = member.message.instance_group
    number = sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups)
    if number > 1 and (ids or is_stateful(member)):
        why = f"reads {STREAM_ID}" if ids else "is stateful"
        yield DIVIDED.at(
            member.at("instance_group"),
            f"{member.name} has {number} instances; it follows a decoupled model in {place.ensemble.name} and {why}:"
            " the answers of one stream go to any of them.",
            "Write count: 1, on one GPU at most.",
        )
    if place.gives_id and any(tensor.is_optional for tensor in ids) and STREAM_ID not in place.step.input_map:
        yield UNMAPPED.at(
            place.ensemble.at("ensemble_scheduling", "step", place.position),
            f"{member.name} takes {STREAM_ID}, which its step in {place.ensemble.name} does not map: it cannot tell"
            " one stream from another.",
            f'Add input_map {{ key: "{STREAM_ID}" value: "..." }}, the tensor of the decoupled step.',
        )


def _leaving(model: Model, repository: Repository) -> Findings:
    target = repository.target
    if target is None or target.release >= FIRST_SIDE_BY_SIDE:
        return
    for index, step in enumerate(model.message.ensemble_scheduling.step):
        member = repository.known.get(step.model_name)
        if member is not None and is_decoupled(member):
            yield LEAVING.at(
                model.at("ensemble_scheduling", "step", index, "model_name"),
                f"If a client of {model.name} leaves, {member.name} answers to the end, and Triton {target.version}"
                " does not end the request cleanly: it may wait for it when it stops.",
                f"Let a component call {member.name} instead, start Triton with a short --exit-timeout-secs, or serve"
                " with 26.05 or later.",
            )
            return
