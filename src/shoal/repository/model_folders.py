"""Model folders: the models that shoal ships, and a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import ArtifactError
from shoal.paths import shipped_root
from shoal.repository.config import ModelConfig, read_config

CATEGORIES = ("preprocess", "postprocess", "models", "ensembles")


def find_model_folders(roots: Iterable[Path | str] = ()) -> Mapping[str, ModelConfig]:
    """Find every model folder, by its model's name: shoal's own and those under ``roots``, which win."""
    available = {}
    for root in [shipped_root(), *map(Path, roots)]:
        for category in CATEGORIES:
            for path in sorted(root.glob(f"{category}/*/config.pbtxt")):
                config = read_config(path.parent)
                available[config.name] = config
    return available


def collect(name: str, available: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """Return the model folder called ``name`` and all that its steps call, members before ensembles.

    Raises:
        ArtifactError: there is no such model, or an ensemble calls itself.
    """
    found: dict[str, ModelConfig] = {}

    def visit(wanted: str, callers: tuple[str, ...] = ()) -> None:
        if wanted in callers:  # the rule and the error text of Triton's core
            circle = " -> ".join([*callers, wanted])
            raise ArtifactError(f"circular dependency between ensembles: {circle}.", "Take one step out.")
        if wanted not in available:
            raise ArtifactError(f"There is no model {wanted}.", f"Known: {', '.join(sorted(available))}.")
        for step in available[wanted].steps:
            if step.model not in found:
                visit(step.model, (*callers, wanted))
        found[wanted] = available[wanted]

    visit(name)
    return list(found.values())
