"""What a supervisor must know of the models in a repository."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.errors import ArtifactError
from shoal.gateway.watch import HANG_PARAMETER
from shoal.repository.config import ModelConfig


def find_users(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Of each model the ensembles that ask it, directly or through another one."""
    users: dict[str, set[str]] = {name: set() for name in configs}
    for _ in configs:  # as deep as they may be nested
        for name, config in configs.items():
            for step in config.steps:
                users.setdefault(step.model, set()).update({name} | users[name])
    return users


def read_hang_seconds(configs: Mapping[str, ModelConfig]) -> dict[str, float]:
    """How long the models that say so may be at work without the processor's time.

    Raises:
        ArtifactError: one does not give a number.
    """
    given: Iterable[tuple[str, str]] = (
        (name, config.spec.parameters[HANG_PARAMETER])
        for name, config in configs.items()
        if HANG_PARAMETER in config.spec.parameters
    )
    found = {}
    for name, value in given:
        try:
            found[name] = float(value)
        except ValueError:
            raise ArtifactError(f"{name}: {HANG_PARAMETER} {value!r} is no number.", "Write seconds: 10.") from None
    return found


def find_members(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Of each ensemble the models that it asks in the end."""
    users = find_users(configs)
    return {
        name: {other for other in configs if name in users[other] and not configs[other].is_ensemble}
        for name, config in configs.items()
        if config.is_ensemble
    }


def count_processes(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Of each model that runs in Python how many processes it has at least: one for each instance, on one device."""
    return {
        name: config.spec.num_instances
        for name, config in configs.items()
        if config.backend == "python" or config.message.runtime.endswith(".py")
    }
