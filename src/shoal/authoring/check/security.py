"""Rules for unsafe names and symbolic links in a repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.system.paths import SAFE, find_unsafe

NAME = Rule("unsafe-name", Severity.ERROR, is_core=True)
LINK = Rule("symlink-leaves-repository", Severity.WARNING)
DANGLING = Rule("dangling-link", Severity.ERROR)

MAX_FILES = 20_000  # per model folder; more are a data set or an environment
_LOCK = ".#"  # prefix of Emacs's lock files, which are dangling links


def find(model: Model, repository: Repository) -> Findings:
    """Find names that are unsafe in a shell, and links that leave the repository or lead to nothing."""
    runs_python = model.is_python or (model.message is not None and model.message.runtime == "model.py")
    if runs_python:
        yield from _check_names(model)
    is_container = repository.target is None or not repository.target.is_embedded
    for path, target in _links(model.folder):
        if not path.name.startswith(_LOCK):
            yield from _check_link(path, target, repository.root, is_container=is_container)


def _check_names(model: Model) -> Findings:
    message = model.message
    named = [(Place(model.folder), "The name of this folder", model.folder.name)]
    if message is not None:
        for index, group in enumerate(message.instance_group):
            named.append((model.at("instance_group", index, "name"), "This instance group's name", group.name))
        key = "EXECUTION_ENV_PATH"
        value = model.parameters.get(key, "").removeprefix("$$TRITON_MODEL_DIRECTORY")
        named.append((model.at_entry("parameters", key=key), f"The path in {key}", value))
    for place, what, value in named:
        if odd := find_unsafe(value):
            yield NAME.at(place, f"{what}, {value!r}, contains {', '.join(map(repr, odd))}.", f"Use only {SAFE}.")


def _links(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the links in a model's folder, and their targets.

    Unreadable folders are skipped, and environments, which consist of links.
    """
    count = 0
    for place, folders, files in os.walk(folder):
        names = sorted((*folders, *files))
        if {"pyvenv.cfg", "conda-meta"} & set(names):
            folders.clear()
            continue
        count += len(names)
        if count > MAX_FILES:
            return
        for path in (Path(place, name) for name in names):
            with suppress(OSError):  # a folder of another user
                if path.is_symlink():
                    yield path, path.readlink()


def _check_link(path: Path, target: Path, root: Path, *, is_container: bool) -> Findings:
    is_inside = Path(os.path.realpath(path)).is_relative_to(root.resolve())
    try:
        is_missing = not path.exists()
    except PermissionError:  # the file exists and belongs to another user
        is_missing = False
    except OSError:  # a name that is too long
        return
    # An absolute path may exist in the container.
    if is_missing and not (is_container and not is_inside and target.is_absolute()):
        yield DANGLING.at(Place(path), f"It leads to {target}, which does not exist.", "Put the file itself there.")
    elif not is_inside:
        yield LINK.at(
            Place(path), f"It leads to {target}, outside of {root}.", "Put the file itself there, or move it inside."
        )
