"""Read the configurations of a repository's models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.authoring.repository.config import CONFIG, ModelConfig, check_number, read_config

CATEGORIES = ("preprocess", "postprocess", "models", "ensembles")


def read_configs(repository: Path) -> dict[str, ModelConfig]:
    """Read the configuration of every model in a repository, by folder name.

    Raises:
        ArtifactError: a configuration cannot be read.
    """
    return {path.parent.name: read_config(path.parent) for path in list_configs(repository)}


def list_configs(folder: Path) -> list[Path]:
    """Return the configuration files of the models in a folder."""
    found = sorted(folder.glob(f"*/{CONFIG}"))
    check_number(folder, len(found))
    return found


def read_calls(configs: Mapping[str, ModelConfig]) -> dict[str, list[str] | None]:
    """Return the models of each ensemble's steps, by the ensemble's name; None for a model that is not an ensemble."""
    return {name: [s.model for s in config.steps] if config.is_ensemble else None for name, config in configs.items()}
