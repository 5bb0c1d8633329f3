"""Run a user's build program that compiles NVIDIA's stub, after checking the machine for what such a build needs.

NVIDIA documents the commands under "Building Custom Python Backend Stub" in python_backend's README; the program runs
them. Environment variables say what to build: docs/environments.md lists them.
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
from shoal.errors import ArtifactError, InputError, SetupError

BUILDER = "SHOAL_STUB_BUILDER"
README = "https://github.com/triton-inference-server/python_backend#building-custom-python-backend-stub"
FIRST_PYBIND11 = "2.12"  # that supports NumPy 2
NEWER_CMAKE = (25, 8), (3, 31, 8)  # from this release on, at least this version
OLDER_CMAKE = (3, 17)
HEADERS = {  # what NVIDIA's CMakeLists.txt looks for on the system -> Debian's package
    "rapidjson/document.h": "rapidjson-dev",
    "archive.h": "libarchive-dev",
    "zlib.h": "zlib1g-dev",
    "boost/interprocess/managed_external_buffer.hpp": "libboost-dev",
}


def find_missing(release: tuple[int, int]) -> list[tuple[str, str]]:
    """List what a build of ``release``'s stub lacks on this machine, each with the command that installs it.

    Boost is included: NVIDIA's build downloads one of its own, which not every machine may.
    """
    missing = []
    if shutil.which("git") is None:
        missing.append(("git", "apt install git"))
    cmake = shutil.which("cmake")
    oldest = NEWER_CMAKE[1] if release >= NEWER_CMAKE[0] else OLDER_CMAKE
    if cmake is None or _cmake_version(cmake) < oldest:
        missing.append((f"cmake {show_version(oldest)} or newer", "pip install cmake"))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        return [*missing, ("a C++ compiler", "apt install g++")]
    for header, package in HEADERS.items():
        check = [*compiler, "-E", "-x", "c++", "-"]
        source = f"#include <{header}>\n"
        if subprocess.run(check, input=source, capture_output=True, text=True, check=False).returncode:
            missing.append((header, f"apt install {package}"))
    return missing


def _cmake_version(cmake: str) -> tuple[int, ...]:
    answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\S+)", answer)
    return parse_version(found[1]) if found else ()


def check_builder(builder: Path | None, target: Target, what: str) -> Path:
    """Return the build program, if it is named and the machine has what it needs; ``what`` needs it, for the error.

    Raises:
        InputError: no program is named.
        SetupError: something that the build needs is missing.
    """
    named = builder or os.environ.get(BUILDER)
    if not named:
        raise InputError(
            f"{what} needs a program that compiles a stub, and none is named.",
            f"Put NVIDIA's commands ({README}) into a program and name it, --stub-builder PROGRAM;"
            " give a finished stub, --stub FILE; or use what needs none: see docs/environments.md.",
        )
    missing = find_missing(target.release)
    if missing:
        names = ", ".join(name for name, _ in missing)
        raise SetupError(f"Compiling a stub needs {names}.", f"Type: {' && '.join(fix for _, fix in missing)}")
    return Path(named).absolute()


def compile_stub(request: Request, environment: Environment, target: Target, stub: Path, log: Path) -> None:
    """Have the build program compile a stub for the Python and NumPy of ``environment``.

    Raises:
        InputError: no program is named.
        SetupError: something that the build needs is missing, or it failed.
        ArtifactError: it did not write a stub.
    """
    python, numpy = environment.python_minor, environment.numpy
    what = f"Python {python} with NumPy {numpy or 'missing'} for target {target.name}"
    program = check_builder(request.builder, target, what)
    is_for_numpy_2 = request.is_for_numpy_2 or parse_version(numpy) >= (2,)
    needs_newer = is_for_numpy_2 and not target.bears_numpy_2
    work = stub.with_name(f"{stub.name}.work")
    work.mkdir()
    variables = {
        "SHOAL_STUB_OUT": str(stub),
        "SHOAL_STUB_BRANCH": f"r{target.version}",
        "SHOAL_STUB_PYTHON": str(environment.source / "bin" / "python3"),
        "SHOAL_STUB_PYBIND11": FIRST_PYBIND11 if needs_newer else "",
        "SHOAL_STUB_GPU": "ON" if request.is_for_gpu else "OFF",
        "SHOAL_STUB_WORK": str(work),
    }
    run([program], log=log, what=f"Compiling the stub by {program.name}", cwd=work, variables=variables)
    shutil.rmtree(work)
    if not stub.is_file():
        raise ArtifactError(f"{program} wrote no stub.", "It must write the file that SHOAL_STUB_OUT names.")
    if needs_newer and not read_stub(stub).bears_numpy_2:
        raise ArtifactError(
            f"The stub that {program} wrote corrupts tensors under NumPy 2: its pybind11 is too old.",
            f"Build it with pybind11 {FIRST_PYBIND11} or newer, as SHOAL_STUB_PYBIND11 says.",
        )
