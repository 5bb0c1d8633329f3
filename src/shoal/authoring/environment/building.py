"""Build an environment, its archive and its stub, and replace the previous build only if they fit the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shoal
from shoal.authoring.environment import engines
from shoal.authoring.environment.embedded import STUB
from shoal.authoring.environment.engines import VENV, install, run, without_secrets
from shoal.authoring.environment.fit import check_fit
from shoal.authoring.environment.inspection import inspect
from shoal.authoring.environment.spec import BuildRequest, BuildSettings, Wanted, read_wanted
from shoal.authoring.environment.stub import RECORD, parse_version, read_stub, show_version
from shoal.authoring.environment.stub_source import GIVEN, check_choice, provide_stub
from shoal.authoring.environment.targets import EMBEDDED, OLDEST_PYTHON, Target, find_target
from shoal.errors import ArtifactError, InputError, SetupError, needs
from shoal.kit.component.files import find_changed, sha256
from shoal.system.files import read_json
from shoal.system.paths import alone, aside, check_path_supported, check_replaceable, exchange, shipped_root
from shoal.system.progress import OnProgress

ARCHIVE, FOLDER, LOG = "custom_env.tar.gz", "environment", "build.log"
_OWN = {"llm-vllm": "-vllm"}  # models that need an environment of their own, and the ending of its file name
_COMPRESS_LEVEL = 4  # conda-pack's default; 9 takes three times as long, for a few per cent less


@dataclass(frozen=True)
class Built:
    """A built environment: the files for Triton, and the record of how they were made."""

    environment: Path
    stub: Path | None
    record: dict[str, Any]
    is_new: bool = False


def read_built(folder: Path) -> Built | None:
    """Return the build in ``folder``, from its record ``env.json``; None if there is no readable record."""
    try:
        record = read_json(folder / RECORD)
        environment, stub = folder / record["environment"], record["stub"]
        if not isinstance(record["files"], dict):
            return None
        return Built(environment.absolute(), (folder / STUB).absolute() if stub else None, record)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def locate(place: Path) -> tuple[Path, Path | None]:
    """Return the paths of the environment and the stub that are built at ``place``; the stub is None if there is none.

    If ``place`` is not the output of a build, it is taken for the environment itself, without a stub.
    """
    built = read_built(place)
    return (built.environment, built.stub) if built else (place.absolute(), None)


def is_whole(out: Path, built: Built) -> bool:
    """Whether the files of the build in ``out`` are unchanged and, for a venv, its Python interpreter still exists."""
    files: dict[str, str] = built.record["files"]
    environment = built.environment
    return not find_changed(out, files) and (environment.is_file() or (environment / "bin" / "python3").exists())


def find_file(target: str, engine: str, *, is_for_gpu: bool, model: str = "") -> Path:
    """Return the path of shoal's own ``environment.yml``, or ``requirements.txt`` for the engine ``venv``.

    It lists the packages of the readability components: for a GPU, for the CPU, or for a server that does not support
    NumPy 2. With ``model``, it lists the packages of that model, which needs an environment of its own.

    Raises:
        InputError: the stub of ``target`` does not support NumPy 2, which RAPIDS needs, or its CUDA is older than that
            of the file; or ``model`` does not need an environment of its own.
    """
    is_old = not find_target(target).supports_numpy_2
    if model:
        if model not in _OWN:
            raise InputError(f"{model} does not need an environment of its own.", f"Known: {', '.join(_OWN)}.")
        name = f"requirements{_OWN[model]}.txt" if engine == VENV else f"environment{_OWN[model]}.yml"
        return shipped_root() / "env" / name
    if is_for_gpu and is_old:
        raise InputError(
            f"RAPIDS needs NumPy 2, whose tensors the stub of target {target} corrupts.",
            "Name a release from 24.11 on, such as --target 26.06; or a file of your own, and --stub compile.",
        )
    if is_for_gpu and (cuda := find_target(target).row.cuda) < 13:
        raise InputError(
            f"This file has RAPIDS for CUDA 13, and the images of {target} have CUDA {cuda}.",
            "Name a release from 25.08 on, such as --target 26.06; or a file of your own.",
        )
    flavour = "-gpu" if is_for_gpu else "-embedded" if is_old else ""
    name = f"requirements{flavour}.txt" if engine == VENV else f"environment{flavour}.yml"
    return shipped_root() / "env" / name


def find_overrides(target: str, model: str) -> tuple[str, ...]:
    """Return the packages that pip installs last into the environment of ``model``; empty for most models and servers.

    For ``llm-vllm`` on a server that does not support NumPy 2, this is NumPy 1. Some packages that vLLM depends on
    require NumPy 2, but the parts of them that vLLM uses also work with NumPy 1.
    """
    return ("numpy>=1.26,<2",) if model in _OWN and not find_target(target).supports_numpy_2 else ()


def build(request: BuildRequest, on_progress: OnProgress = lambda stage, done, total: None) -> Built:
    """Build the requested environment, or return the existing build if it is up to date.

    Everything is built in a temporary folder. It replaces ``request.out`` in one step, after a check that environment,
    stub and target fit together. An error, a full disk or an interruption leaves ``request.out`` unchanged.

    Raises:
        InputError: the request cannot be fulfilled.
        SetupError: a tool is missing or failed, or the disk is full.
        ArtifactError: environment, stub and target do not fit together.
    """
    target, out = find_target(request.target), request.out.resolve()
    check_path_supported(out)
    engines.check_engine(request.engine, target)
    wanted = read_wanted(request.source)
    python = request.python or wanted.python or _default_python(target)
    if wanted.conda or wanted.pip:
        wanted = wanted.with_python(python)
    check_choice(request)
    inputs = _digest(request, wanted, python)
    log = out.with_name(f"{out.name}.{LOG}")
    # The environment must also run on this machine.
    oldest = min(filter(None, (target.glibc, find_target(EMBEDDED).glibc)), default=())
    job = BuildSettings(python, request.channels or wanted.channels, log, show_version(oldest))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with alone(out, "build"):
            check_replaceable(out, RECORD, (FOLDER,))
            there = read_built(out)
            if there and there.record.get("inputs") == inputs and is_whole(out, there):
                return there
            with aside(out) as folder:
                record = {**_make(request, wanted, target, job, folder, on_progress), "inputs": inputs}
                (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                exchange(folder, out)
    except OSError as error:
        raise SetupError(
            f"{out} cannot be built: {error.strerror or error}.", "What was there, if anything, is unchanged."
        ) from error
    built = read_built(out)
    assert built
    return replace(built, is_new=True)


def _make(
    request: BuildRequest, wanted: Wanted, target: Target, job: BuildSettings, folder: Path, on_progress: OnProgress
) -> dict[str, Any]:
    """Build environment and stub in ``folder``, which ``build`` moves to ``request.out`` later; returns the record."""
    job.log.write_bytes(b"")
    prefix = wanted.folder or folder / FOLDER
    is_venv = request.engine == VENV and not wanted.folder
    with _stage(on_progress, "environment"):
        if not wanted.folder:
            engines.make(request.engine, wanted, prefix, job)
            if request.overrides:
                install(prefix, request.overrides, log=job.log)
        there = inspect(prefix, reads_binaries=False)
        if request.python and request.python != there.python_minor:
            raise InputError(
                f"{request.source.name} brings Python {there.python}, and --python asks for {request.python}.",
                "Leave --python out, or name another source.",
            )
        if there.editable:
            raise ArtifactError(
                f"In {request.source.name}, {there.editable[0]}.",
                "Triton's machine will not have that folder: install the package as a wheel, without -e.",
            )
    with _stage(on_progress, "stub"):
        made = provide_stub(request, there, target, folder / STUB, job.log)
    with _stage(on_progress, "pack"):
        if is_venv:
            engines.relocate(prefix, request.out.resolve() / FOLDER)
        else:
            pack(prefix, folder / ARCHIVE, job.log)
            if not wanted.folder:
                shutil.rmtree(prefix)
    with _stage(on_progress, "verify"):
        environment = inspect(folder / (FOLDER if is_venv else ARCHIVE))
        stub = read_stub(folder / STUB) if made else None
        if stub:  # a finished stub may have a record beside it; other stubs are made for the target
            release = read_stub(Path(request.stub)).release if made == GIVEN else target.version
            stub = replace(stub, release=release)
        check_fit(environment, stub, target, f"The environment of {request.source.name}")
    job.log.rename(folder / LOG)
    return {
        "format": 1,
        "shoal": shoal.__version__,
        "environment": environment.source.name,
        "stub": {"made": made, "release": stub.release, "supports_numpy_2": stub.supports_numpy_2} if stub else None,
        "target": target.name,
        "python": environment.python,
        "numpy": environment.numpy,
        "platform": f"linux-{environment.machine or target.machine}",
        "glibc": show_version(environment.glibc.version),
        "glibcxx": show_version(environment.glibcxx.version),
        "num_bytes": environment.num_bytes,
        "made": {
            "engine": request.engine,
            "from": request.source.name,
            "channels": list(map(without_secrets, job.channels)),
        },
        "packages": {package.name: package.version for package in environment.packages},
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()},
    }


def pack(prefix: Path, archive: Path, log: Path) -> None:
    """Pack the conda environment at ``prefix`` into ``archive`` with conda-pack.

    Raises:
        InputError: ``prefix`` is not a conda environment.
        SetupError: conda-pack failed.
    """
    if not (prefix / "conda-meta").is_dir():
        is_venv = (prefix / "pyvenv.cfg").is_file()
        raise InputError(
            f"{prefix} is {'a venv, whose Python is outside of it' if is_venv else 'not a conda environment'}.",
            "List its packages and build from that list: pip freeze > requirements.txt",
        )
    with needs("env"):
        import conda_pack  # noqa: F401  # a missing library is reported here, not in the log of the other process
    # conda-pack gets a process: its threads would print to our terminal, and its temporary file may stay behind.
    command: list[str | Path] = [sys.executable, "-P", "-m", "conda_pack.cli", "--prefix", prefix, "--output", archive]
    options = ["--quiet", "--n-threads", "-1", "--compress-level", str(_COMPRESS_LEVEL), "--exclude", "CACHEDIR.TAG"]
    run([*command, *options], log=log, what="Packing by conda-pack", variables={"TMPDIR": str(archive.parent)})
    archive.chmod(0o644)


def _default_python(target: Target) -> str:
    """Return the target's Python version if shoal's components support it, else this process's Python version."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    return target.python if parse_version(target.python) >= OLDEST_PYTHON else running


def _digest(request: BuildRequest, wanted: Wanted, python: str) -> str:
    """Return a hash of everything that a build depends on, including the contents of files that ``request`` names."""
    options = replace(request, source=Path(), out=Path(), python=python, builder=None)
    files = [sha256(path) for path in (Path(request.stub), request.builder) if path and path.is_file()]
    return hashlib.sha256(repr((shoal.__version__, wanted.digest, options, files)).encode()).hexdigest()


@contextlib.contextmanager
def _stage(on_progress: OnProgress, name: str) -> Iterator[None]:
    on_progress(name, 0, 1)
    yield
    on_progress(name, 1, 1)
