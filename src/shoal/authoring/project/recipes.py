"""Recipes: the commands that make a repository out of a model that someone has."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from shoal.authoring.composition.gguf import GGUF, check
from shoal.authoring.project.importing.add_model import KINDS
from shoal.authoring.project.importing.foreign import FILES, find_foreign
from shoal.authoring.project.importing.imported import split_source
from shoal.authoring.project.importing.tasks import (
    EMBEDDINGS,
    GENERATE,
    PREDICT,
    RERANK,
    TASKS,
    check_file,
    check_task,
    read_task,
)
from shoal.authoring.project.scaffold.names import check_name
from shoal.authoring.repository.config import CONFIG
from shoal.authoring.repository.made import make_name, suggest_repository
from shoal.authoring.repository.manifest import MANIFEST
from shoal.authoring.repository.model_folders import CATEGORIES, list_configs
from shoal.errors import InputError
from shoal.kit.generation.weights import DECODER, OPENVINO
from shoal.system.files import read_json

RECORD = "made-from.json"  # in the folder of a recipe: what the repository was made from
_LANGUAGE = "llm_bls"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".h5", ".msgpack")
_OF_MUCH_ELSE = {".json", ".txt", ".py"}  # suffixes that do not make a file in a folder its model


class Recipe(NamedTuple):
    """Way to make a repository: ``commands`` are the arguments of ``shoal``, one after the other.

    ``folder`` is new, and holds all that is made; ``repository`` is in it.
    """

    folder: Path
    repository: Path
    commands: tuple[tuple[str, ...], ...]
    record: Mapping[str, Any]

    def is_made(self) -> bool:
        """Whether the repository is there, made from the same files in the same way.

        Raises:
            InputError: the folder holds something else, or there is no such component.
            ArtifactError: the file of the component cannot be run.
        """
        try:
            return self.folder.exists() and self._is_own()
        except InputError:
            source = self.commands[0][1]
            if split_source(source)[0].suffix == ".py":  # a mistake in what was typed is reported first
                from shoal.authoring.project.importing.components import find_component  # which loads much else

                find_component(source)
            raise

    def _is_own(self) -> bool:
        by_hand = f"--name NAME chooses another folder. Or remove {self.folder}, and it is made again."
        as_it_is = f"To serve it as it is: shoal serve {self.repository}. {by_hand}"
        try:
            made = read_json(self.folder / RECORD)
        except (OSError, ValueError):
            fix = as_it_is if self.repository.is_dir() else by_hand
            raise InputError(f"{self.folder} exists, and shoal serve did not make it.", fix) from None
        if made != json.loads(json.dumps(self.record)):
            before, now = made.get("files") or {}, self.record["files"] or {}
            others = sorted(before.keys() - now.keys())
            what = f"was made of {others[0]}" if others else "was made before its files changed"
            raise InputError(f"{self.folder} {'was made in another way' if before == now else what}.", as_it_is)
        if changed := self._find_changed():
            again = f"Compose it again: shoal {shlex.join(self.commands[-1])}. {as_it_is}"
            raise InputError(f"{changed} was changed after {self.repository} was composed.", again)
        return True

    def _find_changed(self) -> Path | None:
        """Return a file of the folder's project that is newer than its repository."""
        try:
            composed = (self.repository / MANIFEST).stat().st_mtime_ns
        except OSError:
            return None  # the repository's own faults are told when it is served
        files = (each for name in CATEGORIES for each in (self.folder / name).rglob("*") if each.is_file())
        own = (each for each in files if "__pycache__" not in each.parts)
        return next((each for each in own if each.stat().st_mtime_ns > composed), None)


def find_recipe(thing: str, *, task: str = "", name: str = "") -> Recipe:
    """Return the recipe for a model's file, a folder of Hugging Face's layout, or a name on its hub.

    Raises:
        InputError: the model is of a kind that cannot be served, the task does not fit it, or has to be said.
    """
    path, _ = split_source(thing)
    check_task(task)
    if name:
        check_name(name, {})
    name = name or name_model(path)
    folder = Path("build") / name
    project = ("--project", str(folder))
    if path.is_dir():
        _check_whole(path)
        found = read_task(path, task)
        _check_weights(path)
    elif path.suffix.lower() == GGUF and path.exists():
        check(path)
        if task not in ("", GENERATE):
            raise InputError(f"--task {task} does not fit {path}: it is a language model.", "Leave the task out.")
        found = GENERATE
    elif path.suffix.lower() in {**KINDS, **FILES} or path.exists():
        _check_kind(path)
        check_file(f"the file {path}", task)
        found = PREDICT
    elif task and thing.count("/") <= 1 and not thing.startswith((".", "/", "~")):
        found = task  # a name on the hub
    elif near := suggest_repository(path) or _suggest_near(path):
        raise InputError(f"There is no {thing}.", near)
    else:
        tasks = f" --task {', --task '.join(TASKS)}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", thing):
            tasks = f" shoal serve {thing} --task {TASKS[0]} (or {', '.join(TASKS[1:])})"
        what = "Name a file, a folder, or a repository; for a name on the Hugging Face hub, also say the task:"
        raise InputError(f"There is no {thing}.", what + tasks)
    repository = folder / "repository"
    compose = ("compose", name, str(repository), *project)
    commands: list[tuple[str, ...]]
    if found == GENERATE:
        weights: tuple[str, ...] = ("--weights", thing, "--together")
        if any((path / each).is_file() for each in (DECODER, OPENVINO)):  # these have engines of their own
            weights += ("--engine", "auto")
        commands = [("new", "component", name, "--like", _LANGUAGE, *project), (*compose, *weights)]
    elif path.is_file():
        commands = [("add-model", thing, name, *project), compose]
    else:
        tokens, encoder = f"{name}_tokenizer", f"{name}_encoder"
        maps = (f"{encoder}.INPUT__0={tokens}.input_ids", f"{encoder}.INPUT__2={tokens}.token_type_ids")
        wired = [part for each in maps for part in ("--map", each)] if found == RERANK else []
        commands = [
            ("add-model", thing, encoder, "--task", found, "--tokenizer", tokens, *project),
            ("new", "pipeline", name, "--step", tokens, "--step", encoder, *wired, *project),
            compose,
        ]
    if path.is_dir() and found == EMBEDDINGS:
        _check_pooling(path, [*commands, ("serve", str(repository))])
    record = {"files": _describe_files(path), "commands": commands}
    return Recipe(folder, repository, tuple(commands), record)


def name_model(path: Path) -> str:
    """Return a name for the model, from the name of its file or folder; that of a link is its own."""
    if path.name == "model.py" and (path.absolute().parents[1] / CONFIG).is_file():
        path = path.absolute().parents[1]
    whole = path.name if path.name.strip(".") else path.resolve().name
    stem = path.stem if path.suffix.lower() in {**KINDS, **FILES} else whole
    return make_name(stem)


def _check_kind(path: Path) -> None:
    """Refuse a file that is absent, or not a model of a known kind."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise InputError(f"There is no file {path}.", _suggest_near(path) or "Name the model's file.")
    if suffix not in KINDS:
        if found := FILES.get(suffix):
            raise InputError(f"{path} is {found.what}, which cannot be served.", found.fix)
        fix = f"Known: {', '.join([*KINDS, GGUF])}, and folders of Hugging Face's layout."
        raise InputError(f"{path} is not a model that can be served.", fix)


def _suggest_near(path: Path) -> str:
    """Return the advice to name the file or folder beside ``path`` whose name is similar; empty if there is none."""
    names = [each.name for each in islice(path.parent.iterdir(), 1000)] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, 1)
    return f"Did you mean {path.parent / close[0]}?" if close else ""


def _check_whole(folder: Path) -> None:
    """Refuse a folder that is neither a repository nor a model, with what it holds."""
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return
    if found := find_foreign(folder):
        raise InputError(f"{folder} is {found.what}, which cannot be served.", found.fix)
    sure = {*KINDS, GGUF} - _OF_MUCH_ELSE
    files = sorted(each.name for each in folder.iterdir() if each.suffix.lower() in sure)
    fix = "Make a repository: shoal compose ENSEMBLE REPOSITORY. Or name a model's file or folder."
    if list_configs(folder / "models"):  # a project
        fix = f"Serve its models alone: shoal serve {folder / 'models'}. For a pipeline of them: shoal new pipeline"
    elif files:
        fix = f"Name the file: shoal serve {folder / files[0]}"
        fix += f" (or another one of: {', '.join(files[1:9])})" if files[1:] else ""
    raise InputError(f"{folder} holds neither a model repository nor a model's config.json.", fix)


def _check_weights(folder: Path) -> None:
    """Refuse a folder of Hugging Face's layout that holds a graph of ONNX alone, but for a decoder of shoal's."""
    files = sorted(each.relative_to(folder) for each in folder.rglob("*") if each.is_file())
    graphs = [each for each in files if each.suffix == ".onnx"]
    if graphs[:1] not in ([], [Path(DECODER)]) and not any(each.suffix in _WEIGHTS for each in files):
        raise InputError(
            f"{folder} holds {graphs[0]} and no weights of PyTorch.",
            f"For its tensors alone: shoal serve {folder / graphs[0]}. For texts: a folder with weights.",
        )


def _check_pooling(folder: Path, commands: Sequence[tuple[str, ...]]) -> None:
    """Refuse an encoder whose files do not say how its embeddings are made, with the commands that serve it."""
    if not (folder / "modules.json").is_file():
        first, *others = (f"shoal {shlex.join(each)}" for each in commands)
        raise InputError(
            f"The pooling of {folder} is not given: it has no modules.json of sentence-transformers.",
            f"Type, with mean or cls as it was trained: {' && '.join([f'{first} --pooling mean', *others])}",
        )


def _describe_files(path: Path) -> dict[str, list[int]] | None:
    """Return size and time of each file, by its path; None for a name on the hub."""
    if not path.exists():
        return None
    if path.suffix == ".py":
        from shoal.authoring.project.importing.components import list_files  # which loads much else

        files = list_files(path)
    else:
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each.resolve()): [each.stat().st_size, each.stat().st_mtime_ns] for each in files}
