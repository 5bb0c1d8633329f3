"""Unpack an environment; nothing can escape from its folder."""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from pathlib import Path

from shoal.environment.archive import FILE, FOLDER, SYMLINK, Entry, Guard, Limits, read_archive
from shoal.environment.build_record import alone, aside_prefix
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.paths import check_path_supported
from shoal.progress import OnProgress

_ALWAYS = 0o755, 0o644  # modes of folders and files that a server under another user needs


def unpack(
    archive: Path,
    folder: Path,
    *,
    limits: Limits | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Path:
    """Unpack a packed environment into ``folder``, which must not exist; returns its absolute path.

    Triton starts at once from a folder; it unpacks an archive at each start, in releases before 26.06 to wherever the
    archive says. Here an entry that would escape makes the whole archive invalid: absolute names, ``..``, links that
    lead outside, writing through links, devices, setuid files. It is unpacked beside ``folder`` and renamed at the end.

    Raises:
        ArtifactError: the archive is damaged, too large, or holds such an entry.
        InputError: ``folder`` exists, or Triton does not support its path.
        SetupError: the disk is full, or the folder cannot be written.
    """
    target = folder.absolute()
    check_path_supported(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists; it will not be replaced.", "Name another folder, or remove that one.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target):
            _unpack_aside(archive, target, limits, on_progress)
    except OSError as error:
        raise SetupError(
            f"{archive} cannot be unpacked into {target}: {error.strerror or error}.", "Nothing was left there."
        ) from error
    return target


def _unpack_aside(archive: Path, target: Path, limits: Limits | None, on_progress: OnProgress) -> None:
    aside = Path(tempfile.mkdtemp(prefix=aside_prefix(target), dir=target.parent))
    try:
        _write_all(archive, aside, limits, on_progress)
        aside.chmod(_ALWAYS[0])
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_all(archive: Path, folder: Path, limits: Limits | None, on_progress: OnProgress) -> None:
    guard = Guard()
    on_progress("unpack", 0, 1)
    for entry in read_archive(archive, limits):
        refusal = guard.refusal(entry)
        if refusal:
            raise ArtifactError(
                f"{archive} holds {entry.path[:200]!r}: {refusal}.", "Do not use it; have its maker pack it again."
            )
        _write(entry, folder)
    on_progress("unpack", 1, 1)


def _write(entry: Entry, folder: Path) -> None:
    path = folder / posixpath.normpath(entry.path)
    _make_folder(path if entry.kind == FOLDER else path.parent)
    if entry.kind == FOLDER:
        return
    if entry.kind == SYMLINK:
        path.symlink_to(entry.link)
    elif entry.kind == FILE:
        path.unlink(missing_ok=True)  # not to write into what an earlier one may be linked to
        with path.open("xb") as file:
            file.writelines(entry.chunks())
        path.chmod(entry.mode & 0o755 | _ALWAYS[1])
        os.utime(path, (entry.mtime, entry.mtime))  # compiled modules are used only if their source is of this time
    else:
        os.link(folder / posixpath.normpath(entry.link), path, follow_symlinks=False)


def _make_folder(path: Path) -> None:
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir()
        path.chmod(_ALWAYS[0])  # whatever the umask
