"""The PyPI wheel that the embedded server comes from, and the stubs in it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

from shoal.environment.stub import STUB
from shoal.environment.tools import run
from shoal.errors import SetupError

DISTRIBUTION, VERSION = "nvidia-pytriton", "0.7.0"
_STUBS = "pytriton/tritonserver/python_backend_stubs"


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
    if installed:
        _copy_installed(installed / "python_backend_stubs", python, stub)
        return
    if is_offline:
        raise SetupError(f"{DISTRIBUTION} is not installed.", f"Type: pip install {DISTRIBUTION}=={VERSION}")
    folder = stub.with_name(f"{stub.name}.wheel")
    command: list[str | Path] = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--dest",
        folder,
    ]
    run([*command, f"{DISTRIBUTION}=={VERSION}"], log=log, what=f"Downloading {DISTRIBUTION}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = f"{_STUBS}/{python}/{STUB}"
        known = [entry.split("/")[-2] for entry in archive.namelist() if entry.endswith(f"/{STUB}")]
        if name not in archive.namelist():
            raise _missing(python, known)
        with archive.open(name) as content, stub.open("wb") as file:
            shutil.copyfileobj(content, file)
    stub.chmod(0o755)
    shutil.rmtree(folder)


def _copy_installed(stubs: Path, python: str, stub: Path) -> None:
    if not (stubs / python / STUB).is_file():
        raise _missing(python, [path.name for path in stubs.glob("*")])
    shutil.copyfile(stubs / python / STUB, stub)
    stub.chmod(0o755)


def _missing(python: str, known: list[str]) -> SetupError:
    versions = ", ".join(sorted(known, key=lambda version: int(version.split(".")[-1])))
    return SetupError(f"{DISTRIBUTION} has no stub for Python {python}.", f"Use one of {versions}, or --stub compile.")
