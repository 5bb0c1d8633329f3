"""The command that serves a repository from NVIDIA's Triton container."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.environment.imports import find_imports, find_requirements
from shoal.environment.targets import EMBEDDED, LATEST, Image, Target, explain_backend, find_target
from shoal.errors import InputError
from shoal.files import read_json
from shoal.repository.config import ModelConfig
from shoal.repository.manifest import read_manifest
from shoal.repository.model_folders import read_configs

REPOSITORY = "nvcr.io/nvidia/tritonserver"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_ENGINES = ("gpt_model_path", "engine_dir")  # parameters of TensorRT-LLM's models: the folder of an engine
_ON_GPUS = frozenset({"tensorrt", "tensorrtllm", "vllm"})  # backends that need a GPU, whatever the instance groups
_LEAST_MIB = 1024  # of shared memory, as in NVIDIA's guides; it is taken only when it is used
_ULIMITS = ("--ulimit memlock=-1", "--ulimit stack=67108864")


def container_command(
    repository: Path,
    *,
    target: str = "",
    host: str = "127.0.0.1",
    ports: tuple[int, int, int] = (8000, 8001, 8002),
    model_memory_mib: float = 0.0,
) -> str:
    """Return the shell command that serves a repository from NVIDIA's Triton container, in several lines.

    ``target`` is the release, by default that for which the repository was composed, else the newest known one. The
    ports for HTTP, gRPC and metrics are those of this machine, at the address ``host``; 0 is any free port. If
    ``model_memory_mib`` is given, the container gets so many MiB for each process of a Python model, and as much for
    Triton itself.

    Raises:
        InputError: the repository was composed for another release or for the embedded server; no image of the release
            has the backends of its models, or the package of a module that they import is not known.
        ArtifactError: a configuration or the manifest cannot be read.
    """
    manifest, configs = read_manifest(repository), read_configs(repository)
    if not configs:
        raise InputError(
            f"{repository} is not a model repository: it holds no MODEL/config.pbtxt.", "Name another one."
        )
    server = find_target(_choose_target(repository, manifest.get("target", ""), target))
    backends = {config.backend for config in configs.values() if not config.is_ensemble}
    needs = {name: _find_needs(config, configs.values()) for name, config in configs.items()}
    modules = frozenset[str]().union(*needs.values())
    image = _find_image(server, backends, modules)
    for name in (name for name, needed in needs.items() if "shoal" in needed):
        raise InputError(
            f"Model {name} imports shoal, of which it has no copy, and the image has none either.",
            f"Compose it: shoal compose {name} REPOSITORY --project FOLDER --target {server.version}",
        )
    lines = find_requirements(modules - image.modules - {"numpy"}, image.row(server.release).cuda)
    install = f"pip install {' '.join(map(_quote, lines))} && " if lines else ""
    options = [
        "--rm",
        *(["--gpus all"] if _uses_gpus(configs.values(), modules) else []),  # a subset would be renumbered inside
        f"--shm-size={max(_LEAST_MIB, -(-int(manifest.get('launch', {}).get('shared_memory', 0)) // 2**20))}m",
        *_ULIMITS,
        *([f"--memory={_find_memory(configs.values(), model_memory_mib)}m"] if model_memory_mib else []),
        *(f"-p {_bracket(host)}:{port or ''}:{inside}" for port, inside in zip(ports, (8000, 8001, 8002), strict=True)),
        *(f"--mount {shlex.quote(f'type=bind,src={path},dst={path},readonly')}" for path in _mounts(manifest, configs)),
        "-e PYTHONNOUSERSITE=1",
        f"-v {shlex.quote(f'{repository.resolve()}:/models:ro')}",
        f"{REPOSITORY}:{server.version}-{image.suffix}",
    ]
    script = shlex.quote(f"{install}exec {_launch(manifest, configs.values())}")
    return " \\\n  ".join([f"docker run {options[0]}", *options[1:], f"bash -c {script}"])


def _choose_target(repository: Path, composed: str, wanted: str) -> str:
    if composed == EMBEDDED or wanted == EMBEDDED or (composed and wanted and composed != wanted):
        raise InputError(
            f"{repository} was composed for {composed}, not for {wanted or 'a container'}."
            if composed
            else f"{EMBEDDED} is not a release of NVIDIA's container.",
            f"Type: shoal compose ENSEMBLE {repository} --artifacts DIR --target {LATEST}",
        )
    return composed or wanted or LATEST


def _find_image(server: Target, backends: Collection[str], modules: Collection[str]) -> Image:
    image = server.find_image({backend for backend in backends if backend}, modules)
    if image is None:
        special = [name for name in sorted(backends) if server.find_image({name}) is None] or sorted(backends)
        raise InputError(
            f"No image of Triton {server.version} has the backends {', '.join(special)}.",
            " ".join(map(explain_backend, special)),
        )
    return image


def _find_needs(config: ModelConfig, others: Iterable[ModelConfig]) -> frozenset[str]:
    """Return the modules that a Python model needs in the server's own Python; none if it has an environment."""
    if config.backend != "python" or config.spec.parameters.get(_ENVIRONMENT):
        return frozenset()
    needs: set[str] = set()
    for folder in sorted(path.parent for path in config.folder.glob("[0-9]*/model.py")):
        found = find_imports(folder)
        needs |= found.find_needed(config.requires, on_gpu=_is_on_gpu(config))
        if found.is_ours and any(map(_is_on_gpu, others)):  # it may get tensors that another model left on a GPU
            needs |= found.later & {"cupy"}
    return frozenset(needs)


def _is_on_gpu(config: ModelConfig) -> bool:
    return any(group.kind == group.KIND_GPU for group in config.message.instance_group)


def _uses_gpus(configs: Iterable[ModelConfig], modules: Iterable[str]) -> bool:
    return "vllm" in modules or any(_is_on_gpu(config) or config.backend in _ON_GPUS for config in configs)


def _find_memory(configs: Iterable[ModelConfig], each: float) -> int:
    groups = [group for config in configs if config.backend == "python" for group in config.message.instance_group]
    return int(each * (1 + sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups)))


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else "127.0.0.1" if host == "localhost" else host


def _mounts(manifest: Mapping[str, Any], configs: Mapping[str, ModelConfig]) -> list[str]:
    """Return the folders outside of the repository that its models read: environments, weights, tokenizers, engines."""
    values = (value for config in configs.values() for value in config.spec.parameters.values())
    folders = {value for value in values if value.startswith("/") and Path(value).is_dir()}
    folders |= {path for path in manifest.get("environments", {}).values() if path.startswith("/")}
    if weights := manifest.get("weights"):
        folder = Path(weights["folder"])  # in the hub's cache, files are links into the folder two levels up
        folders.add(str(folder.parents[1] if weights["revision"] else folder))
    return sorted(path for path in folders if not any(str(parent) in folders for parent in Path(path).parents))


def _launch(manifest: Mapping[str, Any], configs: Iterable[ModelConfig]) -> str:
    """Return the command line of tritonserver: one process, or one for each rank of TensorRT-LLM's largest engine.

    The form with several ranks is that of TensorRT-LLM's ``launch_triton_server.py``.
    """
    server = ["tritonserver", "--model-repository=/models"]
    if manifest:  # the configurations of other repositories may be incomplete
        server.append("--disable-auto-complete-config")
    server += manifest.get("launch", {}).get("flags", [])
    ranks = {config.name: size for config in configs if (size := _world_size(config)) > 1}
    if not ranks:
        return shlex.join([*server, "--model-control-mode=none"])
    loads = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in sorted(ranks))]
    parts = ["mpirun", "--allow-run-as-root"]
    for rank in range(max(ranks.values())):
        prefix = f"--backend-config=python,shm-region-prefix-name=prefix{rank}_"
        parts += [":"] * bool(rank) + ["-n", "1", *server, prefix, *(loads if rank else [])]
    return shlex.join(parts)


def _world_size(config: ModelConfig) -> int:
    """Return the number of processes of a TensorRT-LLM engine, from the engine's ``config.json``; 1 if unknown."""
    folder = next((config.spec.parameters[name] for name in _ENGINES if config.spec.parameters.get(name)), "")
    try:
        about = read_json(config.folder / folder / "config.json") if folder else {}
        return int(about["pretrained_config"]["mapping"]["world_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return 1


def _quote(line: str) -> str:
    return json.dumps(line)  # in double quotes, since the whole script is in single ones
