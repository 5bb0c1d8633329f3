"""NVIDIA's Triton container for a repository: its image, packages and mounts, and the command of Triton alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.authoring.check.targets import check_backends
from shoal.authoring.environment.imports import find_imports, find_requirements
from shoal.authoring.environment.targets import BACKENDS, EMBEDDED, IMAGES, LATEST, find_target
from shoal.authoring.project.recipes import RECORD
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.launch_flags import CACHE_MIB, find_launch_flags
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.model_folders import read_configs
from shoal.errors import InputError
from shoal.serving.server.container_needs import ENGINES, find_devices, find_named_folders
from shoal.system.files import read_json

REPOSITORY = "nvcr.io/nvidia/tritonserver"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_GPU = 1  # instance kind KIND_GPU
_LEAST_MIB = 1024  # of shared memory, as in NVIDIA's guides; it is taken only when it is used
_ULIMITS = ("--ulimit memlock=-1", "--ulimit stack=67108864")


@dataclass(frozen=True)
class Container:
    """NVIDIA's container of a release for one repository, which is mounted at ``/models``.

    ``image`` has its tag, ``python`` is the version of its Python, ``modules`` are those that it has. ``packages`` are
    lines for pip, ``options`` those of ``docker run`` for memory and devices, and ``mounts`` folders outside of the
    repository. ``server`` is the command line of Triton alone, with ``num_ranks`` processes; ``num_stubs`` is the
    number of Python models' processes. ``undeclared`` are the models whose inputs or outputs Triton must complete.
    """

    repository: Path
    image: str
    python: str
    modules: frozenset[str]
    packages: list[str]
    options: list[str]
    mounts: list[str]
    server: str
    num_ranks: int
    num_stubs: int
    undeclared: list[str]

    def show(self, options: Iterable[str], script: str) -> str:
        """Return the ``docker run`` that runs a script for bash, in several lines; ``options`` are further ones."""
        mounts = (mount_option(path, path) for path in self.mounts)
        models = f"-v {shlex.quote(f'{self.repository.resolve()}:/models:ro')}"
        parts = ["docker run --rm", *self.options, *options, *mounts, "-e PYTHONNOUSERSITE=1", models, self.image]
        return " \\\n  ".join([*parts, f"bash -c {shlex.quote(script)}"])

    def install(self, *more: str) -> str:
        """Return the command that installs the packages, and ``more``; empty if there are none."""
        # In double quotes, since the whole script is in single ones.
        lines = [*more, *self.packages]
        return f"pip install {' '.join(map(json.dumps, lines))} && " if lines else ""


def find_container(repository: Path, *, target: str = "", cache_mib: float = CACHE_MIB) -> Container:
    """Return the container that serves a repository.

    ``target`` is the release, by default that for which the repository was composed, else the newest known one.
    ``cache_mib`` is the size of the response cache, if a model has one.

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
    server = find_target(choose_target(repository, target))
    members = [config for config in configs.values() if not config.is_ensemble]
    named = [folder for config in members for folder in find_named_folders(config)]
    check_backends(members, server.name)
    kinds = {group.kind for config in members for group in config.message.instance_group}
    needs = {config.name: _find_needs(config) for config in members}
    for name in (name for name, each in needs.items() if "shoal" in each):
        raise InputError(
            f"Model {name} imports shoal, of which it has no copy, and the image has none either.",
            f"Compose it: shoal compose {name} REPOSITORY --project FOLDER --target {server.version}",
        )
    needed = frozenset[str]().union(*needs.values())
    image = server.find_image({config.backend for config in members} & BACKENDS, needed) or IMAGES[0]
    row, modules = image.row(server.release), image.modules | {"numpy"}
    if _GPU in kinds and "torch" not in needed | modules:  # by which components else take tensors from a GPU
        needed = needed.union(*(_find_needs(config, is_beside_gpu=True) for config in members))
    ranks = {config.name: size for config in members if (size := _world_size(config)) > 1}
    shared_memory = int(manifest.get("launch", {}).get("shared_memory", 0))
    return Container(
        repository=repository,
        image=f"{REPOSITORY}:{server.version}-{image.suffix}",
        python=row.python,
        modules=modules,
        packages=find_requirements(needed - modules, row.cuda, row.python),
        options=[*find_devices(members), f"--shm-size={max(_LEAST_MIB, -(-shared_memory // 2**20))}m", *_ULIMITS],
        mounts=_mounts(manifest, named),
        server=_launch(manifest, ranks, find_launch_flags(repository, cache_mib)),
        num_ranks=max(ranks.values(), default=1),
        num_stubs=_count_stubs(members),
        undeclared=[config.name for config in members if not (config.spec.inputs and config.spec.outputs)],
    )


def container_command(
    repository: Path,
    *,
    target: str = "",
    host: str = "127.0.0.1",
    ports: tuple[int, int, int] = (8000, 8001, 8002),
    model_memory_mib: float = 0.0,
    cache_mib: float = CACHE_MIB,
) -> str:
    """Return the shell command that serves a repository from NVIDIA's Triton alone, without shoal's service.

    The ports for HTTP, gRPC and metrics are those of this machine, at the address ``host``; 0 is any free port. If
    ``model_memory_mib`` is given, the container gets so many MiB for each process of a Python model, and as much for
    Triton itself. See ``find_container`` for the others, and for the errors.
    """
    container = find_container(repository, target=target, cache_mib=cache_mib)
    address = f"[{host}]" if ":" in host else host.replace("localhost", "127.0.0.1")
    options = [
        *([f"--memory={int(model_memory_mib * (1 + container.num_stubs))}m"] if model_memory_mib else []),
        *(f"-p {address}:{port or ''}:{inside}" for port, inside in zip(ports, (8000, 8001, 8002), strict=True)),
    ]
    return container.show(options, f"{container.install()}exec {container.server}")


def mount_option(source: Path | str, path: str, *, is_written: bool = False) -> str:
    """Return the option of ``docker run`` that mounts a folder or a file of this machine at ``path``."""
    return f"--mount {shlex.quote(f'type=bind,src={source},dst={path}' + ',readonly' * (not is_written))}"


def choose_target(repository: Path, wanted: str = "") -> str:
    """Return the release for which a repository was composed, else the ``wanted`` one, else the newest known one.

    Raises:
        InputError: it was composed for another one, or for the embedded server.
    """
    composed = str(read_manifest(repository).get("target", ""))
    if composed == EMBEDDED or wanted == EMBEDDED or (composed and wanted and composed != wanted):
        release = wanted.replace(EMBEDDED, "") or LATEST
        place = repository if repository.name.strip(".") else repository.resolve()
        names = " ".join(read_manifest(repository).get("ensembles", ())) or "ENSEMBLE"
        is_made = (place.parent / RECORD).is_file()  # by shoal serve, of one model
        parts = f"--project {place.parent}" if is_made else "--artifacts DIR"
        raise InputError(
            f"{repository} was composed for {composed}, not for {wanted or 'a container'}."
            if composed
            else f"{EMBEDDED} is not a release of NVIDIA's container.",
            # into another folder: this one may be served
            f"Type: shoal compose {names} {place}-{release} {parts} --target {release}",
        )
    return composed or wanted or LATEST


def _find_needs(config: ModelConfig, *, is_beside_gpu: bool = False) -> frozenset[str]:
    """Return the modules that a Python model needs in the server's own Python; none if it has an environment."""
    if config.backend not in ("python", "") or config.spec.parameters.get(_ENVIRONMENT):
        return frozenset()
    kinds = {group.kind for group in config.message.instance_group}
    found = (find_imports(path.parent) for path in config.folder.glob("[0-9]*/model.py"))
    is_beside_gpu = is_beside_gpu and bool(config.calls or not config.gets_host_inputs)
    needed = (each.find_needed(on_gpu=_GPU in kinds, is_beside_gpu=is_beside_gpu) for each in found)
    return frozenset(config.requires).union(*needed)


def _mounts(manifest: Mapping[str, Any], named: Iterable[str]) -> list[str]:
    """Return the folders outside of the repository that its models read: environments, weights, tokenizers, engines."""
    folders = {*named, *(path for path in manifest.get("environments", {}).values() if path.startswith("/"))}
    if weights := manifest.get("weights"):
        folder = Path(weights["folder"])  # in the hub's cache, files are links into the folder two levels up
        folders.add(str(folder.parents[1] if weights["revision"] else folder))
    return sorted(path for path in folders if not any(str(parent) in folders for parent in Path(path).parents))


def _launch(manifest: Mapping[str, Any], ranks: Mapping[str, int], flags: Iterable[str]) -> str:
    """Return the command line of tritonserver: one process, or one for each rank of TensorRT-LLM's largest engine.

    ``ranks`` are those of the models with several. The form is that of TensorRT-LLM's ``launch_triton_server.py``.
    """
    server = ["tritonserver", "--model-repository=/models"]
    if manifest:  # the configurations of other repositories may be incomplete
        server.append("--disable-auto-complete-config")
    server += flags
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
    folder = next((config.spec.parameters[name] for name in ENGINES if config.spec.parameters.get(name)), "")
    path = config.folder.parent / folder.removeprefix("/models/")  # an absolute one replaces what is before it
    try:
        about = read_json(path / "config.json") if folder else {}
        return int(about["pretrained_config"]["mapping"]["world_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return 1


def _count_stubs(configs: Iterable[ModelConfig]) -> int:
    """Return the number of processes of Python models."""
    groups = [group for config in configs if config.backend == "python" for group in config.message.instance_group]
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups)
