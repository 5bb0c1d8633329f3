"""Rules for parallel steps, steps after a decoupled step, calls to other models, and engines such as vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shoal.authoring.check.config.trtllm import is_unset
from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.python.streams import is_stateful
from shoal.authoring.environment.targets import FIRST_SIDE_BY_SIDE, Target
from shoal.authoring.repository.ensemble_config import first_steps
from shoal.errors import suggest

FIRST = Rule("several-first-steps", Severity.WARNING)
LIMIT = Rule("limit-side-by-side", Severity.WARNING)
DIVIDED = Rule("stream-state-divided", Severity.ERROR)
UNMAPPED = Rule("stream-id-unmapped", Severity.ERROR)
CALLS = Rule("calls-unknown", Severity.ERROR)
VLLM = Rule("vllm-batch-size", Severity.ERROR)
LEAVING = Rule("leaving-client", Severity.ADVICE)
BATCHED = Rule("engine-batched-twice", Severity.ADVICE)

STREAM_ID = "stream_id"
_OF_STREAMS = {STREAM_ID: "cannot tell one stream from another", "is_last": "cannot tell when a stream ends"}
_MAX_CALLS = 100  # names of a model's calls that are looked up
_ENGINE_NAME = "tensorrt_llm_model_name"  # parameter of tensorrt_llm_bls, ours and NVIDIA's


def find(model: Model, repository: Repository) -> Findings:
    """Find settings with which parallel steps, streamed answers, calls to other models or engines such as vLLM fail."""
    if model.message is None:
        return
    target = repository.target
    if target is not None and target.release < FIRST_SIDE_BY_SIDE:
        yield from _first(model, target)
        yield from _limits(model, repository, target)
    yield from _calls(model, repository)
    yield from _order(model, repository)
    yield from _engine(model)
    if model.message.HasField("ensemble_scheduling") and not repository.find_circle(model.name):
        behind = list(_find_behind(model, repository))
        for place in behind:
            yield from _state(place)
        if behind:
            yield from _leaving(model, repository)


# --- parallel steps: faults of Triton before 26.05 ------------------------------------------------------------------


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
    """Return, for each step, the indices of the steps that it depends on, directly or through other steps."""
    writers = {tensor: index for index, step in enumerate(steps) for tensor in step.output_map.values()}
    direct = [{writers[tensor] for tensor in step.input_map.values() if tensor in writers} for step in steps]
    before, last = [sum(1 << index for index in found) for found in direct], None
    while before != last:  # sets of indices as the bits of a number, whose union is fast
        last = [*before]
        for index, found in enumerate(direct):
            for each in found:
                before[index] |= before[each]
    return [{index for index in range(len(steps)) if bits >> index & 1} for bits in before]


# --- decoupled steps, engines, calls ---------------------------------------------------------------------------------


def _calls(model: Model, repository: Repository) -> Findings:
    if model.config is None:
        return
    called = dict.fromkeys([*dict.fromkeys(model.config.calls)][:_MAX_CALLS], "calls")
    if (engine := model.parameters.get(_ENGINE_NAME, "")) and not is_unset(engine):
        called.setdefault(engine, _ENGINE_NAME)
    for name, key in called.items():
        if name not in repository.known and name not in model.config.hosts:
            yield CALLS.at(
                model.at_entry("parameters", key=key, within=("value", "string_value")),
                f"Model {model.name} calls {name}, and there is no such model.",
                suggest(name, sorted(repository.known.keys() - {model.name})),
            )


def _order(model: Model, repository: Repository) -> Findings:
    """Find an llm_bls that calls the engine for the prompt."""
    if model.config is not None and any("Completions.read" in text for _, text in model.sources):
        match [repository.is_decoupled(name) for name in model.config.calls]:
            case [True, False]:
                place = model.at_entry("parameters", key="calls", within=("value", "string_value"))
                first, second = model.config.calls
                yield CALLS.at(place, f"{first} streams, and {second} does not.", f"Write: {second} {first}")


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
            f"Remove {field}. To limit the queue, write dynamic_batching with only a default_queue_policy.",
        )


class _Behind(NamedTuple):
    """Step that runs once per answer of a decoupled step. ``gives_id``: that step returns a tensor ``stream_id``."""

    ensemble: Model
    position: int
    step: Any
    member: Model
    gives_id: bool


def _find_behind(ensemble: Model, repository: Repository) -> Iterator[_Behind]:
    """Yield the steps that depend on a decoupled step. If such a step is an ensemble, also yield all of its steps."""
    waiting, seen = [(ensemble, False, False)], set()
    while waiting:  # ensembles, whether they are behind a decoupled step, and whether it returns ``stream_id``
        current, is_inner, gives_id = waiting.pop()
        steps = list(current.message.ensemble_scheduling.step)
        decoupled = {index for index, step in enumerate(steps) if repository.is_decoupled(step.model_name)}
        if not decoupled and not is_inner:
            continue
        before = _find_earlier(steps)
        members = [repository.known.get(step.model_name) for step in steps]
        outputs = [tensor.name for index in decoupled for tensor in getattr(members[index], "outputs", ())]
        gives_id = gives_id or STREAM_ID in outputs
        for index, (step, member) in enumerate(zip(steps, members, strict=True)):
            is_behind = is_inner or not decoupled.isdisjoint(before[index])
            if is_behind and member is not None and member.message is not None:
                yield _Behind(current, index, step, member, gives_id)
                if (member.name, gives_id) not in seen:
                    seen.add((member.name, gives_id))
                    waiting.append((member, True, gives_id))


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
    taken = [tensor.name for tensor in member.inputs if tensor.is_optional and tensor.name in _OF_STREAMS]
    for name in taken if place.gives_id and STREAM_ID in taken else ():
        if name not in place.step.input_map:
            yield UNMAPPED.at(
                place.ensemble.at("ensemble_scheduling", "step", place.position),
                f"{member.name} takes {name}, which its step in {place.ensemble.name} does not map: the model"
                f" {_OF_STREAMS[name]}.",
                f'Add input_map {{ key: "{name}" value: "..." }}, the tensor of the decoupled step.',
            )


def _leaving(model: Model, repository: Repository) -> Findings:
    target = repository.target
    if target is None or target.release >= FIRST_SIDE_BY_SIDE:
        return
    for index, step in enumerate(model.message.ensemble_scheduling.step):
        member = repository.known.get(step.model_name)
        if member is not None and member.config is not None and member.config.spec.is_decoupled:
            yield LEAVING.at(
                model.at("ensemble_scheduling", "step", index, "model_name"),
                f"If a client of {model.name} leaves, {member.name} answers to the end, and Triton {target.version}"
                " does not end the request cleanly: at shutdown, Triton may wait for it.",
                f"Let a component call {member.name} instead, start Triton with a short --exit-timeout-secs, or serve"
                " with 26.05 or later.",
            )
            return
