"""Read the configurations of a repository's models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.authoring.repository.config import CONFIG, ModelConfig, check_number, read_config
from shoal.authoring.repository.manifest import MANIFEST
from shoal.errors import InputError

CATEGORIES = ("preprocess", "postprocess", "models", "ensembles")
_MOST_NAMED = 20  # repositories in a message


def read_configs(repository: Path) -> dict[str, ModelConfig]:
    """Read the configuration of every model in a repository, by folder name.

    Raises:
        ArtifactError: a configuration cannot be read.
    """
    return {path.parent.name: read_config(path.parent) for path in list_configs(repository)}


def find_repository(path: Path) -> Path | None:
    """Return ``path`` if it holds model folders, or the only composed repository in it; None if there is none.

    Raises:
        InputError: there are several.
    """
    if (path / CONFIG).is_file() or any(path.glob(f"*/{CONFIG}")):
        return path
    manifests = (each for depth in ("*", "*/*", "*/*/*") for each in path.glob(f"{depth}/{MANIFEST}"))
    found = sorted(each.parent for each in manifests if any(each.parent.glob(f"*/{CONFIG}")))
    found = [each for each in found if not any(part.startswith(".") for part in each.relative_to(path).parts)]
    if len(found) > 1:
        names = ", ".join(map(str, found[:_MOST_NAMED])) + (", ..." if found[_MOST_NAMED:] else "")
        raise InputError(f"{path} holds {len(found)} repositories.", f"Name one: {names}")
    return found[0] if found else None


def list_configs(folder: Path) -> list[Path]:
    """Return the configuration files of the models in a folder."""
    found = sorted(folder.glob(f"*/{CONFIG}"))
    check_number(folder, len(found))
    return found


def read_calls(configs: Mapping[str, ModelConfig]) -> dict[str, list[str] | None]:
    """Return the models of each ensemble's steps, by the ensemble's name; None for a model that is not an ensemble."""
    return {name: [s.model for s in config.steps] if config.is_ensemble else None for name, config in configs.items()}
