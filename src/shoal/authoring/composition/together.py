"""Models that travel in the folder of the model that calls them, and run in its process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.authoring.composition.environments import ALL, PARAMETER
from shoal.authoring.composition.writing import COMMENT, hash_files, write_manifest
from shoal.authoring.repository.apis import makes_token_ids
from shoal.authoring.repository.config import CONFIG as PBTXT
from shoal.authoring.repository.config import ModelConfig, read_config, write_config
from shoal.authoring.repository.manifest import MANIFEST, read_manifest
from shoal.authoring.repository.plan import Tuning
from shoal.authoring.repository.versions import list_made
from shoal.authoring.vendoring import copy_package
from shoal.errors import InputError
from shoal.kit.component.spec import HOSTED_CONFIG, TOGETHER
from shoal.kit.component.triton import CALLING, HOSTING


def find_hosts(
    models: Sequence[ModelConfig], tuning: Mapping[str, Tuning], environments: Mapping[str, Path]
) -> dict[str, tuple[str, ...]]:
    """Return the models that call others, each with those that it hosts: models of Python that only it uses.

    The step of a language model that makes token ids is hosted if it can be, and stays a model of its own, too: the
    service asks it to count tokens. ``tuning`` and ``environments`` are those of ``compose``.

    Raises:
        InputError: no model calls others, or one of those cannot be hosted.
    """
    members = {model.name: model for model in models}
    callers = [model for model in models if model.calls]
    if not callers:
        names = ", ".join(members)
        raise InputError(f"No model calls others: {names}.", "Leave out --together, or name a model such as llm_bls.")
    hosts: dict[str, tuple[str, ...]] = {}
    for caller in callers:
        for called in caller.calls:
            why = _find_obstacle(caller, members[called], models, environments)
            queue = tuning.get(called, Tuning())
            has_queue = bool(queue.preferred_batch_sizes) or queue.queue_delay is not None
            if not (why or has_queue):
                hosts[caller.name] = (*hosts.get(caller.name, ()), called)
            elif makes_token_ids(members[called]):
                continue
            elif why:
                raise InputError(f"{caller.name} cannot run {called} in its process: {why}.", "Leave out --together.")
            else:
                what = f"Requests to {called} wait in no queue with --together, in the process of {caller.name}."
                raise InputError(what, "Leave out --preferred-batch and --queue-delay for it, or --together.")
    return hosts


def _find_obstacle(
    caller: ModelConfig, called: ModelConfig, models: Sequence[ModelConfig], environments: Mapping[str, Path]
) -> str:
    """Return why a model cannot host another, as a clause; empty if it can."""
    if called.backend != "python":
        kind = "an ensemble" if called.is_ensemble else f"a model of the backend {called.backend}"
        return f"it is {kind}, not Python code"
    if called.calls:
        return "it calls other models itself"
    users = [m.name for m in models if called.name in (*m.calls, *(step.model for step in m.steps))]
    if (others := [name for name in users if name != caller.name]) and not makes_token_ids(called):
        return f"{', '.join(others)} needs it too, so it would be loaded twice"
    if several := next((model for model in (caller, called) if model.spec.num_instances > 1), None):
        return f"{several.name} has {several.spec.num_instances} instances, and one process runs one"
    if len({_find_environment(model, environments) for model in (caller, called)}) > 1:
        return "their environments differ (`--env PATH` gives all models one)"
    return ""


def _find_environment(model: ModelConfig, environments: Mapping[str, Path]) -> str:
    given = environments.get(model.name, environments.get(ALL))
    return str(given) if given else model.spec.parameters.get(PARAMETER, "")


def pack(repository: Path, hosts: Mapping[str, Sequence[str]]) -> None:
    """Move the folders of hosted models into those of their callers, in a repository that is whole otherwise."""
    if not hosts:
        return
    for host, names in hosts.items():
        folder, configs = repository / host, {name: read_config(repository / name) for name in names}
        for version in list_made(read_config(folder)):
            for name, config in configs.items():
                _copy(config, version / TOGETHER / name)
            shutil.rmtree(version / "shoal")  # written again with what hosted code imports
            calls_others = set(read_config(folder).calls) - set(names)
            copy_package(version, HOSTING, *([CALLING] if calls_others else []))
        for name, config in configs.items():
            if not makes_token_ids(config):
                shutil.rmtree(repository / name)
        write_config(_join(read_config(folder), configs), folder / PBTXT, comment=COMMENT)
    _describe(repository, hosts)


def _describe(repository: Path, hosts: Mapping[str, Sequence[str]]) -> None:
    """Put the hosted models into the manifest, in place of the folders that are no longer there."""
    manifest, hosted = read_manifest(repository), {name for names in hosts.values() for name in names}
    gone = {name for name in hosted if not (repository / name).exists()}
    (repository / MANIFEST).unlink()
    more = {
        "together": {name: list(names) for name, names in hosts.items()},
        "environments": {name: path for name, path in manifest["environments"].items() if name not in gone},
        "without_environment": [name for name in manifest["without_environment"] if name not in gone],
        "files": hash_files(repository),
    }
    write_manifest(repository, {**manifest, **more})


def _copy(config: ModelConfig, place: Path) -> None:
    from google.protobuf import json_format

    (version,) = list_made(config)
    shutil.copytree(version, place, ignore=shutil.ignore_patterns("shoal", "__pycache__"))
    fields = json_format.MessageToDict(config.message, preserving_proto_field_name=True)
    (place / HOSTED_CONFIG).write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _join(host: ModelConfig, configs: Mapping[str, ModelConfig]) -> Any:
    """Return the caller's configuration with what the service knows of its models: how many requests, and how long."""
    message = type(host.message)()
    message.CopyFrom(host.message)
    message.parameters[TOGETHER].string_value = " ".join(configs)
    for name, choose in (("slots", min), ("load_seconds", max), ("hang_seconds", max)):
        values = [value for each in (host, *configs.values()) if (value := each.spec.parameters.get(name))]
        if values:
            message.parameters[name].string_value = choose(values, key=float)
    return message
