"""Engines that make an environment: a user's conda, rattler, or Python's own venv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from shoal.environment.rattler import make_rattler
from shoal.environment.spec import Job, Wanted
from shoal.environment.targets import Target
from shoal.environment.tools import install, run
from shoal.errors import InputError, SetupError

RATTLER, VENV = "rattler", "venv"
CONDAS = ("conda", "mamba", "micromamba")
ENGINES = (RATTLER, *CONDAS, VENV)


def check_engine(engine: str, target: Target) -> None:
    """Refuse an engine that is not known, or whose environments the target could not run.

    Raises:
        InputError: it names the engines to use.
    """
    if engine not in ENGINES:
        raise InputError(f"Unknown engine {engine!r}.", f"Known: {', '.join(ENGINES)}.")
    if engine == VENV and not target.is_embedded:
        raise InputError(
            f"A venv's Python is outside of it, and {target.name} runs in a container without it.",
            f"Use --engine {RATTLER}, which packs one that holds its Python.",
        )


def make(engine: str, wanted: Wanted, prefix: Path, job: Job) -> None:
    """Make the environment ``wanted`` at ``prefix``, which must not exist.

    Raises:
        InputError: the engine cannot make it.
        SetupError: the engine is not installed, or failed.
    """
    if engine == VENV:
        make_venv(wanted, prefix, job)
    elif engine == RATTLER:
        make_rattler(wanted, prefix, job)
    else:
        make_conda(engine, wanted, prefix, job)
    if wanted.pip:
        install(prefix, wanted.pip, is_offline=job.is_offline, log=job.log)


def make_conda(tool: str, wanted: Wanted, prefix: Path, job: Job) -> None:
    """Make the environment ``wanted`` with ``tool``, which understands conda's command line."""
    program = shutil.which(tool)
    if program is None:
        raise SetupError(f"{tool} is not installed.", f"Install it, or use --engine {RATTLER}, which needs no conda.")
    if wanted.lock:
        raise InputError(f"{tool} cannot read {wanted.source.name}.", f"Use --engine {RATTLER}.")
    options: list[str | Path] = ["--yes", "--prefix", prefix, *(["--offline"] if job.is_offline else [])]
    variables = {"CONDA_OVERRIDE_GLIBC": job.glibc} if job.glibc else {}
    if wanted.urls:
        packages: list[str | Path] = ["--file", wanted.source]
    else:
        channels = [channel for channel in job.channels if channel != "nodefaults"]
        packages = [word for channel in channels for word in ("--channel", channel)]
        packages += [*(["--override-channels"] if channels else []), *wanted.specs]
    run([program, "create", *options, *packages], log=job.log, what=f"Installing by {tool}", variables=variables)


def make_venv(wanted: Wanted, prefix: Path, job: Job) -> None:
    """Make a venv. Its Python stays outside of it: for servers on this machine only.

    Raises:
        InputError: it holds conda packages.
        SetupError: there is no such Python, or it has no shared library for the stub.
    """
    if not wanted.is_pip_only:
        raise InputError(
            f"{wanted.source.name} asks for conda packages, which a venv cannot hold.",
            f"Use --engine {RATTLER}, or name a requirements.txt.",
        )
    base = find_python(job.python)
    run([base, "-m", "venv", prefix], log=job.log, what="Making the venv")
    link_libpython(base, prefix)


def find_python(version: str) -> Path:
    """Find the interpreter of a version such as ``3.12``: this one, one on PATH, or one of pyenv's.

    Raises:
        SetupError: there is none.
    """
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.base_prefix) / "bin" / f"python{version}"
    home = Path(os.environ.get("HOME", "/nonexistent"))  # where HOME is not set, Path.home() may raise
    pyenv = sorted(home.glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for candidate in [*pyenv[-1:], shutil.which(f"python{version}")]:
        # pyenv's shims are on PATH for every version, also for those that it would refuse to run
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(candidate)
    raise SetupError(
        f"There is no python{version} on this machine.", f"Install it, or use --engine {RATTLER}, which brings its own."
    )


def link_libpython(base: Path, prefix: Path) -> None:
    """Put a Python's shared library where Triton's stub looks for it: into the environment's ``lib/``.

    Raises:
        SetupError: that Python has none.
    """
    code = "import json, sysconfig as s; print(json.dumps([s.get_config_var(n) for n in ('LIBDIR', 'INSTSONAME')]))"
    answer = subprocess.run([base, "-c", code], capture_output=True, text=True, check=True).stdout
    folder, name = json.loads(answer)
    library = Path(folder) / str(name)
    if not str(name).endswith(".so.1.0") or not library.is_file():
        raise SetupError(
            f"{base} has no shared library, which Triton's stub loads.",
            f"Use a Python built with --enable-shared; on Debian and Ubuntu: apt install lib{base.name}",
        )
    (prefix / "lib" / library.name).symlink_to(library)


def relocate(prefix: Path, target: Path) -> None:
    """Rewrite the paths in a venv that is about to be moved from ``prefix`` to ``target``."""
    for path in [prefix / "pyvenv.cfg", *(prefix / "bin").iterdir()]:
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if str(prefix).encode() in content:
                path.write_bytes(content.replace(str(prefix).encode(), str(target).encode()))
