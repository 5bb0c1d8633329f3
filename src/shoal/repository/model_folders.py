"""Leaf folders: the models that shoal ships, and a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import ArtifactError
from shoal.paths import shipped_root
from shoal.repository.config import ModelConfig, read_config

CATEGORIES = ("preprocess", "postprocess", "models", "ensembles")


def find_model_folders(roots: Iterable[Path | str] = ()) -> Mapping[str, ModelConfig]:
    """Every leaf by its model's name: shoal's own and those under ``roots``, which win."""
    leaves = {}
    for root in [shipped_root(), *map(Path, roots)]:
        for room in CATEGORIES:
            for path in sorted(root.glob(f"{room}/*/config.pbtxt")):
                config = read_config(path.parent)
                leaves[config.name] = config
    return leaves


def collect(name: str, leaves: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """The leaf called ``name`` and all that its steps call, members before ensembles.

    Raises:
        ArtifactError: there is no such leaf, or an ensemble calls itself.
    """
    found: dict[str, ModelConfig] = {}

    def visit(wanted: str, callers: tuple[str, ...] = ()) -> None:
        if wanted in callers:  # core's own rule, in core's words
            circle = " -> ".join([*callers, wanted])
            raise ArtifactError(f"circular dependency between ensembles: {circle}.", "Take one step out.")
        if wanted not in leaves:
            raise ArtifactError(f"There is no model {wanted}.", f"Known: {', '.join(sorted(leaves))}.")
        for step in leaves[wanted].steps:
            if step.model not in found:
                visit(step.model, (*callers, wanted))
        found[wanted] = leaves[wanted]

    visit(name)
    return list(found.values())
