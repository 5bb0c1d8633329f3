"""Choose the stub that an environment needs, if any, and provide it.

A stub is compiled by the user's build program. NVIDIA documents the commands under "Building Custom Python Backend
Stub" in python_backend's README; environment variables say what to build: docs/environments.md lists them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from shoal.environment.contents import Environment
from shoal.environment.elf import parse_version, show_version
from shoal.environment.spec import Request
from shoal.environment.stub import read_stub
from shoal.environment.targets import Target
from shoal.environment.tools import run
from shoal.environment.wheel import take_stub
from shoal.errors import ArtifactError, InputError, SetupError

AUTO, WHEEL, COMPILE, NONE = STUBS = ("auto", "wheel", "compile", "none")
GIVEN = "given"  # the record's name for a finished stub
BUILDER = "SHOAL_STUB_BUILDER"
_README = "https://github.com/triton-inference-server/python_backend#building-custom-python-backend-stub"
_FIRST_PYBIND11 = "2.12"  # that supports NumPy 2
_NEWER_CMAKE = (25, 8), (3, 31, 8)  # from this release on, at least this version
_OLDER_CMAKE = (3, 17)
_HEADERS = {  # what NVIDIA's CMakeLists.txt looks for on the system -> Debian's package
    "rapidjson/document.h": "rapidjson-dev",
    "archive.h": "libarchive-dev",
    "zlib.h": "zlib1g-dev",
    "boost/interprocess/managed_external_buffer.hpp": "libboost-dev",
}


def check_choice(request: Request, target: Target) -> None:
    """Refuse a choice of stub that could only fail, before anything is built.

    Raises:
        InputError: it is unknown, ``compile`` without a program, or ``wheel`` with NumPy 2.
        ArtifactError: the finished stub is not a stub.
        SetupError: the machine lacks what compiling needs.
    """
    choice = request.stub
    if choice == COMPILE:
        _check_builder(request.builder, target, "--stub compile")
    elif choice == WHEEL and request.is_for_numpy_2:
        raise InputError("The wheel's stubs corrupt tensors under NumPy 2.", "Leave --numpy2 out, or --stub wheel.")
    elif choice not in STUBS:
        if not Path(choice).is_file():
            raise InputError(f"Unknown stub {choice!r}.", f"Known: {', '.join(STUBS)}, or the path of a stub.")
        read_stub(Path(choice))


def provide_stub(request: Request, environment: Environment, target: Target, stub: Path, log: Path) -> str:
    """Put the stub that ``environment``, a folder, needs at ``stub``; returns how it was made, empty if none is needed.

    Raises:
        InputError: no program can compile a stub.
        ArtifactError: the compiled file is not a stub.
        SetupError: it is not available, or the compiler lacks something.
    """
    choice, python = request.stub, environment.python_minor
    is_for_numpy_2 = request.is_for_numpy_2 or parse_version(environment.numpy) >= (2,)
    if choice == AUTO:
        choice = choose(target, python, is_for_numpy_2)
    if choice == NONE:
        return ""
    if choice == WHEEL:
        take_stub(python, stub, is_offline=request.is_offline, log=log)
    elif choice == COMPILE:
        oldest = _FIRST_PYBIND11 if is_for_numpy_2 and not target.bears_numpy_2 else ""
        _compile(request, environment, target, stub, log, pybind11=oldest)
    else:
        shutil.copyfile(choice, stub)
        choice = GIVEN
    stub.chmod(0o755)
    return choice


def choose(target: Target, python: str, is_for_numpy_2: bool) -> str:
    """Resolve ``auto``: none where the target's own stub fits, the wheel's for the embedded server, else compiled.

    For the embedded server the wheel's stub is always put beside the environment: its own choice follows the Python
    that happens to start it.
    """
    bears_numpy = target.bears_numpy_2 or not is_for_numpy_2
    if target.is_embedded:
        return WHEEL if bears_numpy else COMPILE
    return NONE if python == target.python and bears_numpy else COMPILE


def find_missing(release: tuple[int, int]) -> list[tuple[str, str]]:
    """List what a build of ``release``'s stub lacks on this machine, each with the command that installs it.

    Boost is included: NVIDIA's build downloads one of its own, which not every machine may.
    """
    missing = []
    if shutil.which("git") is None:
        missing.append(("git", "apt install git"))
    cmake = shutil.which("cmake")
    oldest = _NEWER_CMAKE[1] if release >= _NEWER_CMAKE[0] else _OLDER_CMAKE
    if cmake is None or _cmake_version(cmake) < oldest:
        missing.append((f"cmake {show_version(oldest)} or newer", "pip install cmake"))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        return [*missing, ("a C++ compiler", "apt install g++")]
    for header, package in _HEADERS.items():
        check = [*compiler, "-E", "-x", "c++", "-"]
        source = f"#include <{header}>\n"
        if subprocess.run(check, input=source, capture_output=True, text=True, check=False).returncode:
            missing.append((header, f"apt install {package}"))
    return missing


def _cmake_version(cmake: str) -> tuple[int, ...]:
    answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\S+)", answer)
    return parse_version(found[1]) if found else ()


def _check_builder(builder: Path | None, target: Target, what: str) -> Path:
    """Return the build program, if it is named and the machine has what it needs; ``what`` needs it, for the error.

    Raises:
        InputError: no program is named.
        SetupError: something that the build needs is missing.
    """
    named = builder or os.environ.get(BUILDER)
    if not named:
        raise InputError(
            f"{what} needs a program that compiles a stub, and none is named.",
            f"Put NVIDIA's commands ({_README}) into a program and name it, --stub-builder PROGRAM;"
            " give a finished stub, --stub FILE; or use what needs none: see docs/environments.md.",
        )
    missing = find_missing(target.release)
    if missing:
        names = ", ".join(name for name, _ in missing)
        raise SetupError(f"Compiling a stub needs {names}.", f"Type: {' && '.join(fix for _, fix in missing)}")
    return Path(named).absolute()


def _compile(
    request: Request, environment: Environment, target: Target, stub: Path, log: Path, *, pybind11: str
) -> None:
    """Have the build program compile a stub for the Python and NumPy of ``environment``, with ``pybind11`` or newer.

    Raises:
        InputError: no program is named.
        SetupError: something that the build needs is missing, or it failed.
        ArtifactError: it did not write a stub.
    """
    numpy = environment.numpy or "missing"
    what = f"Python {environment.python_minor} with NumPy {numpy} for target {target.name}"
    program = _check_builder(request.builder, target, what)
    work = stub.with_name(f"{stub.name}.work")
    work.mkdir()
    variables = {
        "SHOAL_STUB_OUT": str(stub),
        "SHOAL_STUB_BRANCH": f"r{target.version}",
        "SHOAL_STUB_PYTHON": str(environment.source / "bin" / "python3"),
        "SHOAL_STUB_PYBIND11": pybind11,
        "SHOAL_STUB_GPU": "ON" if request.is_for_gpu else "OFF",
        "SHOAL_STUB_WORK": str(work),
    }
    run([program], log=log, what=f"Compiling the stub by {program.name}", cwd=work, variables=variables)
    shutil.rmtree(work)
    if not stub.is_file():
        raise ArtifactError(f"{program} wrote no stub.", "It must write the file that SHOAL_STUB_OUT names.")
    if pybind11 and not read_stub(stub).bears_numpy_2:
        raise ArtifactError(
            f"The stub that {program} wrote corrupts tensors under NumPy 2: its pybind11 is too old.",
            f"Build it with pybind11 {pybind11} or newer, as SHOAL_STUB_PYBIND11 says.",
        )
