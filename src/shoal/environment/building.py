"""Build an environment, its archive and its stub, and put them in place only if they fit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shoal
from shoal.component.artifact_files import sha256
from shoal.environment import engines
from shoal.environment.build_record import (
    ARCHIVE,
    FOLDER,
    LOG,
    Built,
    alone,
    aside_prefix,
    check_ours,
    is_whole,
    read_built,
)
from shoal.environment.compile import BUILDER
from shoal.environment.contents import Environment
from shoal.environment.elf import parse_version, show_version
from shoal.environment.engines import RATTLER, VENV
from shoal.environment.fit import check_fit
from shoal.environment.inspection import inspect
from shoal.environment.spec import Job, Wanted, read_wanted
from shoal.environment.stub import RECORD, STUB, Stub, read_stub
from shoal.environment.stub_source import AUTO, GIVEN, StubOrder, check_choice, provide_stub
from shoal.environment.targets import EMBEDDED, Target, find_target
from shoal.environment.tools import run, without_secrets
from shoal.errors import ArtifactError, InputError, SetupError, needs
from shoal.paths import check_path_supported, exchange
from shoal.progress import OnProgress

_OLDEST_PYTHON = (3, 11)  # that shoal's components run on
_COMPRESS_LEVEL = 4  # conda-pack's own; 9 takes three times as long for a few per cent


@dataclass(frozen=True)
class Request:
    """A build request: the source of an environment, the target server, and build options.

    ``python`` is a version such as ``3.12``; where empty, the one that ``source`` pins, else the target's own, else
    this process's. ``stub`` is ``auto``, ``wheel``, ``compile``, ``none`` or the path of a finished one; ``builder`` is
    the program that compiles one (see ``compile``), and ``is_for_numpy_2`` makes it fit for NumPy 2 whatever the
    environment holds. ``channels`` replace those of ``source``.
    """

    source: Path
    out: Path
    target: str = EMBEDDED
    python: str = ""
    engine: str = RATTLER
    stub: str = AUTO
    is_for_numpy_2: bool = False
    is_for_gpu: bool = False
    builder: Path | None = None
    channels: tuple[str, ...] = ()
    is_offline: bool = False


def build(request: Request, on_progress: OnProgress = lambda stage, done, total: None) -> Built:
    """Build the requested environment, or return the existing one if it is up to date.

    Everything is built in a temporary folder and moved to ``request.out`` in one step, once environment, stub and
    target are known to fit: a full disk or an interruption leaves ``request.out`` unchanged.

    Raises:
        InputError: the request cannot be fulfilled.
        SetupError: a tool is missing or failed, or the disk is full.
        ArtifactError: environment, stub and target do not fit.
    """
    target, out = find_target(request.target), request.out.resolve()
    check_path_supported(out)
    engines.check_engine(request.engine, target)
    wanted = read_wanted(request.source)
    python = request.python or wanted.python or _default_python(target)
    if wanted.conda or wanted.pip:
        wanted = wanted.with_python(python)
    check_choice(request.stub, request.builder, target, is_for_numpy_2=request.is_for_numpy_2)
    inputs = _digest(request, wanted, python)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with alone(out):
            check_ours(out)
            there = read_built(out)
            if there and there.record.get("inputs") == inputs and is_whole(out, there):
                return there
            _replace(request, wanted, python, target, out, inputs, on_progress)
    except OSError as error:
        raise SetupError(
            f"{out} cannot be built: {error.strerror or error}.", "What was there, if anything, is unchanged."
        ) from error
    built = read_built(out)
    assert built
    return replace(built, is_new=True)


def _replace(
    request: Request, wanted: Wanted, python: str, target: Target, out: Path, inputs: str, on_progress: OnProgress
) -> None:
    """Build in a temporary folder, and move the result to ``out``."""
    aside = Path(tempfile.mkdtemp(prefix=aside_prefix(out), dir=out.parent))
    try:
        record = _make(request, wanted, python, target, aside, out, on_progress)
        (aside / RECORD).write_text(json.dumps({**record, "inputs": inputs}, indent=1) + "\n", encoding="utf-8")
        aside.chmod(0o755)
        exchange(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make(
    request: Request,
    wanted: Wanted,
    python: str,
    target: Target,
    aside: Path,
    out: Path,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Fill ``aside``; returns its record."""
    log = out.with_name(f"{out.name}.{LOG}")
    log.write_bytes(b"")
    oldest = min(filter(None, (target.glibc, find_target(EMBEDDED).glibc)), default=())  # it must run here, too
    job = Job(python, request.channels or wanted.channels, request.is_offline, log, show_version(oldest))
    prefix = wanted.folder or aside / FOLDER
    is_venv = request.engine == VENV and not wanted.folder
    with _stage(on_progress, "environment"):
        if not wanted.folder:
            engines.make(request.engine, wanted, prefix, job)
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
        order = StubOrder(
            request.stub,
            there,
            target,
            is_for_numpy_2=request.is_for_numpy_2,
            is_for_gpu=request.is_for_gpu,
            builder=request.builder,
            is_offline=request.is_offline,
        )
        made = provide_stub(order, aside / STUB, log)
    with _stage(on_progress, "pack"):
        if is_venv:
            engines.relocate(prefix, out / FOLDER)
        else:
            pack(prefix, aside / ARCHIVE, log)
            if not wanted.folder:
                shutil.rmtree(prefix)
    with _stage(on_progress, "verify"):
        environment = inspect(aside / (FOLDER if is_venv else ARCHIVE))
        stub = _read_stub(aside / STUB, request, target, made) if made else None
        check_fit(environment, stub, target, f"The environment of {request.source.name}")
    log.rename(aside / LOG)
    return _record(request, job.channels, environment, stub, made, target, aside)


def _read_stub(path: Path, request: Request, target: Target, made: str) -> Stub:
    """Read the stub, with its release: the target's if it was made for it, else that of its own record."""
    if made == GIVEN:
        return replace(read_stub(path), release=read_stub(Path(request.stub)).release)
    return replace(read_stub(path), release=target.version)


def pack(prefix: Path, archive: Path, log: Path) -> None:
    """Pack a conda environment with conda-pack.

    Raises:
        InputError: it is not a conda environment.
        SetupError: conda-pack refused it.
    """
    if not (prefix / "conda-meta").is_dir():
        is_venv = (prefix / "pyvenv.cfg").is_file()
        raise InputError(
            f"{prefix} is {'a venv, whose Python is outside of it' if is_venv else 'not a conda environment'}.",
            "List its packages and build from that: pip freeze > requirements.txt",
        )
    with needs("env"):
        import conda_pack  # noqa: F401  # a missing library is reported here, not in the log of the other process
    # In a process of its own: its threads would print to our terminal, and its temporary file may stay behind.
    command: list[str | Path] = [sys.executable, "-P", "-m", "conda_pack.cli", "--prefix", prefix, "--output", archive]
    options = ["--quiet", "--n-threads", "-1", "--compress-level", str(_COMPRESS_LEVEL), "--exclude", "CACHEDIR.TAG"]
    run([*command, *options], log=log, what="Packing by conda-pack", variables={"TMPDIR": str(archive.parent)})
    archive.chmod(0o644)


def _record(
    request: Request,
    channels: tuple[str, ...],
    environment: Environment,
    stub: Stub | None,
    made: str,
    target: Target,
    folder: Path,
) -> dict[str, Any]:
    return {
        "format": 1,
        "shoal": shoal.__version__,
        "environment": environment.source.name,
        "stub": {"made": made, "release": stub.release, "bears_numpy_2": stub.bears_numpy_2} if stub else None,
        "target": target.name,
        "python": environment.python,
        "numpy": environment.numpy,
        "platform": f"linux-{environment.machine or target.machine}",
        "glibc": show_version(environment.glibc.version),
        "glibcxx": show_version(environment.glibcxx.version),
        "num_bytes": environment.num_bytes,
        "package_bytes": environment.package_bytes,
        "made": {
            "engine": request.engine,
            "from": request.source.name,
            "channels": list(map(without_secrets, channels)),
        },
        "packages": {package.name: package.version for package in environment.packages},
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()},
    }


def _default_python(target: Target) -> str:
    """Return the target's own, if shoal's components run on it; else, and for the embedded server, this process's."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    return target.python if parse_version(target.python) >= _OLDEST_PYTHON else running


def _digest(request: Request, wanted: Wanted, python: str) -> str:
    parts = (
        shoal.__version__,
        wanted.digest,
        python,
        request.target,
        request.engine,
        request.stub,
        request.is_for_numpy_2,
        request.is_for_gpu,
        request.channels,
        *_digest_of_files(request),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _digest_of_files(request: Request) -> list[str]:
    """Return the sha256 of files named besides the source: a finished stub, a build program."""
    builder = str(request.builder or os.environ.get(BUILDER, ""))
    return [sha256(Path(name)) for name in (request.stub, builder) if Path(name).is_file()]


@contextlib.contextmanager
def _stage(on_progress: OnProgress, name: str) -> Iterator[None]:
    on_progress(name, 0, 1)
    yield
    on_progress(name, 1, 1)
