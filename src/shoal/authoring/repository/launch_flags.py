"""Flags of tritonserver that a repository needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ArtifactError

if TYPE_CHECKING:
    from shoal.authoring.repository.config import ModelConfig

CACHE_MIB = 64.0  # of the response cache


def find_scheduling_flags(models: Iterable[ModelConfig], cache_mib: float = CACHE_MIB) -> list[str]:
    """Return the tritonserver flags without which the models' ``response_cache`` and ``rate_limiter`` have no effect.

    ``cache_mib`` is the size of the cache, which all models share, in MiB.
    """
    messages = [model.message for model in models]
    has_limit = any(group.HasField("rate_limiter") for message in messages for group in message.instance_group)
    cache = [f"--cache-config=local,size={int(cache_mib * 2**20)}"]
    return [
        *(cache if any(message.response_cache.enable for message in messages) else ()),
        *(["--rate-limit=execution_count"] if has_limit else ()),
    ]


def find_launch_flags(repository: Path, cache_mib: float = CACHE_MIB) -> list[str]:
    """Return the tritonserver flags for a repository: those of its manifest, and those that its configurations need."""
    from shoal.authoring.repository.manifest import launch_flags
    from shoal.authoring.repository.model_folders import read_configs

    needed = []
    with suppress(ArtifactError):  # of a configuration, which Triton refuses
        needed = find_scheduling_flags(read_configs(repository).values(), cache_mib)
    names = {flag.partition("=")[0] for flag in needed}
    return [*(flag for flag in launch_flags(repository) if flag.partition("=")[0] not in names), *needed]
