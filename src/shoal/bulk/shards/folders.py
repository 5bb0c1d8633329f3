"""Folders of inputs and outputs: on this machine's file systems, and in object storage (``s3://``, ``gs://``, ...).

A file of an output appears whole, by one atomic step that fails if there is one: a hard link, or a conditional put.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from shoal.bulk.files import written
from shoal.errors import ArtifactError, InputError, SetupError, needs

_URL = re.compile(r"[a-z][a-z0-9]*://")
_REMOTE_BYTES = 8 * 2**20  # bytes per request to an object store


class Entry(NamedTuple):
    """File of a folder. ``modified`` is in seconds, by the clock of the file system or the store."""

    name: str
    size: int
    modified: float


class Folder(Protocol):
    """Folder of an output. Names are relative to it, with ``/``."""

    def entries(self, under: str = "") -> Iterator[Entry]:
        """Yield the files below the folder ``under``, in no order."""

    def open(self, name: str) -> BinaryIO:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
        """

    def put(self, name: str, source: Path) -> bool:
        """Copy a file here, unless there is one of this name: then return False. The file appears whole."""

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def open_folder(name: str) -> Folder:
    """Open a folder by its path or URL; it is created where its first file is written."""
    return Bucket(name) if _URL.match(name) else LocalFolder(Path(name))


class LocalFolder:
    """Folder of a file system; workers on other machines may share it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self, under: str = "") -> Iterator[Entry]:
        """Yield the files below the folder ``under``, in no order."""
        for folder, _, names in os.walk(self.root / under):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # removed by another worker
                    found = path.stat()
                    yield Entry(path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime)

    def open(self, name: str) -> BinaryIO:
        """Open a file."""
        return (self.root / name).open("rb")

    def put(self, name: str, source: Path) -> bool:
        """Copy a file here, unless there is one of this name."""
        path = self.root / name
        aside = self.root / "_tmp" / f"{path.name}.{os.uname().nodename}.{os.getpid()}"
        with written(path):
            aside.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with source.open("rb") as given, aside.open("wb") as file:
                    while chunk := given.read(_REMOTE_BYTES):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    path.hardlink_to(aside)
                except FileExistsError:
                    return False
                except OSError:  # a file system without hard links: a twin of the same content would be replaced
                    if path.exists():
                        return False
                    aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
            return True

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file."""
        path = self.root / name
        with written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.root / name).unlink(missing_ok=True)


class Bucket:
    """Folder of an object store. Its credentials are those of the environment, such as ``AWS_ACCESS_KEY_ID``."""

    def __init__(self, url: str) -> None:
        with needs("s3"):
            import obstore
            from obstore.store import from_url
        self.root, self._api = url, obstore
        with _reached(url):
            self._store: Any = from_url(url)

    def entries(self, under: str = "") -> Iterator[Entry]:
        """Yield the files below the folder ``under``, in no order."""
        with _reached(self.root):
            for found in self._api.list(self._store, prefix=under or None):
                for each in found:
                    modified: datetime = each["last_modified"]
                    yield Entry(each["path"], each["size"], modified.timestamp())

    def open(self, name: str) -> BinaryIO:
        """Open a file."""
        with _reached(f"{self.root}/{name}"):
            size = self._api.head(self._store, name)["size"]
        return io.BufferedReader(_Remote(self._api, self._store, name, size), _REMOTE_BYTES)

    def put(self, name: str, source: Path) -> bool:
        """Copy a file here, unless there is one of this name."""
        from obstore.exceptions import AlreadyExistsError

        with _reached(f"{self.root}/{name}"):
            try:
                self._api.put(self._store, name, source, mode="create", use_multipart=False)
            except AlreadyExistsError:  # or the answer to an earlier put was lost
                return False
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file."""
        with _reached(f"{self.root}/{name}"):
            self._api.put(self._store, name, content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _reached(f"{self.root}/{name}"), suppress(FileNotFoundError):
            self._api.delete(self._store, name)


class _Remote(io.RawIOBase):
    """Object of a store, read by ranges."""

    def __init__(self, api: Any, store: Any, name: str, size: int) -> None:
        self._api, self._store, self._name, self._size, self._at = api, store, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        length = min(len(view), self._size - self._at)
        if length <= 0:
            return 0
        with _reached(self._name):
            view[:length] = bytes(self._api.get_range(self._store, self._name, start=self._at, length=length))
        self._at += length
        return length


@contextmanager
def _reached(place: str) -> Iterator[None]:
    """Turn an error of the object store into a ``SetupError``; a missing file is a ``FileNotFoundError``."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SetupError(
            f"{place} cannot be reached: {reason}.", "Check the URL, the network, and AWS_* in the environment."
        ) from None


# --- inputs ---------------------------------------------------------------------------------------------------------


def find_inputs(pattern: str) -> list[tuple[str, int]]:
    """Return the files that a pattern names, each with its size in bytes, in the order of their names.

    Raises:
        InputError: there are none.
    """
    if _URL.match(pattern):
        root, _, rest = pattern.partition("*")
        root = root.rpartition("/")[0] if rest or pattern.endswith("*") else pattern.rpartition("/")[0]
        wanted = re.compile(_translate(pattern))
        found = [(f"{root}/{entry.name}", entry.size) for entry in Bucket(root).entries()]
        files = sorted(each for each in found if wanted.fullmatch(each[0]))
    else:
        names = sorted(glob.glob(pattern, recursive=True)) or [pattern] * Path(pattern).is_file()  # noqa: PTH207
        files = [(name, os.stat(name).st_size) for name in names if os.path.isfile(name)]  # noqa: PTH113, PTH116
    if not files:
        raise InputError(f"No file is named {pattern}.", "Quote the pattern: --input 'folder/*.parquet'")
    return files


def _translate(pattern: str) -> str:
    """Return a glob pattern as a regular expression (``glob.translate`` is new in Python 3.13)."""
    return re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")


def open_input(name: str) -> BinaryIO:
    """Open an input by its path or URL.

    Raises:
        ArtifactError: there is no such file.
    """
    try:
        if not _URL.match(name):
            return Path(name).open("rb")
        root, _, rest = name.rpartition("/")
        return Bucket(root).open(rest)
    except FileNotFoundError:
        raise ArtifactError(f"There is no file {name}.", "Was it removed since the plan? Start over: --fresh") from None
