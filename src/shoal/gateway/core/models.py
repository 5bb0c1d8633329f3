"""Facts about a repository's models: which models they call, time-outs, processes, and which ones clients may call."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from shoal.default_model import find_top
from shoal.errors import ArtifactError, InputError
from shoal.gateway.control.process_monitor import HANG_PARAMETER
from shoal.repository.config import ModelConfig
from shoal.repository.model_folders import read_calls

PUBLIC_PARAMETER = "public"  # of a model that clients may call, besides the ensembles
SLOTS_PARAMETER = "slots"  # of an engine's configuration: how many streams it runs at once
STREAM_SECONDS = 60.0  # that a model which answers in pieces may wait, without processor time


def find_below(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each model to the models that it calls, directly or through another model."""
    below = {name: {*(step.model for step in config.steps), *config.calls} for name, config in configs.items()}
    for _ in configs:  # each pass adds at least one level of nesting
        for called in below.values():
            called.update(*(below.get(name, ()) for name in list(called)))
    return below


def find_users(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each model to the ensembles and models that call it, directly or through another model."""
    below = find_below(configs)
    return {name: {user for user in configs if name in below[user]} for name in configs}


def read_hang_seconds(configs: Mapping[str, ModelConfig]) -> dict[str, float]:
    """Return, for some models, how many seconds the model may run a batch without using the processor.

    The parameter ``hang_seconds`` gives the number; without it, a decoupled model has 60 s. Other models are left out.

    Raises:
        ArtifactError: a parameter ``hang_seconds`` is not a number.
    """
    given: Iterable[tuple[str, str]] = (
        (name, config.spec.parameters[HANG_PARAMETER])
        for name, config in configs.items()
        if HANG_PARAMETER in config.spec.parameters
    )
    found = {name: STREAM_SECONDS for name, config in configs.items() if config.spec.is_decoupled}
    for name, value in given:
        try:
            found[name] = float(value)
        except ValueError:
            raise ArtifactError(f"{name}: {HANG_PARAMETER} {value!r} is not a number.", "Write seconds: 10.") from None
    return found


def find_slots(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Return, by model, how many requests the model computes at once.

    This is the lowest parameter ``slots`` of the model and of the models that it calls. Models without it are left out.

    Raises:
        ArtifactError: a parameter ``slots`` is not a whole number of 1 or more.
    """
    found: dict[str, int] = {}
    for name, config in configs.items():
        value = config.spec.parameters.get(SLOTS_PARAMETER)
        if value is not None:
            if not value.isdecimal() or int(value) < 1:
                raise ArtifactError(f"{name}: {SLOTS_PARAMETER} {value!r} is not a whole number from 1.", "Write 16.")
            found[name] = int(value)
    below = find_below(configs)
    slots = {name: [found[each] for each in (name, *below[name]) if each in found] for name in configs}
    return {name: min(each) for name, each in slots.items() if each}


def find_members(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each ensemble to the models, but not ensembles, that it calls directly or through another model."""
    below = find_below(configs)
    return {
        name: {other for other in below[name] if other in configs and not configs[other].is_ensemble}
        for name, config in configs.items()
        if config.is_ensemble
    }


def count_processes(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Return the least number of processes of each model that runs in Python: one per instance.

    Triton may start more, because an instance group for GPUs that does not list them is counted for one GPU.
    """
    return {
        name: config.spec.num_instances
        for name, config in configs.items()
        if config.backend == "python" or config.message.runtime.endswith(".py")
    }


def find_exposed(configs: Mapping[str, ModelConfig], names: Iterable[str]) -> set[str]:
    """Return the models that clients may call: ensembles, models with the parameter ``public``, and those in ``names``.

    If there are none, return all models.

    Raises:
        ArtifactError: a parameter ``public`` is neither true nor false.
    """
    found = set(names) & configs.keys()
    for name, config in configs.items():
        value = config.spec.parameters.get(PUBLIC_PARAMETER, "false")
        if value not in ("true", "false"):
            raise ArtifactError(f"{name}: {PUBLIC_PARAMETER} {value!r} is neither true nor false.", "Write true.")
        if config.is_ensemble or value == "true":
            found.add(name)
    return found or set(configs)


def find_default(configs: Mapping[str, ModelConfig], exposed: Container[str], composed_for: Sequence[str]) -> str:
    """Return the model that clients get if they name no model; empty if several models are possible.

    ``composed_for`` are the models for which the repository was composed.
    """
    try:
        return find_top(read_calls({n: c for n, c in configs.items() if n in exposed}), "The server", composed_for)
    except InputError:
        return ""
