"""Versions of a model: its numbered folders, and those that Triton loads by the version policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shoal.authoring.repository.config import ModelConfig
from shoal.errors import ArtifactError

LATEST = -1  # value of a step's model_version
NUMBER = r"0(?![0-9])|[1-9][0-9]{0,17}"  # core reads the leading digits of a name, without a leading zero


def sort_versions(names: Iterable[str]) -> tuple[int, ...]:
    """Return the versions among the names of a model's folders, ascending."""
    return tuple(sorted(int(name) for name in names if re.fullmatch(NUMBER, name)))


def find_versions(folder: Path) -> tuple[int, ...]:
    """Return the versions that have a folder in a model's folder, ascending."""
    return sort_versions(path.name for path in folder.iterdir() if path.is_dir())


def choose_served(message: Any, versions: Sequence[int]) -> tuple[int, ...]:
    """Return those of a model's versions that Triton loads by the version policy; by default the latest.

    ``message`` is the ModelConfig, or None if it is not known. ``versions`` are ascending, as is the result.
    """
    policy = message.version_policy if message is not None else None
    if policy is not None and policy.HasField("all"):
        return tuple(versions)
    if policy is not None and policy.HasField("specific"):
        return tuple(version for version in versions if version in policy.specific.versions)
    number = policy.latest.num_versions if policy is not None and policy.HasField("latest") else 1
    return tuple(versions[-number:] if number else ())


def list_made(config: ModelConfig, *, is_served: bool = False) -> list[Path]:
    """Return the version folders that a model folder gets in a repository: its own, or ``1/`` if it has none.

    ``is_served``: only those that Triton loads.
    """
    versions = find_versions(config.folder) or (1,)
    made = choose_served(config.message, versions) if is_served else versions
    return [config.folder / str(version) for version in made]


def find_version(config: ModelConfig, wanted: int = LATEST) -> Path:
    """Return the folder of the version that answers a request for the version ``wanted``, as in Triton.

    Raises:
        ArtifactError: the model has no such version, or its version policy leaves the version out.
    """
    versions = find_versions(config.folder)
    served = choose_served(config.message, versions)
    if wanted == LATEST and served:
        return config.folder / str(served[-1])
    if wanted in served:
        return config.folder / str(wanted)
    if not versions:
        raise ArtifactError(f"Model {config.name} has no version folder.", f"Make {config.folder}/1.")
    which = "no version" if wanted == LATEST else f"no version {wanted}"
    raise ArtifactError(
        f"Model {config.name} has {which} to load: it has the folders {list(versions)}, of which its version_policy"
        f" loads {list(served)}.",
        "Write model_version: -1 in the step for the latest, or change the version_policy."
        if served
        else "Change its version_policy.",
    )
