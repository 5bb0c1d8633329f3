"""Placement of models on CPU and GPUs, configurations for a target server, and tuning of single models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.authoring.repository.devices import (
    PYTHON_BASED_BACKENDS,
    count_devices,
    find_gpus,
    find_host_reason,
    is_in_client,
    is_single,
)
from shoal.authoring.repository.model_code import is_component, read_code
from shoal.authoring.repository.parameters import HOST_INPUTS
from shoal.authoring.repository.plan import AUTO, HYBRID, Instances, Plan, Tuning
from shoal.errors import InputError, suggest


def place(config: ModelConfig, plan: Plan, *, why_host: str = "") -> Any:
    """Make the configuration message of one model under ``plan``; the model folder's configuration is not changed.

    The plan's settings of batches are applied by ``tune``. ``why_host`` is the reason why the model computes on the
    host only, if its artifacts give one; other reasons are found here.

    Configurations for different targets differ only for models of python-based backends, in ``runtime`` and
    ``allow_ragged_batch``. shoal's backend pads requests of different widths to one batch, and the native backend does
    not. A model without an attention mask could not tell padding from data, so that its answer would depend on the
    other requests in the batch: for such a model, ``allow_ragged_batch`` is not changed.

    Raises:
        InputError: the plan places the model where it cannot compute.
    """
    message = type(config.message)()
    message.CopyFrom(config.message)
    if config.is_ensemble:
        return message
    _place_groups(message, config, plan, why_host or find_host_reason(config, plan.target))
    if plan.target == EMBEDDED and config.backend in PYTHON_BASED_BACKENDS:
        message.runtime = "model.py"
        for tensor in message.input if config.mask else ():
            tensor.allow_ragged_batch = tensor.allow_ragged_batch or -1 in tensor.dims
    is_ours = config.backend in PYTHON_BASED_BACKENDS or is_component(read_code(config))
    uses_gpus = bool(plan.gpus) or any(settings.gpus for settings in plan.tuning.values())
    is_on_host = uses_gpus and all(group.kind == group.KIND_CPU for group in message.instance_group)
    if is_ours and is_on_host and config.backend == "python":
        message.parameters.pop(HOST_INPUTS, None)  # Triton copies what comes from a GPU; the component needs no CuPy
    elif is_ours and HOST_INPUTS not in message.parameters:  # otherwise Triton would copy their inputs to the host
        message.parameters[HOST_INPUTS].string_value = "no"
    if config.backend == "pytorch" and plan.dtype not in (AUTO, "fp32"):
        message.parameters["dtype"].string_value = plan.dtype
    return message


def place_all(
    models: Iterable[ModelConfig], plan: Plan, why_host: Mapping[str, str] | None = None
) -> list[ModelConfig]:
    """Return the models, placed as by ``place``; ``why_host`` is by model name.

    Raises:
        InputError: as in ``place``; or the plan has GPUs, and no model computes on any.
    """
    models, reasons = list(models), dict(why_host or {})
    placed = []
    for model in models:
        reasons[model.name] = reasons.get(model.name) or find_host_reason(model, plan.target)
        placed.append(as_config(place(model, plan, why_host=reasons[model.name]), model.folder))
    if plan.gpus and not find_gpus(placed, plan):
        named = [model.name for model in models if not model.is_ensemble]
        shown = "; ".join(f"{name}: {reasons[name] or 'placed there'}" for name in named)
        other = "--gpu none" if plan.placement == HYBRID else "--placement cpu"
        raise InputError(
            f"Placement {plan.placement}: none of the models computes on a GPU ({shown}).",
            f"Say {other}, or exchange a model for one that can (--swap).",
        )
    return placed


def _place_groups(message: Any, config: ModelConfig, plan: Plan, why_host: str) -> None:
    groups, tuning = message.instance_group, plan.tuning_of(config.name)
    first = groups[0] if groups else groups.add()
    if tuning.instances:
        given = [type(first)() for _ in tuning.instances]
        for group, wanted in zip(given, tuning.instances, strict=True):
            if wanted.count < 1:
                raise InputError(f"{config.name} is to have {wanted.count} instances; it needs at least 1.")
            group.CopyFrom(first)
            group.name, group.count = "", wanted.count
        del groups[:]
        groups.extend(given)
    if tuning.gpus is not None:
        _check_place(config, plan, tuning, why_host)
        del groups[1:]
        _put(groups[0], tuning.gpus)
        return
    gpus = _choose_gpus(config, plan, why_host)
    for wanted in tuning.instances:
        _check_instances(config, wanted, plan, gpus, why_host)
    for group, listed in zip_longest(groups, [wanted.gpus for wanted in tuning.instances]):
        is_open = group.kind == group.KIND_AUTO and not group.gpus
        if listed:
            _put(group, listed)
        elif group.kind == group.KIND_MODEL:  # its backend chooses the devices, from the first GPU on
            if config.backend == "vllm" and plan.is_placed and gpus and gpus[0]:
                _put(group, gpus)
        elif plan.is_placed or is_open:
            _put(group, gpus)


def _put(group: Any, gpus: Iterable[int]) -> None:
    group.gpus[:] = gpus
    group.kind = group.KIND_GPU if group.gpus else group.KIND_CPU


def _choose_gpus(config: ModelConfig, plan: Plan, why_host: str) -> tuple[int, ...]:
    """Return the GPUs on which ``plan`` puts instances of a model; empty for the host."""
    gpus = plan.gpus or ()
    if why_host or not gpus or (plan.placement == HYBRID and is_in_client(config)):
        return ()
    if not is_single(config):
        return gpus
    width = count_devices(config)
    first = gpus[0] if config.backend != "vllm" or width == 1 else 0
    if gpus[:width] != (wanted := tuple(range(first, first + width))):
        raise InputError(
            f"{config.name} computes on {width} GPUs at once (tensor_parallel_size), {', '.join(map(str, wanted))},"
            f" and the plan has {', '.join(map(str, gpus))}.",
            f"Say --gpu {','.join(map(str, wanted))}",
        )
    return gpus[:1]


def tune(models: Iterable[ModelConfig], tuning: Mapping[str, Tuning]) -> list[ModelConfig]:
    """Return the models with the batches that ``tuning`` has for their names; ``place`` does the rest of it.

    Raises:
        InputError: there is no model of a name, it is an ensemble, or it has no batches.
    """
    tuned = {model.name: model for model in models}
    for name, wanted in tuning.items():
        if name not in tuned:
            raise InputError(f"There is no model {name} in this repository.", suggest(name, sorted(tuned)))
        tuned[name] = _tune(tuned[name], wanted)
    return list(tuned.values())


def _tune(model: ModelConfig, wanted: Tuning) -> ModelConfig:
    if model.is_ensemble:
        raise InputError(
            f"{model.name} is an ensemble: it has neither instances nor batches.", "Name one of its steps."
        )
    message = type(model.message)()
    message.CopyFrom(model.message)
    if wanted.preferred_batch_sizes or wanted.queue_delay is not None:
        if "slots" in message.parameters:
            raise InputError(
                f"{model.name} is an engine, which makes its own batches of the requests that it has.",
                "Set its parameter slots, the number of requests that are computed at once.",
            )
        if message.max_batch_size < 2:
            raise InputError(
                f"{model.name} gets each request alone (max_batch_size: {message.max_batch_size}): there are no batches"
                " to tune.",
                "Increase max_batch_size in its config.pbtxt.",
            )
        batching = message.dynamic_batching
        if wanted.preferred_batch_sizes:
            batching.preferred_batch_size[:] = wanted.preferred_batch_sizes
        if wanted.queue_delay is not None:
            batching.max_queue_delay_microseconds = wanted.queue_delay
    return as_config(message, model.folder)


def _check_instances(model: ModelConfig, group: Instances, plan: Plan, gpus: tuple[int, ...], why_host: str) -> None:
    """Check instances against the GPUs on which the plan puts the model."""
    if group.gpus and not gpus:
        why, other = (f" ({why_host})", "") if why_host else ("", ", or say --placement gpu")
        raise InputError(
            f"{model.name} runs on the host{why} with placement {plan.placement}, and GPU {group.gpus[0]} is listed for"
            " it.",
            f"Leave the GPUs out (--instances {model.name}={group.count}){other}.",
        )
    for gpu in set(group.gpus) - set(plan.gpus or ()):  # memory is sized only for the GPUs of the plan
        listed = ",".join(map(str, sorted({*(plan.gpus or ()), *group.gpus})))
        raise InputError(f"GPU {gpu} is listed for {model.name}, and is not a GPU of the plan.", f"Say --gpu {listed}")


def _check_place(model: ModelConfig, plan: Plan, tuning: Tuning, why_host: str) -> None:
    gpus = tuning.gpus or ()
    if len(tuning.instances) > 1 or any(group.gpus for group in tuning.instances):
        raise InputError(
            f"{model.name} is placed by --place and by --instances.",
            f"Give one of the two, or only a number: --instances {model.name}=2",
        )
    if plan.placement == HYBRID and is_in_client(model):
        why_host = why_host or "with placement hybrid it runs in the client"
    if gpus and why_host:
        raise InputError(
            f"{model.name} cannot be placed on GPU {gpus[0]}: {why_host}.", f"Say --place {model.name}=cpu."
        )
    if len(set(gpus)) != len(gpus):
        raise InputError(f"--place lists a GPU twice for {model.name}.", f"For example: --place {model.name}=gpu:0")
