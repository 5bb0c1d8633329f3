"""Write a repository: its model folders and its manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import shoal
from shoal.authoring.composition.environments import Placed
from shoal.authoring.composition.labels import find_labels
from shoal.authoring.composition.notes import find_changes, name_placement
from shoal.authoring.composition.transforms import Order
from shoal.authoring.composition.warmup import WarmUps, derive
from shoal.authoring.composition.warmup import write as write_warm_up
from shoal.authoring.composition.weights import write_engine_args
from shoal.authoring.repository.config import ModelConfig, write_config
from shoal.authoring.repository.devices import find_gpus
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.launch_flags import find_scheduling_flags
from shoal.authoring.repository.manifest import MANIFEST
from shoal.authoring.repository.plan import Precision
from shoal.authoring.repository.precision import write_dtype
from shoal.authoring.repository.sizes import Sizes, find_sizes
from shoal.authoring.repository.versions import list_made
from shoal.authoring.repository.warmup_request import FOLDER
from shoal.authoring.vendoring import copy_package
from shoal.kit.component.files import sha256
from shoal.kit.component.spec import FILES, REPOSITORY
from shoal.kit.component.triton import CALLING
from shoal.system.files import copy_file, read_bytes

COMMENT = "Written by shoal compose; edits made here are lost."


@dataclass(frozen=True)
class Composition:
    """Models to write for the ensembles ``names``, and what is written with them.

    ``before`` has the models as in their folders, ``graphs`` those of the ensembles, and of what code calls.
    ``precisions``, ``environments`` and ``contents`` are by model.
    """

    names: list[str]
    models: list[ModelConfig]
    before: Mapping[str, ModelConfig]
    swap: Mapping[str, str]
    order: Order
    notes: list[str]
    graphs: list[Graph]
    precisions: Mapping[str, Precision] = field(default_factory=dict)
    environments: Mapping[str, Placed] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


def write(made: Composition, folder: Path, *, is_warmed_up: bool) -> None:
    """Write a repository into the empty ``folder``."""
    members = {model.name: model for model in made.models}
    labels = {model.name: find_labels(model, members) for model in made.models}
    for model in made.models:
        _write_files(model, folder / model.name, made.order.artifacts)
        for name, source in labels[model.name].values():
            content = read_bytes(source).replace(b"\r\n", b"\n")  # Triton would keep the returns
            (folder / model.name / name).write_bytes(content)
    files, weights = hash_files(folder), made.order.weights
    identity = _identify(made.graphs, files | (weights.files if weights else {}))
    warm_ups = derive(made.graphs, folder) if is_warmed_up else WarmUps()
    copies: dict[Path, Path] = {}
    changes: list[str] = []
    for model in made.models:
        message = _fill(made, model, files, identity)
        for tensor in message.output:
            tensor.label_filename, _ = labels[model.name].get(tensor.name, (tensor.label_filename, None))
        if model.name in warm_ups.requests:
            write_warm_up(message, folder / model.name, warm_ups.requests[model.name])
        if model.name in made.environments:
            made.environments[model.name].write(folder / model.name, message, copies)
        write_config(message, folder / model.name / "config.pbtxt", comment=COMMENT)
        changes += find_changes(made.before[model.name], message, made.order.plan)
    more = {"identity": identity, "not_warmed_up": warm_ups.reasons, "notes": [*made.notes, *changes]}
    _write_manifest(made, folder, files, more)


def _fill(made: Composition, model: ModelConfig, files: Mapping[str, str], identity: str) -> Any:
    """Return a model's configuration message with its precision, and with what components read at their start."""
    message = type(model.message)()
    message.CopyFrom(model.message)
    if model.name in made.precisions:
        write_dtype(message, model, made.precisions[model.name].dtype)
    if made.contents.get(model.name):
        message.parameters["content"].string_value = made.contents[model.name]
    if not model.is_ensemble:
        message.parameters[REPOSITORY].string_value = identity
    if model.is_native:
        own = {name: digest for name, digest in files.items() if name.startswith(f"{model.name}/")}
        message.parameters[FILES].string_value = _digest(own)
    return message


def _write_files(model: ModelConfig, folder: Path, artifacts: Path | None) -> None:
    for source in version_files(model.folder):
        _copy(source, folder / source.relative_to(model.folder))
    for source in list_made(model):
        version = folder / source.name
        version.mkdir(parents=True, exist_ok=True)
        if model.backend == "python":
            copy_package(version, *([CALLING] if model.calls else []))
        write_engine_args(model, version)
        for artifact in model.artifacts:
            if artifacts and not artifact.find([source]):
                for path in artifact.find([artifacts]):
                    copy_file(path, version / path.name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    copy_file(source, target)


def version_files(model: Path) -> Iterator[Path]:
    """Yield the files of a model folder that Triton reads: all in version folders and in ``warmup/``, except caches."""
    for path in sorted(path for folder in ("[0-9]*", FOLDER) for path in model.glob(f"{folder}/**/*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def hash_files(repository: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file in a repository, by path; a file with a hash in ``known`` is not read."""
    files = {str(path.relative_to(repository)): path for path in sorted(repository.rglob("*")) if path.is_file()}
    return {name: (known or {}).get(name) or sha256(path) for name, path in files.items()}


def _identify(graphs: Sequence[Graph], files: Mapping[str, str]) -> str:
    """Return a digest of what determines the answers: artifacts, code and the wiring of steps, not the placement."""
    steps: list[Any] = [
        [step.model, step.version, dict(step.inputs), dict(step.outputs)] for graph in graphs for step in graph.steps
    ]
    steps += [call for graph in graphs for call in graph.calls()]
    read = {name: digest for name, digest in files.items() if not name.endswith(".gitkeep")}
    return _digest([steps, read])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write_manifest(made: Composition, repository: Path, files: Mapping[str, str], more: Mapping[str, Any]) -> None:
    models, plan, weights = made.models, made.order.plan, made.order.weights
    gpus, load_seconds = find_gpus(models, plan), max(model.load_seconds for model in models)
    sizes = Sizes(gpus, tuple(line for graph in made.graphs for line in find_sizes(graph, plan).lines))
    manifest = {
        "format": 1,
        "shoal": shoal.__version__,
        **plan.describe(),
        "gpus": gpus,
        "placement": name_placement(plan, gpus),
        "dtype": ", ".join(dict.fromkeys(chosen.dtype for chosen in made.precisions.values())) or "fp32",
        "precision": {name: asdict(chosen) for name, chosen in made.precisions.items()},
        "launch": {"flags": [*sizes.flags(), *find_scheduling_flags(models)], "shared_memory": sizes.shared_memory},
        "ensembles": made.names,
        "swap": dict(made.swap),
        "contents": made.contents,
        "environments": {name: place.path for name, place in made.environments.items()},
        "without_environment": [m.name for m in models if m.backend == "python" and m.name not in made.environments],
        **({"load_seconds": load_seconds} if load_seconds else {}),
        **({"weights": {**asdict(weights), "folder": str(weights.folder)}} if weights else {}),
        **more,
        "files": hash_files(repository, files),
    }
    write_manifest(repository, manifest)


def write_manifest(repository: Path, manifest: Mapping[str, Any]) -> None:
    """Write what a repository was composed of."""
    (repository / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
