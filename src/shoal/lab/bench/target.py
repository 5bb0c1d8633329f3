"""Pipelines to measure, each in its repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.authoring.repository.describe import describe
from shoal.authoring.repository.find_graph import find_graph
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.made import suggest_repository
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.plan import HYBRID
from shoal.errors import ArtifactError, InputError

PLAN = ("placement", "dtype", "target")  # manifest fields in which repositories of one pipeline differ


@dataclass(frozen=True)
class BenchTarget:
    """A pipeline in a repository, with its label in tables."""

    label: str
    repository: Path
    graph: Graph
    plan: Mapping[str, str]  # placement, dtype, target; "-" where there is no manifest

    @property
    def name(self) -> str:
        """Name of the model that requests are sent to."""
        return self.graph.config.name

    @property
    def is_hybrid(self) -> bool:
        """Whether Python components run in the client."""
        return self.plan["placement"] == HYBRID

    def steps(self) -> dict[str, ModelConfig]:
        """Return the non-ensemble models of this pipeline and its nested ensembles, in the order of the steps."""
        configs = (read_config(path.parent) for path in self.repository.glob("*/config.pbtxt"))
        return _leaves(self.graph.config, {config.name: config for config in configs})

    def describe(self) -> dict[str, Any]:
        """Return the pipeline's label, plan and steps as JSON values for the record."""
        described = describe(self.graph)
        return {
            "label": self.label,
            "repository": self.repository.name,
            "model": self.name,
            **self.plan,
            "max_batch_size": described["max_batch_size"],
            "contents": read_manifest(self.repository).get("contents", {}),
            "steps": [
                {key: step[key] for key in ("name", "level", "backend", "device", "instances", "batching")}
                for step in described["steps"]
            ],
        }


def _leaves(config: ModelConfig, models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    if not config.is_ensemble:
        return {config.name: config}
    found: dict[str, ModelConfig] = {}
    for step in config.steps:
        found |= _leaves(models[step.model], models)
    return found


def find_targets(places: Sequence[Path], model: str = "") -> list[BenchTarget]:
    """Find the pipeline of each repository (or model folder) in ``places``; all pipelines must take the same inputs.

    A pipeline's label is the name of its repository's folder. If two names are the same, all labels are paths.

    Raises:
        InputError: the pipelines take different inputs, a repository is named twice, or has no model named ``model``.
        ArtifactError: a place is not a repository.
    """
    targets = [_find(place, model) for place in places]
    first = targets[0]
    for other in targets[1:]:
        if other.graph.config.spec.inputs != first.graph.config.spec.inputs:
            raise InputError(
                f"{other.name} in {other.repository} takes different inputs from {first.name} in {first.repository}.",
                "Compare repositories of the same pipeline, or name the pipeline: --model NAME",
            )
    if len({target.repository for target in targets}) < len(targets):
        raise InputError("A repository is named twice.", "Name each once.")
    if len({target.label for target in targets}) < len(targets):
        targets = [replace(target, label=str(target.repository)) for target in targets]
    return targets


def _find(place: Path, model: str) -> BenchTarget:
    if not place.is_dir():
        fix = "Make one: shoal compose ENSEMBLE REPOSITORY. A pipeline is measured from its repository, shoal bench"
        fix += " REPOSITORY, and a running language model without one: shoal bench --url HOST:PORT --model NAME"
        raise ArtifactError(f"There is no repository {place}.", suggest_repository(place) or fix)
    graph = find_graph(place, model)
    repository = graph.config.folder.parent
    manifest = read_manifest(repository)
    return BenchTarget(repository.name, repository, graph, {key: str(manifest.get(key, "-")) for key in PLAN})
