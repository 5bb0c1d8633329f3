"""Tools that make an environment: rattler, an installed conda, mamba or micromamba, Python's venv, and pip.

Each tool runs in a process of its own and writes to a log. If it fails, the error quotes one line of the log as the
reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from shoal.authoring.environment.spec import BuildSettings, Wanted
from shoal.authoring.environment.targets import Target
from shoal.errors import InputError, SetupError, needs
from shoal.system.processes import bound

RATTLER, VENV = "rattler", "venv"
CONDAS = ("conda", "mamba", "micromamba")
ENGINES = (RATTLER, *CONDAS, VENV)

# Variables that would let packages of this process, or of this user, into the environment that is being made.
_LEAKS = """PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON
    PIP_REQUIRE_VIRTUALENV""".split()
_LONG = 600  # maximum length of a reason, in characters
_TAIL = 200  # number of last lines that are searched for a reason
_REASONS = ("No space left on device", "ERROR:", "ensurepip is not", "fatal:", "CMake Error", "error:", "Error:")
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")  # conda's own `defaults`

Platform = Literal["linux-64", "noarch"]
PLATFORMS: list[Platform] = ["linux-64", "noarch"]


def check_engine(engine: str, target: Target) -> None:
    """Check that ``engine`` is a known tool, and that the target can run the environments that it makes.

    Raises:
        InputError: the engine is unknown, or the target cannot run its environments.
    """
    if engine not in ENGINES:
        raise InputError(f"Unknown engine {engine!r}.", f"Known: {', '.join(ENGINES)}.")
    if engine == VENV and not target.is_embedded:
        raise InputError(
            f"A venv's Python is outside of it, and {target.name} runs in a container without it.",
            f"Use --engine {RATTLER}, which packs an environment with its Python.",
        )


def make(engine: str, wanted: Wanted, prefix: Path, job: BuildSettings) -> None:
    """Make an environment with the packages ``wanted`` at the path ``prefix``, which must not exist.

    Raises:
        InputError: the engine cannot make this environment.
        SetupError: the engine is not installed, or failed.
    """
    if engine == VENV:
        make_venv(wanted, prefix, job)
    elif engine == RATTLER:
        make_rattler(wanted, prefix, job)
    else:
        make_conda(engine, wanted, prefix, job)
    if wanted.pip:
        install(prefix, wanted.pip, log=job.log)


# --- rattler: solves and installs conda packages without conda ----------------------------------------------------


def make_rattler(wanted: Wanted, prefix: Path, job: BuildSettings) -> None:
    """Make the environment ``wanted`` with rattler.

    rattler runs in a process of its own. Its threads continue to write for a while after an error or Ctrl-C, end only
    when their process ends, and may crash an interpreter that is shutting down.

    Raises:
        InputError: no channel is named.
        SetupError: rattler failed: a channel or package is not available, or the requested versions exclude one
            another.
    """
    with needs("env"):
        import rattler  # noqa: F401  # a missing library is reported here, not in the log of the other process
    channels = [url for name in job.channels for url in (_DEFAULTS if name == "defaults" else (name,))]
    if not channels:
        raise InputError(f"{wanted.source.name} names no channels.", "Name them: --channel conda-forge")
    order = {
        "conda": wanted.specs,
        "channels": [channel for channel in channels if channel != "nodefaults"],
        "prefix": str(prefix),  # absolute: it is written into files unchanged
    }
    variables = {"CONDA_OVERRIDE_GLIBC": job.glibc} if job.glibc else {}
    command = [
        sys.executable,
        "-P",
        "-m",
        "shoal.authoring.environment.engines",
    ]  # the order may hold a channel's password
    run(command, log=job.log, what="Installing by rattler", variables=variables, given=json.dumps(order))


def main(order: dict[str, Any]) -> None:
    """Run rattler as ``order`` says, then exit: the main function of rattler's process."""
    code = 0
    try:
        asyncio.run(_run_rattler(order))
    except Exception as error:  # rattler's exceptions have no common base class; the user reads the text
        code = 1
        sys.stdout.write(f"error: {without_secrets(' '.join(str(error).split()))}\n")
    sys.stdout.flush()
    os._exit(code)


async def _run_rattler(order: dict[str, Any]) -> None:
    import rattler
    from rattler.exceptions import InvalidMatchSpecError

    specs = []
    for spec in order["conda"]:
        try:
            specs.append(rattler.MatchSpec(spec))
        except InvalidMatchSpecError as error:
            raise ValueError(f"{spec!r} is not a package specification: {error}") from None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("RATTLER_CACHE_DIR") or user_cache / "rattler" / "cache").absolute()
    records = await rattler.solve(
        [rattler.Channel(channel) for channel in order["channels"]],
        specs,
        rattler.Gateway(cache_dir=cache),
        platforms=PLATFORMS,
        virtual_packages=rattler.VirtualPackage.detect(rattler.VirtualPackageOverrides.from_env()),
    )
    sys.stdout.writelines(f"{without_secrets(record.url)}\n" for record in records)
    await rattler.install(
        records, order["prefix"], cache_dir=cache / "pkgs", platform=rattler.Subdir("linux-64"), show_progress=False
    )


# --- conda, venv, pip --------------------------------------------------------------------------------------------


def make_conda(tool: str, wanted: Wanted, prefix: Path, job: BuildSettings) -> None:
    """Make the environment ``wanted`` with ``tool``: conda, or a program with the same command line."""
    program = shutil.which(tool)
    if program is None:
        raise SetupError(f"{tool} is not installed.", f"Install it, or use --engine {RATTLER}, which needs no conda.")
    variables = {"CONDA_OVERRIDE_GLIBC": job.glibc} if job.glibc else {}
    channels = [channel for channel in job.channels if channel != "nodefaults"]
    options: list[str | Path] = ["--yes", "--prefix", prefix]
    options += [word for channel in channels for word in ("--channel", channel)]
    options += ["--override-channels"] if channels else []
    run([program, "create", *options, *wanted.specs], log=job.log, what=f"Installing by {tool}", variables=variables)


def make_venv(wanted: Wanted, prefix: Path, job: BuildSettings) -> None:
    """Make a venv, for a server on this machine only: the Python interpreter of a venv is outside of it.

    Raises:
        InputError: ``wanted`` lists conda packages.
        SetupError: no interpreter of that Python version is installed, or it has no shared library for the stub.
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
    """Find the interpreter of a version such as ``3.12``: this process's, one that pyenv installed, or one on PATH.

    Raises:
        SetupError: there is no such interpreter.
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
    """Link the shared library of the interpreter ``base`` into an environment's ``lib/``, where stubs look for it.

    Raises:
        SetupError: that Python has no shared library.
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
    """Rewrite the paths in the files of a venv that is about to be moved from ``prefix`` to ``target``."""
    for path in [prefix / "pyvenv.cfg", *(prefix / "bin").iterdir()]:
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if str(prefix).encode() in content:
                path.write_bytes(content.replace(str(prefix).encode(), str(target).encode()))


def install(prefix: Path, lines: Sequence[str], *, log: Path) -> None:
    """Install packages into the environment at ``prefix`` with pip, from the package index that the user configured.

    ``lines`` are lines of a requirements file. The pip of this process's Python is used if it has one, else the
    environment's pip.

    Raises:
        SetupError: pip failed.
    """
    python = prefix / "bin" / "python3"
    # Of the path alone: the hook of setuptools warns when it is asked for pip after distutils was imported.
    has_pip = PathFinder.find_spec("pip") is not None
    # -P: a file in the user's folder must not shadow one of Python's modules
    pip: list[str | Path] = (
        [sys.executable, "-P", "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    )
    requirements = prefix.with_name(f"{prefix.name}.requirements.txt")
    requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--no-input", "--disable-pip-version-check"]
    run([*pip, "install", *options, "--requirement", requirements], log=log, what="Installing packages by pip")
    requirements.unlink()


# --- processes ---------------------------------------------------------------------------------------------------


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    what: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    given: str = "",
) -> None:
    """Run ``command`` without access to packages in the user's home directory; its output is appended to ``log``.

    ``what`` describes the command in an error, and ``given`` is its standard input. The command runs in a session of
    its own, so that an interruption ends it and all processes that it started.

    Raises:
        SetupError: the command failed, or does not exist.
    """
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if name not in _LEAKS}
    with log.open("ab") as file:
        file.write(f"$ {without_secrets(shlex.join(words))}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            bound(words),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**kept, "PYTHONNOUSERSITE": "1", **(variables or {})},
            start_new_session=True,
        )
        try:
            process.communicate(given.encode())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if process.returncode:
        reason = _reason(log, start) or f"exit code {process.returncode}"
        raise SetupError(f"{what} failed: {reason}", f"Its log: {log}")


def _reason(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()][-_TAIL:]
    for reason in _REASONS:
        found = next((line for line in lines if reason in line), "")
        if found:
            return _shorten(found)
    return _shorten(lines[-1]) if lines else ""


def _shorten(line: str) -> str:
    """Cut the middle out of a long error line: its beginning says what failed, its end says why."""
    return line if len(line) <= _LONG else f"{line[: _LONG // 2]} ... {line[-_LONG // 2 :]}"


def without_secrets(text: str) -> str:
    """Mask the passwords and tokens in URLs of private channels."""
    return re.sub(r"/t/[^/\s]+/", "/t/***/", re.sub(r"://[^/@\s]+@", "://***@", text))


if __name__ == "__main__":
    main(json.load(sys.stdin))
