"""Check of a repository by all rules. Each family of rules is a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from shoal.authoring.check import artifacts, environments, forest, onnx_io, security, targets, torchscript, tried
from shoal.authoring.check.config import (
    apis,
    checkpoints,
    engines,
    fields,
    folders,
    llm_hf,
    llmapi,
    own_backends,
    scheduling,
    tensors,
    trtllm,
    warmups,
)
from shoal.authoring.check.ensembles import members, placement, running, wiring
from shoal.authoring.check.findings import Finding, Rule, Severity
from shoal.authoring.check.models import Repository
from shoal.authoring.check.python import answers, calls, code, names, settings, streams
from shoal.authoring.check.repositories import read_repository
from shoal.authoring.environment.targets import find_target

# Modules with rules and a function find(model, repository), which never raises because of a repository's contents.
_CONFIGURATIONS = (fields, folders, tensors, apis, scheduling, warmups, wiring, running, members)
_LANGUAGE_MODELS = (engines, checkpoints, trtllm, llmapi, llm_hf)
_SERVERS_AND_CODE = (placement, environments, targets, artifacts, code, names, calls, answers, settings, streams)
FAMILIES = (
    *(*_CONFIGURATIONS, *_LANGUAGE_MODELS, *_SERVERS_AND_CODE),
    *(forest, torchscript, onnx_io, own_backends, security),
)
RULES = {rule.id: rule for family in (*FAMILIES, tried) for rule in vars(family).values() if isinstance(rule, Rule)}


def check(path: Path | str, *, target: str | None = None, hashes: bool = True) -> list[Finding]:
    """Find the mistakes in a model repository, in one model's folder, or in the model folders of a project.

    The check needs no server, no GPU and none of the models' libraries, and runs no code of the repository. ``target``
    is the Triton that will serve the models: ``embedded``, which ``shoal serve`` starts, or a release of NVIDIA's
    container such as ``26.06``. With None, it is the target in the manifest that ``shoal compose`` wrote; without a
    manifest, rules that depend on the server are skipped. ``hashes``: compare the files of a composed repository with
    the hashes in its manifest, which takes as long as reading all files.

    Raises:
        InputError: the target is unknown, or ``path`` contains nothing to check.
    """
    return check_together([path], target=target, hashes=hashes)


def check_together(paths: Iterable[Path | str], *, target: str | None = None, hashes: bool = True) -> list[Finding]:
    """Find the mistakes in repositories that one Triton reads: the models of each may call those of the others.

    A model that two others have is ambiguous, and counts as missing. Arguments and errors are those of ``check``.
    """
    read = [_fix(read_repository(Path(path), find_target(target) if target else None)) for path in paths]
    counts = Counter(name for repository in read for name in repository.known)
    shared = {name: model for repository in read for name, model in repository.known.items() if counts[name] == 1}
    return [
        finding for each in read for finding in _check(replace(each, known={**shared, **each.known}), hashes=hashes)
    ]


def _fix(repository: Repository) -> Repository:
    """Mark the models of a server that completes no configuration."""
    if repository.target is None or not repository.target.is_embedded:
        return repository
    fixed = {id(each): replace(each, is_fixed=True) for each in (*repository.known.values(), *repository.models)}
    models = tuple(fixed[id(each)] for each in repository.models)
    return replace(repository, models=models, known={name: fixed[id(each)] for name, each in repository.known.items()})


def _check(repository: Repository, *, hashes: bool) -> list[Finding]:
    if not hashes:
        manifest = {name: value for name, value in repository.manifest.items() if name != "files"}
        repository = replace(repository, manifest=manifest)
    order = list(Severity)
    found = {
        (each.rule, each.place, each.what): each for each in _find(repository)
    }  # models may share files of weights
    return sorted(
        found.values(), key=lambda f: (order.index(f.severity), str(f.place.path), f.place.line, f.rule.id, f.what)
    )


def _find(repository: Repository) -> Iterator[Finding]:
    for model in repository.models:
        for family in FAMILIES:
            yield from family.find(model, repository)
