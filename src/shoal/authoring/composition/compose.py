"""Compose a model repository and its manifest from model folders, artifacts and a plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shoal
from shoal.authoring.check.targets import check_backends
from shoal.authoring.composition.artifacts import (
    check_artifacts,
    check_present,
    choose_precisions,
    find_host_reasons,
    read_contents,
)
from shoal.authoring.composition.environments import find_environments
from shoal.authoring.composition.labels import find_labels
from shoal.authoring.composition.notes import find_changes, find_notes, name_placement
from shoal.authoring.composition.swap import exchange_models
from shoal.authoring.composition.tuned import apply, read_tuned
from shoal.authoring.composition.validation import check_made
from shoal.authoring.composition.warmup import FOLDER, WarmUps, derive
from shoal.authoring.composition.warmup import write as write_warm_up
from shoal.authoring.composition.weights import find as find_weights
from shoal.authoring.composition.weights import give as give_weights
from shoal.authoring.composition.weights import quantize as quantize_all
from shoal.authoring.composition.weights import write_engine_args
from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import ModelConfig, write_config
from shoal.authoring.repository.devices import find_gpus
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import MANIFEST
from shoal.authoring.repository.model_folders import find_model_folders
from shoal.authoring.repository.placement import place_all, tune
from shoal.authoring.repository.plan import Plan, Tuning
from shoal.authoring.repository.precision import write_dtype
from shoal.authoring.repository.sizes import Sizes, find_scheduling_flags, find_sizes
from shoal.authoring.repository.versions import list_made
from shoal.authoring.vendoring import copy_package
from shoal.errors import SetupError
from shoal.kit.component.files import sha256
from shoal.kit.component.spec import FILES, REPOSITORY
from shoal.kit.component.triton import CALLING
from shoal.system.files import copy_file, read_bytes
from shoal.system.paths import aside, check_path_supported, check_replaceable, exchange

_COMMENT = "Written by shoal compose; edits made here are lost."


def compose(
    ensembles: str | Sequence[str],
    repository: Path | str,
    *,
    artifacts: Path | str | None = None,
    plan: Plan | None = None,
    projects: Iterable[Path | str] = (),
    environments: Mapping[str, Path] | None = None,
    stubs: Mapping[str, Path] | None = None,
    is_warmed_up: bool = True,
    swap: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    tuning: Mapping[str, Tuning] | None = None,
    tuned: Path | str | None = None,
    accepts_error: bool = False,
    quantize: str = "",
) -> Path:
    """Write the model repository that serves one or more ensembles; returns its absolute path.

    A model that several ensembles use is written once. The repository is built in a temporary folder and replaces the
    old one atomically: after an interruption, the old one is unchanged. The same inputs give the same bytes.

    ``projects`` are folders with model folders of your own, in the categories ``preprocess``, ``postprocess``,
    ``models`` and ``ensembles``. ``artifacts`` is a folder with files that models name in their parameter
    ``artifacts``, separated by spaces: ``a.txt?`` is optional, and ``a.txt|b.json`` is either of the two files. Files
    in a model's version folder take precedence. ``environments`` maps the names of Python models (``""`` for all) to
    execution environments: an archive, a folder, or the output of `shoal env build`. ``stubs`` maps the same names to
    Python backend stubs, for environments without a stub. With ``is_warmed_up``, models get a warm-up request, made by
    running the pipeline's components on one text. ``swap`` replaces models in each step and each parameter ``calls``:
    ``{"llm-hf": "llm-vllm"}`` replaces ``llm-hf`` by ``llm-vllm``. ``weights`` is the folder of a language model's
    weights, or ``OWNER/NAME[@REVISION]`` on the Hugging Face hub. The weights are not copied: models with an empty
    parameter ``model`` get the folder's path. ``tuning`` maps names of models to the settings of their instances and
    their dynamic batching. ``tuned`` is the plan file of ``shoal tune`` for the same encoders: its precision is the
    one for ``auto``, and it has the encoders for INT8; ``accepts_error`` allows any measured or unknown error of INT8.
    ``quantize``, ``int8`` or ``int4``, is the form of the weights in engines of language models that can have it.

    Raises:
        InputError: Triton does not support the path, it holds something other than a composed repository, no model
            takes the plan's dtype, the target lacks a backend, a model cannot replace another, or a setting in
            ``tuning`` does not fit its model.
        ArtifactError: an artifact is missing, damaged or does not fit another; environment, stub and server do not fit
            together; or a model folder of your own has a mistake that `check` finds.
        SetupError: the disk is full, or the folder cannot be written.
    """
    plan = plan or Plan()
    target, artifacts = Path(repository).resolve(), None if artifacts is None else Path(artifacts)
    check_path_supported(target)
    names = [ensembles] if isinstance(ensembles, str) else list(dict.fromkeys(ensembles))
    folders = find_model_folders(projects)
    available = exchange_models(folders, names, swap or {})
    models = list({model.name: model for name in names for model in collect(name, available)}.values())
    found = None if weights is None else find_weights(str(weights))
    models = tune(give_weights(models, found), tuning or {})
    models = quantize_all(models, quantize) if quantize else models
    chosen = None if tuned is None else read_tuned(Path(tuned))
    models, plan, quantized, said = apply(models, artifacts, plan, chosen, accepts_error=accepts_error)
    reasons = find_host_reasons(models, artifacts)
    models = place_all(models, plan, tuning, reasons)
    gpus = find_gpus(models, plan)
    members = {model.name: model for model in models}
    graphs = [Graph.build(members[name], members) for name in names]
    used = {*names, *(step.model for model in models for step in model.steps)}
    called = dict.fromkeys(name for model in models for name in model.calls if name not in used)
    all_graphs = [*graphs, *(Graph.build(members[name], members) for name in called)]
    check_backends(models, plan.target)
    load_seconds = max(model.load_seconds for model in models)
    try:
        check_replaceable(target, MANIFEST)
        check_present(models, artifacts)
        check_artifacts(models, artifacts, is_embedded=plan.target == EMBEDDED)
        precisions = choose_precisions(models, artifacts, plan) | quantized
        placed = find_environments(models, environments or {}, stubs or {}, plan.target)
        contents = read_contents(artifacts)
        labels = {model.name: find_labels(model, members) for model in models}
        with aside(target) as folder:
            for model in models:
                _write_files(model, folder / model.name, artifacts)
                for name, source in labels[model.name].values():
                    content = read_bytes(source).replace(b"\r\n", b"\n")  # Triton would keep the returns
                    (folder / model.name / name).write_bytes(content)
            files = _hash_files(folder)
            identity = _identify(all_graphs, files | (found.files if found else {}))
            warm_ups = derive(all_graphs, folder) if is_warmed_up else WarmUps()
            copies: dict[Path, Path] = {}
            notes = [*said, *find_notes(models, plan, gpus, reasons)]
            for model in models:
                message = type(model.message)()
                message.CopyFrom(model.message)
                for tensor in message.output:
                    tensor.label_filename, _ = labels[model.name].get(tensor.name, (tensor.label_filename, None))
                if model.name in precisions:
                    write_dtype(message, model, precisions[model.name].dtype)
                if model.name in warm_ups.requests:
                    write_warm_up(message, folder / model.name, warm_ups.requests[model.name])
                if contents.get(model.name):
                    message.parameters["content"].string_value = contents[model.name]
                if not model.is_ensemble:
                    message.parameters[REPOSITORY].string_value = identity
                if model.is_native:
                    message.parameters[FILES].string_value = _digest(
                        {name: digest for name, digest in files.items() if name.startswith(f"{model.name}/")}
                    )
                if model.name in placed:
                    placed[model.name].write(folder / model.name, message, copies)
                write_config(message, folder / model.name / "config.pbtxt", comment=_COMMENT)
                notes += find_changes(folders[model.name], message, plan)
            more = {
                "notes": notes, "gpus": gpus, "placement": name_placement(plan, gpus, tuning or {}),
                "precision": {name: asdict(chosen) for name, chosen in precisions.items()},
                "identity": identity, "contents": contents, "not_warmed_up": warm_ups.reasons,
                "environments": {name: place.path for name, place in placed.items()},
                "without_environment": [m.name for m in models if m.backend == "python" and m.name not in placed],
                "ensembles": names, "swap": dict(swap or {}),
                **({"load_seconds": load_seconds} if load_seconds else {}),
                **({"weights": {**asdict(found), "folder": str(found.folder)}} if found else {}),
            }  # fmt: skip
            _write_manifest(folder, models, all_graphs, plan, files, more)
            check_made(folder, str(target), plan.target)
            exchange(folder, target)
    except OSError as error:
        where = f" ({error.filename})" if str(error.filename) in map(str, target.parents) else ""
        raise SetupError(
            f"{target} cannot be written: {error.strerror or error}{where}.",
            "What was there, if anything, is unchanged. Make room, or name another folder.",
        ) from error
    return target


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


def _hash_files(repository: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
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


def _write_manifest(
    repository: Path,
    models: Sequence[ModelConfig],
    graphs: Sequence[Graph],
    plan: Plan,
    files: Mapping[str, str],
    more: Mapping[str, Any],
) -> None:
    sizes = Sizes(more["gpus"], tuple(line for graph in graphs for line in find_sizes(graph, plan).lines))
    manifest = {
        "format": 1,
        "shoal": shoal.__version__,
        **asdict(plan),
        "dtype": ", ".join(dict.fromkeys(chosen["dtype"] for chosen in more["precision"].values())) or "fp32",
        "launch": {"flags": [*sizes.flags(), *find_scheduling_flags(models)], "shared_memory": sizes.shared_memory},
        **more,
        "files": _hash_files(repository, files),
    }
    (repository / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
