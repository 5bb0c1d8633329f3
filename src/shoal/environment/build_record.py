"""The folder that a build writes: its record, integrity check and lock."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.component.artifact_files import find_changed
from shoal.environment.stub import RECORD, STUB
from shoal.errors import InputError
from shoal.paths import lock

ARCHIVE, FOLDER, LOG = "custom_env.tar.gz", "environment", "build.log"


@dataclass(frozen=True)
class Built:
    """A built environment: the files for Triton, and the record of how they were made."""

    environment: Path
    stub: Path | None
    record: dict[str, Any]
    is_new: bool = False


def read_built(folder: Path) -> Built | None:
    """Read the record of a build at ``folder``; None where there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        environment, stub = folder / record["environment"], record["stub"]
        if not isinstance(record["files"], dict):
            return None
        return Built(environment.absolute(), (folder / STUB).absolute() if stub else None, record)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def locate(place: Path) -> tuple[Path, Path | None]:
    """Return environment and stub of the build at ``place``, else ``place`` itself and no stub."""
    built = read_built(place)
    return (built.environment, built.stub) if built else (place.absolute(), None)


def is_whole(out: Path, built: Built) -> bool:
    """Whether the files of a build are unchanged, and a venv's Python is still there."""
    files: dict[str, str] = built.record["files"]
    environment = built.environment
    return not find_changed(out, files) and (environment.is_file() or (environment / "bin" / "python3").exists())


def check_ours(out: Path) -> None:
    """Refuse to replace anything that ``build`` did not make."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    strange = sorted(names - {ARCHIVE, FOLDER, STUB, RECORD, LOG} if read_built(out) else names)
    if strange:
        raise InputError(
            f"{out} exists and holds {strange[0]}, which shoal did not put there; it will not be replaced.",
            "Name another folder, or remove that one.",
        )


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Lock the parent of ``out`` for this build, and clean up after killed ones."""
    with lock(out.parent, f"Another build is at work in {out.parent}.", "Wait for it, or name another folder."):
        for left in out.parent.glob(f".{out.name}.building-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


@contextlib.contextmanager
def aside(out: Path) -> Iterator[Path]:
    """Make a temporary folder beside ``out``, to be moved there when it is complete."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
