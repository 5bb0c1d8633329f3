"""Instances and dynamic batching of single models, in place of what their model folders say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.errors import InputError, suggest
from shoal.repository.config import ModelConfig, as_config
from shoal.repository.placement import Plan


@dataclass(frozen=True)
class Instances:
    """``count`` instances of a model: on each of ``gpus``, or where the plan has the model if none are listed."""

    count: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """Settings of one model; what is left out stays as in its folder.

    ``instances`` are groups of instances. With dynamic batching, Triton sends a batch of one of the
    ``preferred_batch_sizes`` (in rows) at once, and waits up to ``queue_delay`` microseconds to form one.
    """

    instances: tuple[Instances, ...] = ()
    preferred_batch_sizes: tuple[int, ...] = ()
    queue_delay: int | None = None


def tune(models: Iterable[ModelConfig], tuning: Mapping[str, Tuning], plan: Plan) -> list[ModelConfig]:
    """Return the models, with these settings.

    Raises:
        InputError: there is no such model, it is an ensemble, or a setting does not fit it or the plan.
    """
    tuned = {model.name: model for model in models}
    for name, wanted in tuning.items():
        if name not in tuned:
            raise InputError(f"There is no model {name} in this repository.", suggest(name, sorted(tuned)))
        tuned[name] = _tune(tuned[name], wanted, plan)
    return list(tuned.values())


def _tune(model: ModelConfig, wanted: Tuning, plan: Plan) -> ModelConfig:
    if model.is_ensemble:
        raise InputError(
            f"{model.name} is an ensemble: it has neither instances nor batches.", "Name one of its steps."
        )
    message = type(model.message)()
    message.CopyFrom(model.message)
    if wanted.instances:
        kind = message.instance_group[0].kind if message.instance_group else 0
        del message.instance_group[:]
        for group in wanted.instances:
            _check_instances(model, group, plan)
            message.instance_group.add(count=group.count, kind=kind, gpus=group.gpus)
    if wanted.preferred_batch_sizes or wanted.queue_delay is not None:
        if not message.max_batch_size:
            raise InputError(f"{model.name} gets each request alone (max_batch_size: 0): there are no batches to tune.")
        batching = message.dynamic_batching
        if wanted.preferred_batch_sizes:
            batching.preferred_batch_size[:] = wanted.preferred_batch_sizes
        if wanted.queue_delay is not None:
            batching.max_queue_delay_microseconds = wanted.queue_delay
    return as_config(message, model.folder)


def _check_instances(model: ModelConfig, group: Instances, plan: Plan) -> None:
    if group.count < 1:
        raise InputError(f"{model.name} is to have {group.count} instances; it needs at least 1.")
    gpus = plan.gpus_of(model)
    if group.gpus and not gpus:
        raise InputError(
            f"{model.name} runs on the host with placement {plan.placement}, and GPU {group.gpus[0]} is listed for it.",
            f"Leave the GPUs out (--instances {model.name}={group.count}), or say --placement gpu.",
        )
    for gpu in set(group.gpus) - set(gpus):  # memory is sized for those of the plan
        listed = ",".join(map(str, sorted({*gpus, *group.gpus})))
        raise InputError(f"GPU {gpu} is listed for {model.name}, and the plan does not have it.", f"Say --gpu {listed}")
