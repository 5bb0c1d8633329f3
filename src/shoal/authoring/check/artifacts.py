"""Rules for a component's artifacts (data files beside its code), and for files changed since ``shoal compose``."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

from shoal.authoring.check.config.scheduling import find_on_gpu
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.repository.config import CONFIG
from shoal.authoring.repository.manifest import MANIFEST, find_change
from shoal.errors import ShoalError
from shoal.system.files import MAX_LARGE_TEXT, parse_json, read_bytes

MISSING = Rule("artifact-missing", Severity.ERROR)
UNREADABLE = Rule("artifact-unreadable", Severity.ERROR)
CHANGED = Rule("file-changed", Severity.ERROR)

PARAMETER = "artifacts"
APPLICATIONS = "shoal.artifacts"  # entry points that read an application's artifacts; see composition/artifacts.py


def find(model: Model, repository: Repository) -> Findings:
    """Find missing or damaged artifacts of a component, and files of a model that changed since ``shoal compose``."""
    if PARAMETER in model.parameters and _is_component(model, repository):
        for version in model.served_versions:
            yield from _artifacts(model, model.folder / str(version))
    yield from _changes(model, repository)


def _is_component(model: Model, repository: Repository) -> bool:
    """Whether the model is a shoal component in a repository; there, the parameter ``artifacts`` lists its files."""
    is_ours = bool(repository.manifest) or any("shoal" in text for _, text in model.sources)
    return is_ours and model.is_python and not model.is_model_folder


def _artifacts(model: Model, folder: Path) -> Findings:
    found: dict[str, Path] = {}
    for artifact in model.config.artifacts if model.config else ():
        paths = artifact.find([folder])
        found |= {path.name: path for path in paths}
        if artifact.is_required and not paths:
            where = f"{model.name}/{folder.name}"
            yield MISSING.at(
                model.at_entry("parameters", key=PARAMETER),
                f"{where}/ does not contain {artifact}, which the parameter {PARAMETER} lists.",
                f"Put it into {where}/, or compose again; {artifact.names[0]}? in {PARAMETER} makes it optional.",
            )
    damaged = [finding for path in found.values() if path.suffix == ".json" for finding in _json(path)]
    yield from damaged
    if not damaged:
        yield from _contents(model, found)


def _json(path: Path) -> Findings:
    try:
        parse_json(read_bytes(path, MAX_LARGE_TEXT), parse_constant=_refuse)
    except (ValueError, OSError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 0
        yield UNREADABLE.at(Place(path, line), f"It is not JSON: {error}.", "Make it again, or copy the whole file.")


def _refuse(name: str) -> None:
    raise ValueError(f"it holds {name}, which is not a JSON number")


def _contents(model: Model, found: dict[str, Path]) -> Findings:
    """Check artifacts with the readers (entry points ``shoal.artifacts``) of packages that the model's code names."""
    for application in entry_points(group=APPLICATIONS):
        package = application.module.rpartition(".")[0]
        if not any(package in text for _, text in model.sources):
            continue
        try:
            if why := application.load()(found):
                yield from find_on_gpu(model, why)
        except ShoalError as error:
            # An unreadable encoder is reported by the rules for TorchScript.
            named = [path for path in found.values() if str(path) in error.what]
            if named:
                yield UNREADABLE.at(Place(named[0]), error.what, error.fix)


def _changes(model: Model, repository: Repository) -> Findings:
    """Compare the model's files with the hashes in the manifest, except ``config.pbtxt``, which users may edit."""
    files = repository.manifest.get("files")
    artifacts = {name for artifact in (model.config.artifacts if model.config else ()) for name in artifact.names}
    for name, digest in files.items() if isinstance(files, dict) else ():
        path = model.folder.parent / str(name)
        if not str(name).startswith(f"{model.folder.name}/") or path.name == CONFIG:
            continue
        try:
            change = find_change(path, digest)
        except OSError:  # a file of another user
            continue
        if change and (path.exists() or path.name not in artifacts):  # else artifact-missing reports it
            yield CHANGED.at(
                Place(path),
                f"{name} {change}: shoal serve refuses the repository.",
                f"Compose again; if the change is yours, remove {MANIFEST}.",
            )
