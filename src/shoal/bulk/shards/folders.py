"""Folder of the outputs of a sharded run, which several workers may write at the same time.

A file appears whole, by one atomic step that fails if there is one of its name: a hard link.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shoal.bulk.files import written
from shoal.errors import ArtifactError, InputError

ASIDE = "_tmp"


class Entry(NamedTuple):
    """File of a folder. ``modified`` is in seconds, by the clock of the file system."""

    name: str
    size: int
    modified: float


class Folder:
    """Folder of a file system, which workers on several machines may share. Names are relative to it, with ``/``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self, under: str = "") -> Iterator[Entry]:
        """Yield the files below the folder ``under``, in no order; files that are being written are left out."""
        for folder, folders, names in os.walk(self.root / under):
            if ASIDE in folders:
                folders.remove(ASIDE)
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # removed by another worker
                    found = path.stat()
                    yield Entry(path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, source: Path | bytes) -> bool:
        """Copy a file here, unless there is one of this name: then return False. The file appears whole.

        Raises:
            SetupError: the folder cannot be written.
        """
        path = self.root / name
        aside = self.root / ASIDE / f"{path.name}.{os.uname().nodename}.{os.getpid()}"
        with written(path):
            aside.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with aside.open("wb") as file:
                    if isinstance(source, bytes):
                        file.write(source)
                    else:
                        with source.open("rb") as given:
                            shutil.copyfileobj(given, file)
                    file.flush()
                    os.fsync(file.fileno())
                return _place(aside, path)
            finally:
                aside.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file or folder, if it is there."""
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _place(aside: Path, path: Path) -> bool:
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: a file of the same moment and the same content is replaced
        if path.exists():
            return False
        aside.replace(path)
    return True


# --- inputs ---------------------------------------------------------------------------------------------------------


def find_inputs(pattern: str) -> list[tuple[str, int]]:
    """Return the files that a pattern names, each with its size in bytes, in the order of their names.

    Raises:
        InputError: there are none.
    """
    names = sorted(glob.glob(pattern, recursive=True)) or [pattern]  # noqa: PTH207  # Path.glob refuses absolute ones
    files = [(name, Path(name).stat().st_size) for name in names if Path(name).is_file()]
    if not files:
        raise InputError(f"No file has the name {pattern}.", "Quote the pattern: --input 'folder/*.parquet'")
    return files


def open_input(name: str) -> BinaryIO:
    """Open an input.

    Raises:
        ArtifactError: there is no such file.
    """
    try:
        return Path(name).open("rb")
    except FileNotFoundError:
        raise ArtifactError(f"There is no file {name}.", "Was it removed since the plan? Start over: --fresh") from None
