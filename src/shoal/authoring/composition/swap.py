"""Replace one model by another, in the steps of ensembles and in the calls that models' code makes (BLS).

Clients ask an engine on NVIDIA's backend tensorrtllm by its name. So what replaces it takes its name and its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.authoring.repository.call_graph import collect, is_decoupled
from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.authoring.repository.ensemble_config import Declared, show
from shoal.errors import InputError, suggest

_NVIDIA, _PROMPT = "tensorrtllm", "exclude_input_in_output"  # a backend, and a parameter of its models


def exchange_models(
    available: Mapping[str, ModelConfig], names: Iterable[str], swap: Mapping[str, str]
) -> Mapping[str, ModelConfig]:
    """Return ``available`` with the keys of ``swap`` replaced by its values, in each step and each parameter ``calls``.

    A replacement may itself call the model that it replaces: that call is not changed.

    Raises:
        InputError: a model of ``swap`` does not exist, no model that is composed for ``names`` uses the replaced model,
            or the tensors of the replacement do not fit.
        ArtifactError: one of ``names``, or a model that it calls, is missing.
    """
    if not swap:
        return available
    for name in (*swap, *swap.values()):
        if name not in available:
            raise InputError(f"There is no model {name} to swap.", suggest(name, sorted(available)))
    users = {user.name: user for name in (*names, *swap.values()) for user in collect(name, available)}
    used = {called for user in users.values() for called in (*(step.model for step in user.steps), *user.calls)}
    stand_ins = {}
    for old, new in swap.items():
        if old not in used and not (available[old].backend == _NVIDIA and old in {*names}):
            raise InputError(f"Nothing that is composed uses {old}: it cannot be swapped.", suggest(old, sorted(used)))
        if available[old].backend == _NVIDIA:
            stand_ins[old] = _stand_in(available[old], available[new])
            continue
        for user in (user for user in users.values() if user.name != new):
            _check_decoupled(user, old, new, available)
            _check_user(user, available[old], available[new])
    renamed = {old: new for old, new in swap.items() if old not in stand_ins}
    return {name: _rename(config, renamed) for name, config in available.items()} | stand_ins


def _stand_in(old: ModelConfig, new: ModelConfig) -> ModelConfig:
    """Return the engine ``new`` with the name and the tensors of ``old``, an engine of TensorRT-LLM."""
    needed = [tensor.name for tensor in old.spec.inputs if not tensor.is_optional]
    _check_same(old, old, new, needed, [tensor.name for tensor in old.spec.outputs])
    message = type(new.message)()
    message.CopyFrom(new.message)
    for field in ("input", "output", "model_transaction_policy"):
        message.ClearField(field)
    message.input.extend(old.message.input)
    message.output.extend(old.message.output)
    message.model_transaction_policy.CopyFrom(old.message.model_transaction_policy)
    message.name, message.max_batch_size = old.name, old.message.max_batch_size
    message.parameters["like_tensorrt_llm"].string_value = "true"
    if value := old.spec.parameters.get(_PROMPT):
        message.parameters[_PROMPT].string_value = value
    return as_config(message, new.folder)


def _check_user(user: ModelConfig, old: ModelConfig, new: ModelConfig) -> None:
    """Check that ``new`` has the tensors of ``old`` that ``user`` needs.

    These are the tensors that the steps of ``user`` map. If the code of ``user`` calls ``old``, they are also all its
    required inputs and its outputs.
    """
    for step in user.steps:
        if step.model == old.name:
            _check_same(user, old, new, step.inputs, step.outputs)
    if old.name in user.calls:
        needed = [tensor.name for tensor in old.spec.inputs if not tensor.is_optional]
        _check_same(user, old, new, needed, [tensor.name for tensor in old.spec.outputs])


def _check_decoupled(user: ModelConfig, old: str, new: str, available: Mapping[str, ModelConfig]) -> None:
    ours, theirs = (is_decoupled(available[name], available.get) for name in (old, new))
    if ours != theirs and old in (*(step.model for step in user.steps), *user.calls):
        raise InputError(
            f"{new} cannot take the place of {old} in {user.name}: {new} is {'' if theirs else 'not '}decoupled, and"
            f" {old} is{'' if ours else ' not'}.",
            "Give both the same model_transaction_policy.",
        )


def _check_same(
    user: ModelConfig, old: ModelConfig, new: ModelConfig, inputs: Iterable[str], outputs: Iterable[str]
) -> None:
    given = set(inputs)
    for kind, names, ours, theirs in (
        ("input", given, old.spec.inputs, new.spec.inputs),
        ("output", set(outputs), old.spec.outputs, new.spec.outputs),
    ):
        have = {tensor.name: tensor for tensor in theirs}
        for tensor in (tensor for tensor in ours if tensor.name in names):
            wanted = Declared(old.name, tensor, old.spec.is_batched)
            what = f"{new.name} cannot take the place of {old.name} in {user.name}: {kind} {_describe(wanted)}"
            if tensor.name not in have:
                known = ", ".join(have) or "none"
                raise InputError(f"{what} is used, and {new.name} has no such {kind}.", f"Its {kind}s are: {known}.")
            found = Declared(new.name, have[tensor.name], new.spec.is_batched)
            if tensor.dtype != found.tensor.dtype or not wanted.fits(found):
                raise InputError(f"{what} does not fit {_describe(found)}.", "Give both the same dtype and dims.")
    missing = [tensor for tensor in new.spec.inputs if not tensor.is_optional and tensor.name not in given]
    if missing:
        has = ", ".join(_describe(Declared(old.name, tensor, old.spec.is_batched)) for tensor in old.spec.inputs)
        raise InputError(
            f"{new.name} cannot take the place of {old.name} in {user.name}: {new.name} needs the input"
            f" {_describe(Declared(new.name, missing[0], new.spec.is_batched))}, which {user.name} does not give"
            f" {old.name}.",
            f"Declare it optional in {new.name}; {old.name} takes: {has}.",
        )


def _describe(declared: Declared) -> str:
    """Format the declaration of a tensor, with the batch dimension: ``ids of llm-hf (INT32 [-1,-1])``."""
    tensor = declared.tensor
    return f"{tensor.name} of {declared.who} ({tensor.dtype.removeprefix('TYPE_')} {show(declared.full)})"


def _rename(config: ModelConfig, swap: Mapping[str, str]) -> ModelConfig:
    others = {old: new for old, new in swap.items() if new != config.name}
    called = [others.get(name, name) for name in config.calls]
    if tuple(called) == config.calls and not any(step.model in others for step in config.steps):
        return config
    message = type(config.message)()
    message.CopyFrom(config.message)
    for step in message.ensemble_scheduling.step:
        step.model_name = others.get(step.model_name, step.model_name)
    if called:
        message.parameters["calls"].string_value = " ".join(called)
    return as_config(message, config.folder)
