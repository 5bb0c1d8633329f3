"""Rules for what components read at their start, and for files changed since ``shoal compose``.

shoal's own components read their parameters and small files here by their own code, which is that of the installed
shoal's model folders, never a repository's: a model is such a component if its ``model.py`` has the same text. A
component that loads weights has a method ``read``, the part of its ``setup`` before that; of any other, all of its
``setup`` is run, on the host. What needs a library that is not installed here is not checked.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path

from shoal.authoring.check.config.fields import COMPONENT_CODE
from shoal.authoring.check.config.scheduling import find_on_gpu
from shoal.authoring.check.findings import Finding, Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, entries
from shoal.authoring.repository.config import CONFIG
from shoal.authoring.repository.loading import component_class
from shoal.authoring.repository.manifest import MANIFEST, find_change
from shoal.authoring.repository.model_code import is_component
from shoal.authoring.repository.model_folders import CATEGORIES
from shoal.authoring.repository.parameters import TABLE, TYPED, WHOLE, read_alone
from shoal.errors import ArtifactError, SetupError, ShoalError
from shoal.kit.component.context import Context
from shoal.kit.component.spec import ModelSpec
from shoal.system.files import MAX_LARGE_TEXT, parse_json, read_bytes
from shoal.system.paths import shipped_root

MISSING = Rule("artifact-missing", Severity.ERROR)
UNREADABLE = Rule("artifact-unreadable", Severity.ERROR)
CHANGED = Rule("file-changed", Severity.ERROR)
UNUSABLE = Rule("parameter-unusable", Severity.ERROR)
REFUSED = Rule("component-refused", Severity.ERROR)
WEIGHTS = Rule("weights-missing", Severity.WARNING)

PARAMETER = "artifacts"
APPLICATIONS = "shoal.artifacts"  # entry points that read an application's artifacts; see composition/artifacts.py
_NAME = re.compile(r"\bparameter (\w+)|^(\w+) (?:has|is|of)\b", re.IGNORECASE)  # of a parameter, in an error
_LINE = re.compile(r"\b(?:line|number) ([\d,]+)")
_SIZE = re.compile(r"declares dims: \[ (\d+) \]")


def find(model: Model, repository: Repository) -> Findings:
    """Find what components refuse at their start, and files of a model that changed since ``shoal compose``."""
    has_artifacts = PARAMETER in model.parameters and _is_component(model, repository)
    unusable = {finding.place: finding for finding in _unusable(model)}
    yield from unusable.values()
    codes = {path.parent: _shipped().get(text) for path, text in model.sources}
    for folder in (model.folder / str(version) for version in model.served_versions):
        code = codes.get(folder)
        found = [*_artifacts(model, folder, is_read=code is not None)] if has_artifacts else []
        yield from found
        if code and model.config and not any(each.rule in (MISSING, UNREADABLE) for each in found):
            yield from (each for each in _refusals(model, code, folder) if each.place not in unusable)
    yield from _changes(model, repository)


def _is_component(model: Model, repository: Repository) -> bool:
    """Whether the model is a shoal component in a repository; there, the parameter ``artifacts`` lists its files."""
    is_ours = bool(repository.manifest) or any("shoal" in text for _, text in model.sources)
    return is_ours and model.is_python and not model.is_model_folder


def _artifacts(model: Model, folder: Path, *, is_read: bool) -> Findings:
    """Find missing artifacts; and damaged ones, unless the component itself reads them later (``is_read``)."""
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
    files = () if is_read else found.values()
    damaged = [finding for path in files if path.suffix == ".json" for finding in _json(path)]
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


def _unusable(model: Model) -> Findings:
    """Find values of parameters that are read of every model, of every component, or as numbers by a backend."""
    if (config := model.config) is None:
        return
    readers = {name: partial(getattr, config, attribute) for name, attribute in TYPED.items()}
    if model.is_python and any(COMPONENT_CODE.search(text) for _, text in model.sources):
        readers["threads"] = partial(getattr, config, "threads")
    for name in (row.name for row in TABLE if (row.scope, row.kind) == (model.backend, WHOLE)):
        readers[name] = partial(read_alone(config.spec, name).whole, name, 0, least=0)
    for name, read in readers.items():
        try:
            read()
        except ArtifactError as error:
            place = model.at_entry("parameters", key=name, within=("value", "string_value"))
            yield UNUSABLE.at(place, error.what, error.fix)


@cache
def _shipped() -> dict[str, Path]:
    """Return the paths of shoal's own components, by the text of their code."""
    paths = (path for each in CATEGORIES for path in sorted((shipped_root() / each).glob("*/1/model.py")))
    return {text: path for path in paths if is_component(text := path.read_text(encoding="utf-8"))}


def _refusals(model: Model, code: Path, folder: Path) -> Findings:
    """Find what a component of shoal refuses; it reads again without a parameter that it refused."""
    assert model.config is not None
    spec, refused = model.config.spec, set[str]()
    while error := _read(code, spec, folder):
        names = [name for found in _NAME.findall(error.what) for name in found if name]
        name = names[0] if names else ""
        is_given = bool(spec.parameters.get(name))
        if name in refused or (model.is_model_folder and not is_given):  # compose adds what a model folder lacks
            return
        yield _explain(model, spec, folder, name, error)
        if not is_given:
            return
        refused.add(name)
        spec = replace(spec, parameters={**spec.parameters, name: ""})


def _read(code: Path, spec: ModelSpec, folder: Path) -> ShoalError | None:
    """Let a component read its parameters and small files, and return its error."""
    try:
        kind = component_class(code)
    except ShoalError:  # a library is not installed
        return None
    component, context = kind.__new__(kind), Context(spec, folder)
    component.context = context
    try:
        if read := getattr(component, "read", None):
            read(context)
        else:
            component.setup(context)
            component.close()
    except (SetupError, ImportError):
        return None
    except ShoalError as error:
        return error
    except OSError as error:
        return ArtifactError(f"{error.filename} cannot be read: {error.strerror}.", "Let the server's user read it.")
    return None


def _explain(model: Model, spec: ModelSpec, folder: Path, name: str, error: ShoalError) -> Finding:
    """Return the finding for a component's error, at the parameter or the file that it names."""
    weights = Path(spec.parameters.get("model") or folder)
    if name in spec.parameters:
        is_elsewhere = name == "model" and weights.is_absolute() and not weights.is_dir()
        place = model.at_entry("parameters", key=name, within=("value", "string_value"))
        return (WEIGHTS if is_elsewhere else UNUSABLE).at(place, error.what, error.fix)
    paths = [path for place in (folder, weights) for path in (place, *entries(place)) if str(path) in error.what]
    if paths:
        path = max(paths, key=lambda path: len(str(path)))
        line = _LINE.search(error.what.replace(str(path), ""))
        return UNREADABLE.at(Place(path, int(line[1].replace(",", "")) if line else 0), error.what, error.fix)
    sizes = [int(size) for size in _SIZE.findall(error.what)]
    tensors = [("input", model.inputs), ("output", model.outputs)]
    wrong = [(kind, index, "dims") for kind, each in tensors for index, t in enumerate(each) if {*sizes} & {*t.dims}]
    return REFUSED.at(model.at(*(wrong[0] if wrong else ("parameters" if name else "input",))), error.what, error.fix)


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
