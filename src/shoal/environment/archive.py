"""Read the entries of an environment, from a packed archive or a folder, and unpack an archive safely."""

from __future__ import annotations

import gzip
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.errors import ArtifactError, InputError, SetupError
from shoal.paths import alone, aside, check_path_supported
from shoal.progress import OnProgress

FILE, FOLDER, SYMLINK, HARD_LINK = "file", "folder", "symbolic link", "hard link"
_SPECIAL = "special file"  # a device or a pipe
_FORMATS = {
    b"BZh": "bzip2 file",
    b"\xfd7zXZ": "xz file",
    b"\x28\xb5\x2f\xfd": "zstandard file",
    b"PK\x03\x04": "zip file",
    b"version https://git-lfs": "Git LFS pointer",
}
_CHUNK = 2**20


@dataclass(frozen=True)
class Entry:
    """A file, folder, link or special file of an environment.

    ``link`` is the target of a link. ``chunks`` yields the content of a file, from beginning to end. ``file`` is the
    entry's path on this machine, None in an archive. ``refusal`` is the reason why an entry of an archive must not be
    unpacked, empty if it may be unpacked.
    """

    path: str
    kind: str
    size: int
    mode: int
    mtime: float
    link: str
    chunks: Callable[[], Iterator[bytes]]
    file: Path | None = None
    refusal: str = ""


class _Header(tarfile.TarInfo):
    """Header of an archive's entry; raises an error if it is damaged, where tarfile would end the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) < tarfile.BLOCKSIZE or any(buf):
                raise tarfile.ReadError(str(error)) from error
            raise  # a block of zeros is the regular end of an archive


def read_archive(path: Path) -> Iterator[Entry]:
    """Yield the entries of a ``.tar.gz`` file, in order.

    The content of an entry can be read only until the next entry is requested.

    Raises:
        ArtifactError: the file cannot be read, is not a gzip-compressed tar archive, or is damaged or cut off.
    """
    _check_format(path)
    with (
        _damage(path),
        gzip.open(path) as file,
        tarfile.open(fileobj=file, mode="r|", encoding="utf-8", tarinfo=_Header) as archive,
    ):
        files: set[str] = set()
        while (member := archive.next()) is not None:
            kind = _find_kind(member)
            refusal = _find_refusal(member, kind, files)
            if kind in (FILE, HARD_LINK):
                files.add(posixpath.normpath(member.name))
            yield Entry(
                member.name,
                kind,
                member.size,
                member.mode,
                float(member.mtime),
                member.linkname,
                partial(_read_member, archive, member, path),
                refusal=refusal,
            )
            archive.members.clear()  # type: ignore[attr-defined]  # otherwise tarfile keeps a record of every entry
        while file.read(_CHUNK):  # read to the end, where gzip has a checksum
            pass


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Convert every exception that reading a damaged archive can raise to ``ArtifactError``.

    There are many such exceptions, since tarfile validates little of what it reads.
    """
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, OverflowError) as error:
        raise ArtifactError(f"{path} is damaged or cut off: {error}", "Copy it again, or rebuild it.") from error


def _check_format(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(32)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", "Name a packed environment.") from None
    if not start.startswith(b"\x1f\x8b"):
        known = next((f"a {name}" for magic, name in _FORMATS.items() if start.startswith(magic)), "not a gzip file")
        raise ArtifactError(
            f"{path} is {known}; Triton reads .tar.gz only.", "Pack it again: conda-pack --output custom_env.tar.gz"
        )


def _find_kind(member: tarfile.TarInfo) -> str:
    if member.isdir():
        return FOLDER
    if member.issym():
        return SYMLINK
    if member.islnk():
        return HARD_LINK
    return FILE if member.isreg() else _SPECIAL


def _find_refusal(member: tarfile.TarInfo, kind: str, files: set[str]) -> str:
    """Return the reason why an entry must not be unpacked; empty if it may be.

    The entry is judged by its type, its name and the target of its link. ``files`` are the names of the files and hard
    links that precede the entry in the archive. ``tarfile.data_filter`` is not used: Python has it from 3.11.4 on
    (Debian 12 has 3.11.2), and it would unpack an entry with an absolute name under another name.
    """
    if member.name.startswith("/"):
        return "its name is absolute"
    if ".." in member.name.split("/"):
        return "its path leaves the folder"
    if kind == HARD_LINK and posixpath.normpath(member.linkname) not in files:
        return f"it is a hard link to {member.linkname}, which is not a file before it in the archive"
    if kind == SYMLINK:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
        if target.startswith(("/", "../")) or target == "..":
            return f"it links to {member.linkname}, outside the folder"
    return "it is a special file" if kind == _SPECIAL else ""


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Iterator[bytes]:
    content = archive.extractfile(member) if member.isreg() else None
    while content:
        with _damage(path):
            chunk = content.read(_CHUNK)
        if not chunk:
            return
        yield chunk


def read_folder(folder: Path, paths: Iterable[Path] | None = None) -> Iterator[Entry]:
    """Yield the entries of a folder, or only the entries at ``paths``, sorted by path; links are not followed.

    Raises:
        ArtifactError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ArtifactError(f"There is no environment at {folder}.", "Name a packed environment or its folder.")
    for path in sorted(folder.rglob("*") if paths is None else paths):
        status = path.lstat()
        is_link, is_folder = stat.S_ISLNK(status.st_mode), stat.S_ISDIR(status.st_mode)
        kind = SYMLINK if is_link else FOLDER if is_folder else FILE if stat.S_ISREG(status.st_mode) else _SPECIAL
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
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", "Run this as the owner of the file.") from None


# --- unpack --------------------------------------------------------------------------------------------------------


def unpack(archive: Path, folder: Path, *, on_progress: OnProgress = lambda stage, done, total: None) -> Path:
    """Unpack a packed environment into ``folder``, which must not exist; returns the absolute path of ``folder``.

    Triton uses a folder as it is, but unpacks an archive each time it loads a model. Triton before 26.06 does not check
    whether an entry would be written outside the target folder. This function refuses an archive with such an entry.

    Raises:
        ArtifactError: the archive is damaged, or has an entry that must not be unpacked.
        InputError: ``folder`` exists, or Triton does not support its path.
        SetupError: the disk is full, or the folder cannot be written.
    """
    target = folder.absolute()
    check_path_supported(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists; it will not be replaced.", "Name another folder, or remove that one.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target, "build"), aside(target) as made:
            on_progress("unpack", 0, 1)
            for entry in read_archive(archive):
                if entry.refusal:
                    raise ArtifactError(
                        f"{archive} holds {entry.path[:200]!r}: {entry.refusal}.",
                        "Do not use it; have its maker pack it again.",
                    )
                _write(entry, made)
            for parent, _, _ in os.walk(made):
                Path(parent).chmod(0o755)  # a server may run as another user, whatever the umask
            on_progress("unpack", 1, 1)
            made.rename(target)
    except OSError as error:
        raise SetupError(
            f"{archive} cannot be unpacked into {target}: {error.strerror or error}.", "Nothing was left there."
        ) from error
    return target


def _write(entry: Entry, folder: Path) -> None:
    path = folder / entry.path
    if entry.kind == FOLDER:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # conda-pack packs a few scripts twice
    if entry.kind == SYMLINK:
        path.symlink_to(entry.link)
    elif entry.kind == FILE:
        with path.open("xb") as file:
            file.writelines(entry.chunks())
        path.chmod(entry.mode & 0o755 | 0o644)
        os.utime(path, (entry.mtime, entry.mtime))  # compiled modules are used only if their source is of this time
    else:
        path.hardlink_to(folder / entry.link)
