"""Reader of repositories, single models, and the model folders of a project; malformed models never raise."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.authoring.check.models import Model, Repository, entries
from shoal.authoring.environment.targets import Target, find_target
from shoal.authoring.repository.config import CONFIG, MAX_CONFIG, check_number, find_backslashes, find_excess
from shoal.authoring.repository.made import suggest_repository
from shoal.authoring.repository.manifest import MANIFEST, read_manifest
from shoal.authoring.repository.model_folders import CATEGORIES
from shoal.errors import ArtifactError, InputError
from shoal.system.files import read_bytes
from shoal.system.paths import shipped_root


def read_repository(path: Path, target: Target | None = None) -> Repository:
    """Read a repository, one model's folder, a project, or a project's category such as ``models/``.

    Raises:
        InputError: ``path`` is none of these.
        ArtifactError: it holds more models than are read.
    """
    if not path.is_dir():
        fix = suggest_repository(path) or "Name a model repository, or a model's folder."
        if path.name == CONFIG:
            fix = f"Name its folder: {path.parent}"
        elif path.is_file():
            fix += f" A model's file is checked by: shoal add-model {path} NAME --dry-run"
        raise InputError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}.", fix)
    path = path.resolve()
    if (path / CONFIG).exists() or _has_versions(path):
        return _read_one(path, target)
    root = path.parent if _is_category(path) else path
    categories = [root / category for category in CATEGORIES if _is_category(root / category)]
    if not categories and not _model_folders(path):  # a project whose only category is models
        categories = [category for category in (path / "models",) if _model_folders(category)]
    if categories:
        available = [read_model(p, is_model_folder=True) for category in categories for p in _model_folders(category)]
        asked = [each for each in available if path == root or each.folder.parent == path]
        return Repository(path, tuple(asked), _by_name([*_shipped(), *available]), target)
    folders = [folder for folder in entries(path) if folder.is_dir()]
    check_number(path, len(folders))
    models = [read_model(folder) for folder in folders]
    if not any(model.text or model.versions or model.path.exists() for model in models):
        raise InputError(
            f"{path} holds no model: no folder in it has a {CONFIG} or a version folder.",
            "Name a model repository, or a model's folder.",
        )
    manifest = _manifest(path)
    return Repository(path, tuple(models), _by_name(models), target or _target(manifest), manifest)


def _read_one(path: Path, target: Target | None) -> Repository:
    """Read one model to report on, and the models that it may call."""
    is_model_folder = _is_category(path.parent)
    model = read_model(path, is_model_folder=is_model_folder)
    root = path.parent.parent if is_model_folder else path.parent
    places = [root / category for category in CATEGORIES] if is_model_folder else [root]
    folders = [folder for place in places for folder in _model_folders(place)]
    beside = [read_model(folder, is_model_folder=is_model_folder) for folder in folders if folder != path]
    manifest = {} if is_model_folder else _manifest(root)
    known = [*(_shipped() if is_model_folder else ()), *beside, model]
    return Repository(root, (model,), _by_name(known), target or _target(manifest), manifest)


def _shipped() -> list[Model]:
    """Read shoal's own model folders, which a project's ensembles may call."""
    return [
        read_model(p, is_model_folder=True)
        for category in CATEGORIES
        for p in _model_folders(shipped_root() / category)
    ]


def _is_category(folder: Path) -> bool:
    """Whether the folder is a project's category, such as ``models``, and not a repository of that name."""
    if folder.name not in CATEGORIES or (folder / MANIFEST).exists() or not _model_folders(folder):
        return False
    others = (folder.parent / category for category in CATEGORIES if category != folder.name)
    return folder.name != "models" or any(_model_folders(other) for other in others)


def _manifest(root: Path) -> Mapping[str, Any]:
    """Read the manifest that ``shoal compose`` wrote; empty if there is none, or if another program wrote the file."""
    try:
        manifest = read_manifest(root)
    except (ArtifactError, OSError):
        return {}
    return manifest if isinstance(manifest.get("launch"), dict) and "shoal" in manifest else {}


def _target(manifest: Mapping[str, Any]) -> Target | None:
    try:
        return find_target(manifest["target"])
    except (InputError, KeyError, TypeError):
        return None


def read_model(folder: Path, *, is_model_folder: bool = False) -> Model:
    """Read one model's folder; ``is_model_folder`` marks a source for ``shoal compose``."""
    path = folder / CONFIG
    try:
        content = read_bytes(path, MAX_CONFIG)
    except FileNotFoundError:
        return Model(folder, is_model_folder=is_model_folder)
    except OSError as error:
        return Model(folder, is_model_folder=is_model_folder, unreadable=error.strerror or str(error))
    return parse_model(folder, content, is_model_folder=is_model_folder)


def parse_model(folder: Path, content: bytes, *, is_model_folder: bool = False) -> Model:
    """Parse the ``content`` of a model's configuration, whether or not the folder has it; it may be malformed."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text, broken_line = content.decode("utf-8", "replace"), _broken_line(content)
    if excess := find_backslashes(text):
        return Model(folder, is_model_folder=is_model_folder, unreadable=excess)
    message, problem = None, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # invalid escapes: a rule reports them
            message = text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        problem = _explain(error)
    if message is not None and (excess := find_excess(message)):
        return Model(folder, is_model_folder=is_model_folder, unreadable=excess)
    return Model(folder, text, message, is_model_folder, problem=problem, broken_line=broken_line)


def _broken_line(content: bytes) -> int:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 0


def _explain(error: Exception) -> tuple[str, int]:
    """Return text and line of protobuf's message ``LINE:COLUMN : text``; line 0 if the message has another form."""
    found = re.match(r"(\d+):(\d+) : (.*)", str(error), re.DOTALL)
    if found:
        # The message begins with the line itself, between quotes.
        return re.sub(r"^'.*?': ", "", found[3], flags=re.DOTALL).rstrip("."), int(found[1])
    return (str(error).rstrip(".") or type(error).__name__), 0


def _has_versions(folder: Path) -> bool:
    """Whether ``folder`` is one model's folder, that is, contains a numbered folder that is not itself a model."""
    return any(p.is_dir() and p.name.isdecimal() and not (p / CONFIG).exists() for p in entries(folder))


def _model_folders(root: Path) -> list[Path]:
    found = [p for p in entries(root) if p.is_dir() and (p / CONFIG).exists()]
    check_number(root, len(found))
    return found


def _by_name(models: list[Model]) -> dict[str, Model]:
    return {model.name: model for model in models}
