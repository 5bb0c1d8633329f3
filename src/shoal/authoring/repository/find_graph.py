"""Find shoal's own model folders, and the model that a path refers to."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.authoring.repository.call_graph import find_members
from shoal.authoring.repository.config import CONFIG, ModelConfig, read_config
from shoal.authoring.repository.default_model import find_top, list_tops
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.made import make_name, suggest_repository
from shoal.authoring.repository.manifest import read_composed
from shoal.authoring.repository.model_folders import CATEGORIES, list_configs, read_calls, read_configs
from shoal.errors import ArtifactError, InputError, suggest
from shoal.system.paths import shipped_root


def find_model_folders(roots: Iterable[Path | str] = ()) -> Mapping[str, ModelConfig]:
    """Find shoal's own model folders and those under ``roots``, by model name.

    If several folders have a model of the same name, the last of ``roots`` is used.
    """
    available = {}
    for root in [shipped_root(), *map(Path, roots)]:
        for category in CATEGORIES:
            for config in read_configs(root / category).values():
                available[config.name] = config
    return available


def find_graph(folder: Path, model: str = "") -> Graph:
    """Return the graph of the model in ``folder`` or, if ``folder`` is a repository, of its model called ``model``.

    Without ``model``, a repository's graph is that of its default model: the ensemble that it was composed for, else
    the only ensemble that no other ensemble calls, else the only model. If ``folder`` is a model folder of a project,
    the models that it calls are found in the project's other folders.

    Raises:
        InputError: the repository has several models to choose from, or no model of that name.
        ArtifactError: there is no model, or it does not fit the models that it calls.
    """
    folder = folder.resolve()
    if not folder.exists():
        if known := [path.parent.name for path in list_configs(folder.parent)]:
            raise InputError(f"There is no model {folder.name} in {folder.parent}.", suggest(folder.name, known))
        fix = suggest_repository(folder) or suggest_repository(folder.parent)
        raise ArtifactError(f"{folder} does not exist.", fix or "Name a model repository, or a model's folder.")
    if model:
        if not (folder / model / CONFIG).is_file():
            known = [path.parent.name for path in list_configs(folder)]
            raise InputError(f"There is no model {model} in {folder}.", suggest(model, known))
        return _load(folder / model)
    return _load(folder if (folder / CONFIG).is_file() else folder / _find_top(folder))


def _find_top(repository: Path) -> str:
    """Return the folder name of a repository's default model."""
    configs = read_configs(repository)
    if not configs:
        name = make_name(repository.stem)
        added, made = f"shoal add-model {shlex.quote(str(repository))} {name}", f"build/{name}/repository"
        fix = f"Name a repository, or the folder of a model in it. If it is a model, make the repository {made} of it:"
        raise ArtifactError(
            f"{repository} is neither a model's folder nor a repository: there is no {CONFIG} in it or in its folders.",
            suggest_repository(repository) or f"{fix} {added} && shoal compose {name} {made} --project .",
        )
    return find_top(read_calls(configs), str(repository), read_composed(repository))


def list_pipelines(repository: Path) -> list[ModelConfig]:
    """Return the models of a repository from which its default is chosen; none if it is a model's folder."""
    configs = {} if (repository / CONFIG).is_file() else read_configs(repository)
    return [configs[name] for name in list_tops(read_calls(configs), read_composed(repository))]


def _load(folder: Path) -> Graph:
    config = read_config(folder)
    if folder.parent.name not in CATEGORIES or not (config.steps or config.calls):
        return Graph.load(folder)
    beside = {member.name: member for member in read_configs(folder.parent).values()}
    return Graph.build(config, find_members(config, {**find_model_folders([folder.parent.parent]), **beside}.get))
