"""Read the entries of an environment, from a packed archive or a folder, and unpack an archive safely."""

from __future__ import annotations

import errno
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
from itertools import takewhile
from pathlib import Path

from shoal.errors import ArtifactError, InputError, SetupError
from shoal.system.files import open_regular
from shoal.system.paths import alone, aside, check_path_supported
from shoal.system.progress import OnProgress

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
_MOST_ENTRIES = 250_000  # with the folders that only names show; environments have up to about 100,000
_MOST_NAME, _MOST_PART = 1024, 255  # characters of a path; bytes of each part, a limit of Linux
_MOST_STEPS = 64  # of a link, out of folders
_MOST_HEADER = 2**16  # bytes of the headers before an entry, which tarfile reads as a whole
_MOST_RATIO = 1032  # of the sizes unpacked and packed: gzip's limit
_MOST_SECONDS = 2**40  # since 1970; no file system has later times
_EXTENDED = (b"x", b"g", b"X", tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)  # headers of the next entry
_BAD_DATA = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, OSError, *_BAD_DATA)


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
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) < tarfile.BLOCKSIZE or any(buf):
                raise tarfile.ReadError(str(error)) from error
            raise  # a block of zeros is the regular end of an archive
        if header.size < 0 or (header.type in _EXTENDED and header.size > _MOST_HEADER):
            raise tarfile.ReadError(f"a header has {header.size:,} bytes")
        return header


def read_archive(path: Path) -> Iterator[Entry]:
    """Yield the entries of a ``.tar.gz`` file, in order.

    The content of an entry can be read only until the next entry is requested.

    Raises:
        ArtifactError: the file cannot be read, is not a gzip-compressed tar archive, is damaged or cut off, or has more
            than 250,000 entries.
    """
    _check_format(path)
    with (
        _damage(path),
        gzip.open(path) as file,
        tarfile.open(fileobj=file, mode="r|", encoding="utf-8", tarinfo=_Header) as archive,
    ):
        tree, num_entries, most = _Tree(), 0, path.stat().st_size * _MOST_RATIO
        while (member := archive.next()) is not None:
            # A size may point back, or so far that tarfile would search for the next header without end.
            if not member.offset_data <= archive.offset <= most:
                raise tarfile.ReadError(f"an entry ends at byte {archive.offset}")
            kind, num_entries = _find_kind(member), num_entries + 1
            refusal = tree.take(member, kind)
            if max(num_entries, len(tree.kinds)) > _MOST_ENTRIES:
                raise ArtifactError(
                    f"{path} has more than {_MOST_ENTRIES:,} entries.",
                    "If you trust it, unpack it with tar -xzf and name the folder.",
                )
            yield Entry(
                member.name,
                kind,
                member.size if kind == FILE else 0,
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
    except _DAMAGE as error:
        raise ArtifactError(f"{path} is damaged or cut off: {error}", "Copy it again, or rebuild it.") from error


def _check_format(path: Path) -> None:
    try:
        with open_regular(path) as file:
            start = file.read(32) or b""  # None from a file of /proc that waits
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


class _Tree:
    """Paths of an archive so far, with their kinds, and the rules by which an entry must not be unpacked.

    ``tarfile.data_filter`` is not used: Python has it from 3.11.4 on (Debian 12 has 3.11.2), the first versions follow
    chains of links out of the folder (CVE-2025-4517), and none can judge an archive without unpacking it.

    Names suffice here, whatever the order of the entries, because a path that was a folder stays a folder: nothing may
    replace it, and no link or file may have entries below it. So each link is in a real folder. Its target may climb
    only out of folders, never out of another link, and so cannot leave the top; nor can a chain of such links.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}

    def take(self, member: tarfile.TarInfo, kind: str) -> str:
        """Add an entry; return the reason why it must not be unpacked, empty if it may be."""
        name, link = member.name, member.linkname
        path = posixpath.normpath(name)
        if name.startswith("/"):
            return "its name is absolute"
        if ".." in name.split("/"):
            return "its path leaves the folder"
        if "\0" in name + link:
            return "its name or link has a null character"
        parts = os.fsencode(f"{name}/{link}").split(b"/")
        if max(len(name), len(link)) > _MOST_NAME or max(map(len, parts)) > _MOST_PART:
            return f"its name or link has more than {_MOST_NAME:,} characters, or {_MOST_PART} bytes between slashes"
        if kind == _SPECIAL or member.issparse():
            return "it is a special file" if kind == _SPECIAL else "it is a sparse file"
        if not abs(member.mtime) < _MOST_SECONDS:
            return f"its time is {float(member.mtime):g}"
        if kind == FOLDER or path == ".":
            return self._enter(path) if kind == FOLDER else "its name is empty"
        if self.kinds.get(path) == FOLDER:
            return f"it is a {kind}, and was a folder before"
        refusal = self._enter(posixpath.dirname(path))
        source = posixpath.normpath(link)
        if kind == HARD_LINK and (source == path or self.kinds.get(source) != FILE):
            refusal = refusal or f"it is a hard link to {link}, which is not a file before it in the archive"
        if kind == SYMLINK:
            refusal = refusal or self._follow(posixpath.dirname(path), link)
        if not refusal:
            self.kinds[path] = FILE if kind == HARD_LINK else kind
        return refusal

    def _enter(self, path: str) -> str:
        """Add a folder and those above it; return the reason why it cannot be one."""
        new = []
        while path not in ("", ".") and (kind := self.kinds.get(path)) != FOLDER:
            if kind:
                return f"{path} is a {kind} in the archive, not a folder"
            new.append(path)
            path = posixpath.dirname(path)
        self.kinds |= dict.fromkeys(new, FOLDER)
        return ""

    def _follow(self, folder: str, link: str) -> str:
        """Return the reason why a symbolic link in ``folder`` must not have the target ``link``."""
        if not link:
            return "it links to nothing"
        outside = f"it links to {link}, outside the folder"
        if link.startswith("/"):
            return outside
        if link.count("..") > _MOST_STEPS:
            return f"it links to {link}, more than {_MOST_STEPS} folders up"
        at = [*filter(None, folder.split("/"))]
        for step in link.split("/"):
            if step == "..":
                if not at:
                    return outside
                if refusal := self._enter("/".join(at)):
                    return f"it links to {link}, but {refusal}"
                at.pop()
            elif step not in ("", "."):
                at.append(step)
        return ""


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
        with open_regular(path) as file:
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
            folders: set[Path] = {made}
            for entry in read_archive(archive):
                if entry.refusal:
                    raise ArtifactError(
                        f"{archive} holds '{entry.path[:200]}': {entry.refusal}.",
                        "Do not use it; have its maker pack it again.",
                    )
                _write(entry, made, folders)
            for parent, _, _ in os.walk(made):
                Path(parent).chmod(0o755)  # a server may run as another user, whatever the umask
            on_progress("unpack", 1, 1)
            made.rename(target)
    except OSError as error:
        raise SetupError(
            f"{archive} cannot be unpacked into {target}: {error.strerror or error}.", "Nothing was left there."
        ) from error
    return target


def _write(entry: Entry, top: Path, folders: set[Path]) -> None:
    path = top / posixpath.normpath(entry.path)
    _make_folder(path if entry.kind == FOLDER else path.parent, folders)
    if entry.kind == FOLDER:
        return
    path.unlink(missing_ok=True)  # conda-pack packs a few scripts twice
    if entry.kind == SYMLINK:
        path.symlink_to(entry.link)
    elif entry.kind == FILE:
        with path.open("xb") as file:
            file.writelines(entry.chunks())
        path.chmod(entry.mode & 0o755 | 0o644)
        os.utime(path, (entry.mtime, entry.mtime))  # compiled modules are used only if their source is of this time
    else:
        path.hardlink_to(top / posixpath.normpath(entry.link))


def _make_folder(folder: Path, folders: set[Path]) -> None:
    """Make a folder and those above it, except the known ``folders``, and add them; none may be a link.

    Each is examined, because two names of an archive may be the same on this file system (if it ignores case). No
    descriptors are needed: only this process writes below a folder that ``aside`` made.
    """
    for each in reversed([*takewhile(lambda each: each not in folders, (folder, *folder.parents))]):
        try:
            each.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(each.lstat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{each.name} is not a folder") from None
        folders.add(each)
