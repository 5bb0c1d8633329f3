"""Locate the server: the tritonserver that SHOAL_TRITONSERVER names, else the one in the nvidia-pytriton wheel.

SHOAL_STUB names another stub for Triton's Python backend, such as a stub that was built for NumPy 2.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.authoring.environment.embedded import DISTRIBUTION, NAME, STUB, VERSION, find_installed
from shoal.errors import SetupError
from shoal.kit.backends import BACKENDS

SERVER_VARIABLE, STUB_VARIABLE = "SHOAL_TRITONSERVER", "SHOAL_STUB"


@dataclass(frozen=True)
class Runtime:
    """A tritonserver binary, and what it needs to run Python models.

    ``libraries`` are folders for ``LD_LIBRARY_PATH``. The folder with this Python's libpython is the first, so that the
    stub does not load the libpython of another Python.
    """

    binary: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the server.

        The processes of Python models inherit them, but ignore variables whose names begin with PYTHON.
        """
        executables = Path(sys.executable).parent
        set_already = os.environ.get("LD_LIBRARY_PATH")  # kept at the end: it may be the only way to find a driver
        return {
            **os.environ,
            # Stubs take the first python3 on PATH as their environment: this one.
            "PATH": f"{executables}{os.pathsep}{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*map(str, self.libraries), set_already])),
            # Waiting actively at OpenMP barriers makes one busy neighbour cost a factor of 46.
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def find_backends(self, folder: Path, target: str) -> Path:
        """Return the backend directory for a repository that was composed for ``target``, if for any.

        It is the server's own if its Python backend has a stub, as in NVIDIA's images. A server from the wheel, another
        stub, and repositories for the embedded server need copies, which are made in ``folder``.
        """
        if self.stub == self.python_backend / STUB and target != NAME:
            return self.python_backend.parent
        self.write_backends(folder)
        return folder

    def write_backends(self, folder: Path) -> None:
        """Copy Triton's Python backend, and shoal's backends in Python, into the backend directory ``folder``.

        Files are copied, not linked, because Triton refuses symbolic links that leave the directory.
        """
        shutil.copytree(self.python_backend, folder / "python", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(self.stub, folder / "python" / STUB)
        from shoal.authoring.vendoring import copy_package  # the imports of code are for the start alone

        for source in sorted(BACKENDS.glob("*/model.py")):
            backend = folder / source.parent.name
            backend.mkdir()
            shutil.copyfile(source, backend / "model.py")
            copy_package(backend)

    def missing_libraries(self) -> list[str]:
        """List the shared libraries that the server or the stub needs and that the dynamic loader does not find."""
        names = set()
        for binary in (self.binary, self.stub, self.python_backend / "libtriton_python.so"):
            listing = subprocess.run(
                ["ldd", binary], env=self.environment(), capture_output=True, text=True, check=False
            )
            names |= {line.split()[0] for line in listing.stdout.splitlines() if "not found" in line}
        return sorted(names)


def find_runtime() -> Runtime:
    """Find the Triton server to start.

    Raises:
        SetupError: there is no server, the server has no stub for this version of Python, or a library is missing.
    """
    if os.environ.get(SERVER_VARIABLE):
        binary = Path(os.environ[SERVER_VARIABLE]).resolve()
        if not binary.is_file():
            raise SetupError(f"{SERVER_VARIABLE} names {binary}, which is not a file.", "Name a tritonserver binary.")
    else:
        binary = _packaged_binary()
        if not os.environ.get(STUB_VARIABLE):  # with a custom stub, NumPy is checked when a model starts
            check_numpy(np.__version__)
    root = binary.parents[1]
    runtime = Runtime(
        binary=binary,
        python_backend=root / "backends" / "python",
        stub=_find_stub(root),
        libraries=(Path(sysconfig.get_config_var("LIBDIR")), root.parents[1] / "nvidia_pytriton.libs", root / "lib"),
    )
    missing = runtime.missing_libraries()
    if missing:
        raise SetupError(f"Triton needs {', '.join(missing)}, which this machine lacks.", _library_fix(missing))
    return runtime


def check_numpy(version: str) -> None:
    """Refuse NumPy 2, because the stub in the nvidia-pytriton wheel silently corrupts tensors under it.

    Raises:
        SetupError: NumPy is 2 or newer.
    """
    if int(version.split(".")[0]) >= 2:
        raise SetupError(
            f"The embedded Triton 24.10 corrupts tensors under NumPy {version}.", "Type: pip install 'numpy<2'"
        )


def _packaged_binary() -> Path:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"The embedded Triton runs on Linux x86-64, not on {platform.system()} {platform.machine()}.",
            "Use NVIDIA's container: shoal serve REPOSITORY --print",
        )
    root = find_installed()
    if root is None:
        raise SetupError(
            f"The embedded Triton (the package {DISTRIBUTION}) is not installed.", "Type: pip install 'shoal[serve]'"
        )
    return root / "bin" / "tritonserver"


def _find_stub(root: Path) -> Path:
    if os.environ.get(STUB_VARIABLE):
        stub = Path(os.environ[STUB_VARIABLE]).resolve()
        if not stub.is_file():
            raise SetupError(f"{STUB_VARIABLE} names {stub}, which is not a file.", f"Name a {STUB} binary.")
        return stub
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [root / "python_backend_stubs" / version / STUB, root / "backends" / "python" / STUB]
    for stub in candidates:
        if stub.is_file():
            return stub
    known = sorted(path.name for path in (root / "python_backend_stubs").glob("*"))
    raise SetupError(
        f"{root} has no Python backend stub for Python {version}.",
        f"Use one of: {', '.join(known)}." if known else f"Unset {SERVER_VARIABLE} to use the embedded server.",
    )


def _library_fix(missing: list[str]) -> str:
    python = next((name for name in missing if name.startswith("libpython")), "")
    if python:
        package = python.split(".so")[0]
        return f"Type: apt install {package}, or use a Python built with --enable-shared."
    return f"Reinstall it: pip install --force-reinstall --no-deps {DISTRIBUTION}=={VERSION}"
