"""Folders of inputs and outputs, in file systems and in object storage (``s3://``, ``gs://``, ``az://``).

An output appears whole, by one atomic step that fails if there is one of its name: a hard link, or a conditional put.
"""

from __future__ import annotations

import glob
import io
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from shoal.clients.bulk.files import written
from shoal.clients.bulk.tables import explained
from shoal.errors import ArtifactError, InputError, SetupError, needs, printable
from shoal.system.files import MAX_LARGE_TEXT, open_regular, read_bytes

ASIDE = "_shards/_tmp"
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_URL = re.compile(r"(?:s3|gs|az)://([^/]+)/?(.*)")
_BLOCK = 2**21  # bytes per request to an object store


class FolderEntry(NamedTuple):
    """File of a folder. ``modified`` is in seconds, by the clock of the file system or the store."""

    name: str
    size: int
    modified: float


class LocalFolder:
    """Folder of a file system, which workers on several machines may share. Names are relative to it, with ``/``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def has(self, file: str) -> bool:
        """Whether an input is in this folder."""
        return not is_url(file) and self.root.resolve() in Path(file).resolve().parents

    def entries(self, under: str = "") -> Iterator[FolderEntry]:
        """Yield the files below the folder ``under``, in no order; files that are being written are left out."""
        for folder, folders, names in os.walk(self.root / under):
            if Path(folder) == (self.root / ASIDE).parent and "_tmp" in folders:
                folders.remove("_tmp")
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # removed by another worker
                    found = path.stat()
                    yield FolderEntry(path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        try:
            with explained(self.root / name):
                return read_bytes(self.root / name, MAX_LARGE_TEXT)
        except ArtifactError:
            if os.path.lexists(self.root / name):
                raise
            return None

    def open(self, name: str) -> BinaryIO:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return open_regular(self.root / name)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Give the path of a file, while the ``with`` block runs.

        Raises:
            FileNotFoundError: there is none.
        """
        (self.root / name).stat()
        yield self.root / name

    def put(self, name: str, source: Path | bytes) -> bool:
        """Copy a file here, unless there is one of this name: then return False. The file appears whole.

        Raises:
            SetupError: the folder cannot be written.
        """
        path = self.root / name
        aside = self.root / ASIDE / f"{path.name}.{secrets.token_hex(8)}"
        with written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for tries_left in (2, 1, 0):
                try:
                    _write(aside, source)
                    return _place(aside, path)
                except FileNotFoundError:  # another run ended, and has swept
                    if not tries_left:
                        raise
                finally:
                    aside.unlink(missing_ok=True)
        return False

    def remove(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            SetupError: the folder cannot be written.
        """
        with written(self.root / name):
            (self.root / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what writers that died have left."""
        shutil.rmtree(self.root / ASIDE, ignore_errors=True)


def _write(path: Path, source: Path | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        if isinstance(source, bytes):
            file.write(source)
        else:
            with source.open("rb") as given:
                shutil.copyfileobj(given, file)
        file.flush()
        os.fsync(file.fileno())


def _place(aside: Path, path: Path) -> bool:
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links: a file of the same moment and the same content is replaced
        if path.exists():
            return False
        aside.replace(path)
    return True


# --- object storage -------------------------------------------------------------------------------------------------


class Bucket:
    """Folder of an object store. Credentials and endpoint are those of the environment, such as ``AWS_ACCESS_KEY_ID``.

    All methods raise a SetupError if the store cannot be reached, or refuses.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        found = _URL.fullmatch(self._url)
        assert found is not None
        self._prefix = f"{found[2]}/" if found[2] else ""
        self._bucket = self._url[: found.end(1)]

    def __str__(self) -> str:
        return self._url

    def has(self, file: str) -> bool:
        """Whether an input is in this folder."""
        return file.startswith(f"{self._url}/")

    def entries(self, under: str = "") -> Iterator[FolderEntry]:
        """Yield the files below the folder ``under``, in no order."""
        api, store = _open_store(self._bucket)
        with _reached(self._url):
            for found in api.list(store, prefix=(self._prefix + under).rstrip("/") or None):
                for each in found:
                    yield FolderEntry(
                        each["path"][len(self._prefix) :], each["size"], each["last_modified"].timestamp()
                    )

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        try:
            with self.open(name) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return io.BufferedReader(_Object(self._bucket, self._prefix + name), _BLOCK)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Give the path of a copy of a file, while the ``with`` block runs.

        Raises:
            FileNotFoundError: there is none.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-shard-") as aside, self.open(name) as file:
            path = Path(aside, Path(name).name)
            with path.open("wb") as copy:
                shutil.copyfileobj(file, copy)
            yield path

    def put(self, name: str, source: Path | bytes) -> bool:
        """Copy a file here, unless there is one of this name: then return False. The file is in memory as a whole."""
        api, store = _open_store(self._bucket)
        for is_last in (False, True):
            try:
                with _reached(f"{self._url}/{name}"), suppress(api.exceptions.AlreadyExistsError):
                    api.put(store, self._prefix + name, source, mode="create", use_multipart=False)
                    return True
                return False
            except SetupError:  # the store may have the file, and its answer was lost: ask again
                if is_last:
                    raise
                time.sleep(1)
        return False

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        api, store = _open_store(self._bucket)
        with _reached(f"{self._url}/{name}"), suppress(FileNotFoundError):
            api.delete(store, self._prefix + name)

    def sweep(self) -> None:
        """Do nothing: a put that was interrupted leaves nothing."""


class _Object(io.RawIOBase):
    """File of an object store, read by ranges."""

    def __init__(self, bucket: str, key: str) -> None:
        self._api, self._store = _open_store(bucket)
        self._key, self._name, self._at = key, f"{bucket}/{key}", 0
        with _reached(self._name):
            found = self._api.head(self._store, key)
        self._size, self._tag = found["size"], found["e_tag"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length: int = max(0, min(view.nbytes, self._size - self._at))
        if length:
            options = {"range": (self._at, self._at + length), "if_match": self._tag}
            with _reached(self._name):
                view[:length] = self._api.get(self._store, self._key, options=options).bytes()
        self._at += length
        return length


@lru_cache(maxsize=8)
def _open_store(bucket: str) -> tuple[Any, Any]:
    with needs("s3"):
        import obstore
        from obstore.store import from_url
    with _reached(bucket):
        return obstore, from_url(bucket)


@contextmanager
def _reached(place: str) -> Iterator[None]:
    """Turn an error of the object store into a ``SetupError``, other than that a file is missing or is there.

    A file that changed while it was read is an ``ArtifactError``.
    """
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        yield
    except AlreadyExistsError:
        raise
    except PreconditionError:
        raise ArtifactError(f"{place} changed while it was read.", "Start over: --fresh") from None
    except BaseError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SetupError(
            f"{place} cannot be read or written: {reason}.",
            "Check the URL, the network, and the credentials in the environment, such as AWS_ACCESS_KEY_ID.",
        ) from None


Folder: TypeAlias = LocalFolder | Bucket


def is_url(name: str) -> bool:
    """Whether a file or folder is in object storage, by its name.

    Raises:
        InputError: it is a URL of another kind.
    """
    if _URL.match(name):
        return True
    if _SCHEME.match(name):
        raise InputError(f"{name} is not in a bucket that can be read or written.", "Known: s3://, gs:// and az://")
    return False


def open_folder(name: str) -> Folder:
    """Open a folder by its path or URL; it is created when its first file is written."""
    return Bucket(name) if is_url(name) else LocalFolder(Path(name))


# --- inputs ---------------------------------------------------------------------------------------------------------


def find_inputs(pattern: str) -> list[tuple[str, int]]:
    """Return the files that a pattern names, each with its size in bytes, in the order of their names.

    Raises:
        InputError: there are none.
        SetupError: the object store cannot be reached.
    """
    if is_url(pattern):
        root = pattern[: re.split(r"[*?\[]", pattern)[0].rindex("/") + 1]
        if not _URL.match(root):
            raise InputError(f"{pattern} names no file of a bucket.", "For example: 's3://bucket/in/*.parquet'")
        wanted = pattern[len(root) :].split("/")
        found = ((entry.name, entry.size) for entry in Bucket(root).entries())
        files = sorted((f"{root}{name}", size) for name, size in found if _matches(name.split("/"), wanted))
    else:
        names = sorted(glob.glob(pattern, recursive=True)) or [pattern]  # noqa: PTH207  # Path.glob refuses absolute
        with explained(pattern):
            files = [(name, Path(name).stat().st_size) for name in names if Path(name).is_file()]
    for name, _ in files:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"The name of {printable(name)} is not UTF-8.", "Rename the file.") from None
    if not files:
        raise InputError(f"No file has the name {pattern}.", "Quote the pattern: --input 'folder/*.parquet'")
    return files


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts of a file's name match those of a pattern, in which ``**`` stands for any number of folders."""
    if not (parts and wanted):
        return not (parts or wanted)
    if wanted[0] == "**":
        return len(wanted) == 1 or _matches(parts, wanted[1:]) or _matches(parts[1:], wanted)
    return fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def open_input(name: str) -> BinaryIO:
    """Open an input by its path or URL.

    Raises:
        ArtifactError: there is no such file.
        SetupError: the object store cannot be reached.
    """
    try:
        if is_url(name):
            root, _, rest = name.rpartition("/")
            return Bucket(root).open(rest)
        return open_regular(name)
    except FileNotFoundError:
        raise ArtifactError(f"There is no file {name}.", "Was it removed since the plan? Start over: --fresh") from None
