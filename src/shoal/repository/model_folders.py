"""Model folders: the models that shoal ships, and a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import ArtifactError, suggest
from shoal.paths import shipped_root
from shoal.repository.config import ModelConfig, read_config

CATEGORIES = ("preprocess", "postprocess", "models", "ensembles")


def find_model_folders(roots: Iterable[Path | str] = ()) -> Mapping[str, ModelConfig]:
    """Find shoal's own model folders and those under ``roots``, by model name; ``roots`` take precedence."""
    available = {}
    for root in [shipped_root(), *map(Path, roots)]:
        for category in CATEGORIES:
            for path in sorted(root.glob(f"{category}/*/config.pbtxt")):
                config = read_config(path.parent)
                available[config.name] = config
    return available


def collect(name: str, available: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """Return the model folder called ``name`` and all that its steps and its code call, members before ensembles.

    Raises:
        ArtifactError: there is no such model, or a model calls itself, directly or through others.
    """
    found: dict[str, ModelConfig] = {}

    def visit(wanted: str, callers: tuple[str, ...] = ()) -> None:
        if wanted in callers:
            circle = callers[callers.index(wanted) :]
            shown = " -> ".join([*circle, wanted])
            if all(available[caller].is_ensemble for caller in circle):  # the rule and the error text of Triton's core
                raise ArtifactError(f"circular dependency between ensembles: {shown}.", "Take one step out.")
            raise ArtifactError(
                f"Models call one another in a circle: {shown}. With every instance busy, none would answer.",
                "Take one of them out of the parameter `calls`, or out of the steps.",
            )
        if wanted not in available:
            caller = f", which {callers[-1]} calls" if callers else ""
            raise ArtifactError(f"There is no model {wanted}{caller}.", suggest(wanted, sorted(available)))
        config = available[wanted]
        for called in (*(step.model for step in config.steps), *config.calls):
            if called not in found:
                visit(called, (*callers, wanted))
        found[wanted] = available[wanted]

    visit(name)
    return list(found.values())
