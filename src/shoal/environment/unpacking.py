"""Unpack an environment into a temporary folder beside the final one, then rename the temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.environment.archive import FILE, FOLDER, SYMLINK, Entry, read_archive
from shoal.environment.build_record import alone, aside
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.paths import check_path_supported
from shoal.progress import OnProgress


def unpack(archive: Path, folder: Path, *, on_progress: OnProgress = lambda stage, done, total: None) -> Path:
    """Unpack a packed environment into ``folder``, which must not exist; returns its absolute path.

    Triton uses a folder as it is, but unpacks an archive at each start, and releases before 26.06 do so to wherever the
    archive says. Here an archive with an entry that would leave the folder is refused.

    Raises:
        ArtifactError: the archive is damaged, or holds such an entry.
        InputError: ``folder`` exists, or Triton does not support its path.
        SetupError: the disk is full, or the folder cannot be written.
    """
    target = folder.absolute()
    check_path_supported(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists; it will not be replaced.", "Name another folder, or remove that one.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target), aside(target) as made:
            on_progress("unpack", 0, 1)
            for entry in read_archive(archive):
                if entry.refusal:
                    raise ArtifactError(
                        f"{archive} holds {entry.path[:200]!r}: {entry.refusal}.",
                        "Do not use it; have its maker pack it again.",
                    )
                _write(entry, made)
            for parent, _, _ in os.walk(made):
                Path(parent).chmod(0o755)  # whatever the umask, for a server under another user
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
