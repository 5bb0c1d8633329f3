"""Folders that take long to make: made once per machine, and kept until what they depend on changes."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "tests"


def once(name: str, make: Callable[[Path], object], *, depends_on: Iterable[Path]) -> Path:
    """Return the folder that ``make`` filled; ``depends_on`` are the files and folders that it was made from.

    Workers of one run, and runs beside each other, wait for the first one: the lock is the file beside the folder. A
    folder that was made from other inputs is removed.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    key = _hash([Path(__file__), *depends_on])
    folder = CACHE / f"{name}-{key}"
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").is_file():
            for old in CACHE.glob(f"{name}-*"):
                shutil.rmtree(old)
            make(folder / "out")
            (folder / "done").touch()
    return folder / "out"


def _hash(depends_on: Iterable[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for place in depends_on:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]  # environments are made in there, and the paths of programs are short
