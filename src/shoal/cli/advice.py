"""Command lines in advice, with the words of the thing that is served in place of words in capitals."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.authoring.project.recipes import RECORD, find_recipe
from shoal.authoring.repository.manifest import read_composed
from shoal.authoring.repository.model_folders import find_repository
from shoal.errors import ShoalError
from shoal.system.files import read_json

_PROJECT = "--project"
_END = ", and serve that"


def fill(fix: str, words: Sequence[str]) -> str:
    """Return ``fix`` for the thing that the command line ``words`` serves; as it is, if that is not known."""
    given = dict(pairwise(words))
    names = [word for word in words if not word.startswith("-") and (Path(word).exists() or word.count("/") == 1)]
    thing = names[0] if names else ""
    try:
        compose, model, first = _find_commands(thing, given)
    except (ShoalError, OSError, ValueError, LookupError):
        return fix
    value = next((given[option] for option in ("--instances", "--workers") if given.get(option, "").isdigit()), "COUNT")
    project = compose[compose.index(_PROJECT) + 1] if _PROJECT in compose else "FOLDER"
    own = fix
    for word, instead in (
        ("shoal compose ENSEMBLE REPOSITORY", f"shoal {shlex.join(compose)}"),
        ("MODEL=COUNT", f"{model}={value}"),
        ("MODEL=MICROSECONDS", f"{model}=MICROSECONDS"),
        ("--step MODEL", f"--step {model}"),
        ("--project FOLDER", f"--project {shlex.quote(project)}"),
        (_END, f"; then again: shoal serve {shlex.quote(thing)}"),
    ):
        own = own.replace(word, instead)
    return f"{first}{own}" if own != fix else fix


def _find_commands(thing: str, given: dict[str, str]) -> tuple[Sequence[str], str, str]:
    """Return the arguments that compose a thing, the name of its model, and what to type before they can be used.

    Raises:
        ShoalError: there is no such thing.
    """
    repository = find_repository(Path(thing)) if thing else None
    if repository is None:
        recipe = find_recipe(thing, task=given.get("--task", ""), name=given.get("--name", ""))
        first = "" if recipe.folder.exists() else f"shoal serve {shlex.quote(thing)}, and stop it; then "
        return recipe.commands[-1], _name_model(recipe.commands), first
    record = repository.parent / RECORD
    if record.is_file():
        commands: Any = read_json(record)["commands"]
        return commands[-1], _name_model(commands), ""
    return ("compose", *(read_composed(repository) or ["ENSEMBLE"]), str(repository)), "MODEL", ""


def _name_model(commands: Sequence[Sequence[str]]) -> str:
    return commands[0][2] if commands[0][0] == "add-model" else "MODEL"
