"""Read an environment entry by entry, from a packed archive without unpacking it, or from a folder."""

from __future__ import annotations

import gzip
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.errors import ArtifactError

FILE, FOLDER, SYMLINK, HARD_LINK = "file", "folder", "symbolic link", "hard link"
_OTHER = {  # tar's types that no environment holds
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "named pipe",
    tarfile.GNUTYPE_SPARSE: "sparse file",
}
_FORMATS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip"}
_MAX_PATH, _MAX_NAME = 4096, 255  # PATH_MAX and NAME_MAX of <linux/limits.h>
_MAX_DEPTH = 64  # nested folders; much deeper trees break programs that walk them, and cannot be removed
_MAX_NAMES = 2**28  # characters of all names, which are kept: two million of usual length
_MAX_TIME = 2**40  # seconds; beyond it file systems have no times
_MAX_PAX = 100  # settings for all entries that follow, which stay in memory
_MAX_HEADERS = 2**18  # bytes of one entry: the longest name and link take a twentieth
_MAX_READ = 4 * 2**20  # of one read by the tar parser: a header larger than this is an attack on memory
_BLOCK, _CHUNK = 512, 2**20


@dataclass(frozen=True)
class Limits:
    """Limits on an archive: bytes unpacked in all, entries, and bytes unpacked per packed byte."""

    num_bytes: int = 64 * 2**30
    num_entries: int = 2_000_000
    ratio: int = 200  # environments have 2 to 5, a bomb of zeros 1000
    free_of_ratio: int = 64 * 2**20  # small archives may be of anything


@dataclass(frozen=True)
class Entry:
    """One file, folder or link. ``link`` is a link's target; ``chunks`` gives a file's content, from front to back."""

    path: str
    kind: str
    size: int
    mode: int
    mtime: float
    link: str
    chunks: Callable[[], Iterator[bytes]]
    file: Path | None = None


def read_archive(path: Path, limits: Limits | None = None) -> Iterator[Entry]:
    """Yield the entries of a ``.tar.gz``, in order; each can be read until the next one is requested.

    Nothing in the archive is trusted: ``Guard`` decides which entries may be written.

    Raises:
        ArtifactError: it is not a gzip tar, is damaged or cut off, or holds more than ``limits``.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", "Name a packed environment.") from None
    with file, _damage(path):
        packed = path.stat().st_size
        _check_format(file.read(6), path)
        file.seek(0)
        limits = limits or Limits()
        most = min(limits.num_bytes, max(limits.free_of_ratio, packed * limits.ratio))
        yield from _read_tar(_Bounded(gzip.GzipFile(fileobj=file), path, most), path, limits, most)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Convert all that parsing a damaged archive may raise to one error: tarfile checks little of what it reads."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged or cut off: {error}", "Copy it again, or rebuild it.") from error


def _check_format(start: bytes, path: Path) -> None:
    if start.startswith(b"\x1f\x8b"):
        return
    known = next((name for magic, name in _FORMATS.items() if start.startswith(magic)), "")
    raise ArtifactError(
        f"{path} is {f'a {known} file' if known else 'not a gzip file'}; Triton reads .tar.gz only.",
        "Pack it again: conda-pack --output custom_env.tar.gz",
    )


def _read_tar(file: _Bounded, path: Path, limits: Limits, most: int) -> Iterator[Entry]:
    num_entries = num_bytes = end = 0
    with tarfile.TarFile(fileobj=file, encoding="utf-8") as archive:  # type: ignore[arg-type]  # reads, seeks, tells
        while (member := file.within_budget(archive.next)) is not None:
            num_entries += 1
            num_bytes += max(0, member.size)
            # A member that begins before its predecessor: a negative size would send the parser into a loop.
            if member.size < 0 or member.offset_data < end:
                raise ArtifactError(f"{path} is damaged: entry {member.name[:200]!r} has a size below 0.")
            if member.isreg() and not member.issparse() and member.offset_data + member.size > archive.offset:
                raise ArtifactError(f"{path} is damaged: entry {member.name[:200]!r} reaches into the next one.")
            if len(archive.pax_headers) > _MAX_PAX:
                raise ArtifactError(f"{path} has more than {_MAX_PAX} global pax records; no environment has.")
            if num_entries > limits.num_entries or num_bytes > most:
                raise ArtifactError(
                    f"{path} would unpack to more than {most:,} bytes or {limits.num_entries:,} entries.",
                    "That is not an environment; if it is, unpack it by hand.",
                )
            yield _member(archive, member, path)
            archive.members.clear()  # type: ignore[attr-defined]  # or it keeps a record of every entry
            end = member.offset_data
        _check_end(file, archive.offset, path)


def _check_end(file: _Bounded, offset: int, path: Path) -> None:
    """Detect truncation: a tar ends with blocks of zeros, and gzip with a checksum."""
    last = file.last  # the block that the parser stopped at; seeking back would unpack everything again
    if any(last) or len(last) != _BLOCK or file.tell() != offset + _BLOCK:
        raise ArtifactError(f"{path} is cut off: its end is missing.", "Copy it again, or rebuild it.")
    while file.read(_CHUNK):
        pass


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Entry:
    if member.type in _OTHER or member.issparse():
        kind = _OTHER.get(member.type, "sparse file")
    elif member.isdir():
        kind = FOLDER
    elif member.issym():
        kind = SYMLINK
    elif member.islnk():
        kind = HARD_LINK
    else:
        kind = FILE if member.isreg() else f"entry of type {member.type!r}"

    def chunks() -> Iterator[bytes]:
        content = archive.extractfile(member) if kind == FILE else None
        while content:
            with _damage(path):
                chunk = content.read(_CHUNK)
            if not chunk:
                return
            yield chunk

    return Entry(member.name, kind, member.size, member.mode, float(member.mtime), member.linkname, chunks)


class _Bounded:
    """Gzip file with bounded reads, so that a forged tar header cannot exhaust memory."""

    def __init__(self, file: gzip.GzipFile, path: Path, most: int) -> None:
        self._file, self._path, self._most = file, path, most
        self.name, self.mode = "", "rb"  # tarfile reads them
        self.last = b""
        self._budget: int | None = None
        self.seek, self.tell = file.seek, file.tell

    def within_budget(self, parse: Callable[[], tarfile.TarInfo | None]) -> tarfile.TarInfo | None:
        """Let the parser read the headers of one entry, up to the bytes that any entry needs."""
        self._budget = _MAX_HEADERS
        try:
            return parse()
        finally:
            self._budget = None

    def read(self, size: int = -1) -> bytes:
        if self._budget is not None:
            self._budget -= max(size, 0)
        if size < 0 or size > _MAX_READ or (self._budget or 0) < 0:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        if self._file.tell() > self._most + _MAX_READ:
            raise ArtifactError(f"{self._path} would unpack to more than {self._most:,} bytes.")
        self.last = self._file.read(size)
        return self.last


def read_folder(folder: Path) -> Iterator[Entry]:
    """Yield the entries of a folder, sorted; links are not followed.

    Raises:
        ArtifactError: there is no such folder.
    """
    if not folder.is_dir():
        raise ArtifactError(f"There is no environment at {folder}.", "Name a packed environment or its folder.")
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        is_link, is_folder = stat.S_ISLNK(status.st_mode), stat.S_ISDIR(status.st_mode)
        kind = SYMLINK if is_link else FOLDER if is_folder else FILE if stat.S_ISREG(status.st_mode) else "special file"
        link = str(path.readlink()) if is_link else ""
        name = path.relative_to(folder).as_posix()
        size = status.st_size if kind == FILE else 0
        yield Entry(name, kind, size, status.st_mode, status.st_mtime, link, partial(_chunks, path), path)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except PermissionError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", "Read it as its owner.") from None


class Guard:
    """Checks each entry of an archive, in order: it must stay in the folder that the archive is unpacked into.

    It does not rely on tarfile's filters, which have published bypasses (CVE-2025-4517, CVE-2025-4330). Instead it
    keeps the kind of every path so far: nothing is written through a link, and no link points outside.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._num_chars = 0

    def refusal(self, entry: Entry) -> str:
        """Return the reason why ``entry`` may not be written; empty where it may."""
        name = entry.path
        path = posixpath.normpath(name)
        if name.startswith("/"):
            return "its name is absolute"
        if ".." in name.split("/"):
            return "its name climbs out of the folder"
        if len(name.encode(errors="surrogateescape")) > _MAX_PATH or _has_long_part(name):
            return "its name is too long"
        if name.count("/") > _MAX_DEPTH:
            return "it is nested too deep"
        if "\0" in name + entry.link or len(entry.link.encode(errors="surrogateescape")) >= _MAX_PATH:
            return "its name or link is not valid in a file system"
        if not abs(entry.mtime) < _MAX_TIME:  # nan too
            return "its time is out of range"
        if entry.kind not in (FILE, FOLDER, SYMLINK, HARD_LINK):
            return f"it is a {entry.kind}"
        if entry.kind != FOLDER and entry.mode & (stat.S_ISUID | stat.S_ISGID):
            return "it would run as another user (setuid or setgid)"
        if path == ".":
            return "" if entry.kind == FOLDER else "it names the folder itself"
        return self._place(path, entry)

    def _place(self, path: str, entry: Entry) -> str:
        self._num_chars += len(path)
        if self._num_chars > _MAX_NAMES:
            return "all names together are too long"
        for parent in _parents(path):
            if parent not in self._kinds:
                self._kinds[parent] = FOLDER
                self._num_chars += len(parent)
            if self._kinds[parent] != FOLDER:
                return f"it would be written through {parent}, which is a {self._kinds[parent]}"
        before = self._kinds.get(path)
        # conda-pack itself packs a few scripts twice; a second of another kind could undo the check of the first.
        if before and (before, entry.kind) not in ((FOLDER, FOLDER), (FILE, FILE)):
            return f"it appears twice, first as a {before}"
        if entry.kind == SYMLINK and _climbs(path, entry.link):
            return f"it links to {entry.link[:200]}, outside the folder"
        if entry.kind == HARD_LINK and self._kinds.get(posixpath.normpath(entry.link)) not in (FILE, HARD_LINK):
            return f"it is a hard link to {entry.link[:200]}, which is not a file before it in the archive"
        self._kinds[path] = entry.kind
        return ""


def _has_long_part(name: str) -> bool:
    return any(len(part.encode(errors="surrogateescape")) > _MAX_NAME for part in name.split("/"))


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at != -1:
        yield path[:at]
        at = path.find("/", at + 1)


def _climbs(path: str, link: str) -> bool:
    """Whether a link at ``path`` could lead outside.

    ``..`` is allowed only at the beginning of the target, where the folder it leaves is known to be real; after a name,
    which may itself be a link, it is refused.
    """
    parts = link.split("/")
    ups = next((k for k, part in enumerate(parts) if part != ".."), len(parts))
    return link.startswith("/") or not link or ups > path.count("/") or ".." in parts[ups:]
