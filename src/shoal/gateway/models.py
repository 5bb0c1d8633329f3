"""Facts about a repository's models that the supervisor needs: callers, members, processes, time-outs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.errors import ArtifactError
from shoal.gateway.watch import HANG_PARAMETER
from shoal.repository.config import ModelConfig


def find_users(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each model to the ensembles that call it, directly or through another one."""
    users: dict[str, set[str]] = {name: set() for name in configs}
    for _ in configs:  # fixpoint: each pass propagates callers by at least one level of nesting
        for name, config in configs.items():
            for step in config.steps:
                users.setdefault(step.model, set()).update({name} | users[name])
    return users


def read_hang_seconds(configs: Mapping[str, ModelConfig]) -> dict[str, float]:
    """Read how long models may run a batch without using the processor, where their parameters set it.

    Raises:
        ArtifactError: a value is not a number.
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
            raise ArtifactError(f"{name}: {HANG_PARAMETER} {value!r} is not a number.", "Write seconds: 10.") from None
    return found


def find_members(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each ensemble to the models, not ensembles, that it calls, directly or through another one."""
    users = find_users(configs)
    return {
        name: {other for other in configs if name in users[other] and not configs[other].is_ensemble}
        for name, config in configs.items()
        if config.is_ensemble
    }


def count_processes(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Return the least number of processes of each Python model: one per instance, on one device."""
    return {
        name: config.spec.num_instances
        for name, config in configs.items()
        if config.backend == "python" or config.message.runtime.endswith(".py")
    }
