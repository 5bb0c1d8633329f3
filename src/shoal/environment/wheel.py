"""The PyPI wheel that the embedded server comes from, and the stubs in it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from shoal.environment.stub import STUB
from shoal.environment.tools import run
from shoal.errors import SetupError

DISTRIBUTION, VERSION = "nvidia-pytriton", "0.7.0"


def find_installed() -> Path | None:
    """Return the folder of the embedded tritonserver in this Python; None where the wheel is not installed."""
    spec = importlib.util.find_spec("pytriton")
    return Path(spec.origin).parent / "tritonserver" if spec and spec.origin else None


def take_stub(python: str, stub: Path, *, is_offline: bool, log: Path) -> None:
    """Copy the wheel's stub for a Python such as ``3.12``; the wheel is downloaded where it is not installed.

    Raises:
        SetupError: it has none for that Python, or is not available.
    """
    installed = find_installed()
    if installed is None and is_offline:
        raise SetupError(f"{DISTRIBUTION} is not installed.", f"Type: pip install {DISTRIBUTION}=={VERSION}")
    with tempfile.TemporaryDirectory(dir=stub.parent) as folder:
        stubs = (installed or _download(Path(folder), log)) / "python_backend_stubs"
        if not (stubs / python / STUB).is_file():
            known = sorted((path.name for path in stubs.glob("*")), key=lambda name: int(name.split(".")[-1]))
            raise SetupError(
                f"{DISTRIBUTION} has no stub for Python {python}.",
                f"Use one of {', '.join(known)}, or --stub compile.",
            )
        shutil.copyfile(stubs / python / STUB, stub)


def _download(folder: Path, log: Path) -> Path:
    """Download the wheel into ``folder``, unpack its stubs, and return its tritonserver's folder."""
    pip: list[str | Path] = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--dest", folder]
    run([*pip, f"{DISTRIBUTION}=={VERSION}"], log=log, what=f"Downloading {DISTRIBUTION}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(f"/{STUB}")])
    return folder / "pytriton" / "tritonserver"
