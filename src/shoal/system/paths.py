"""Path helpers: shipped files, paths that Triton supports, folder locks, and folders that are written in one step."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shoal
from shoal.errors import InputError, SetupError
from shoal.system.files import read_json

SAFE = "letters, digits and _ . / + @ : , = % ^ -"  # characters that a shell takes as they are
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def shipped_root() -> Path:
    """Return the root of shoal's own model folders and environment files: the checkout, or data in the wheel."""
    package = Path(shoal.__file__).parent
    checkout = package.parents[1]
    return checkout if (checkout / "preprocess").is_dir() else package / "model_folders"


def find_unsafe(text: str) -> list[str]:
    """Return the characters of a path or name that are unsafe in a shell, where Triton inserts it unquoted."""
    return sorted(set(re.findall(r"[^A-Za-z0-9_./+@:,=%^-]", text)))


def check_path_supported(path: Path) -> None:
    """Check that Triton supports ``path``. Triton pastes paths into a shell command unquoted.

    Raises:
        InputError: ``path`` has characters that are unsafe in a shell; the message names them.
    """
    if odd := find_unsafe(str(path)):
        raise InputError(
            f"Triton does not support the path {str(path)!r}: it holds {', '.join(map(repr, odd))}.",
            f"Use a folder whose path has only {SAFE}.",
        )


def check_replaceable(target: Path, mark: str, folders: tuple[str, ...] = ()) -> None:
    """Check that ``target`` is absent, empty, or holds only files that shoal wrote.

    A folder that shoal made holds the JSON file ``mark``, which names shoal's version and every other file, except the
    files in the subfolders ``folders``.

    Raises:
        InputError: ``target`` is a mount point, or holds a file that shoal did not write, which the message names.
    """
    if target.is_mount():
        raise InputError(f"{target} is a mount point and cannot be replaced.", "Name a folder in it.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        made = read_json(target / mark)
        ours = {mark, *made["files"]} if made["shoal"] else set()
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{target} exists and shoal did not make it (it holds no {mark} of shoal's); it will not be replaced.",
            "Name another folder, or remove that one.",
        ) from None
    entries = (path for path in sorted(target.iterdir()) if path.name not in folders)
    for path in (path for entry in entries for path in (entry, *sorted(entry.rglob("*")))):
        is_file = path.is_file() and "__pycache__" not in path.parts
        if is_file and str(path.relative_to(target)) not in ours:
            raise InputError(
                f"{target} holds {path.relative_to(target)}, which shoal did not put there; it will not be replaced.",
                "Move that file out, or name another folder.",
            )


@contextmanager
def lock(folder: Path, what: str, fix: str) -> Iterator[None]:
    """Lock ``folder`` against other processes; the kernel releases the lock when this process ends.

    Raises:
        SetupError: another process holds the lock; the message is ``what`` and ``fix``.
    """
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(what, fix) from None
        yield
    finally:
        os.close(at)


@contextmanager
def alone(target: Path, what: str) -> Iterator[None]:
    """Lock the parent folder of ``target``, and remove unfinished folders of processes that were killed.

    ``what`` names the work in the error, such as ``build``.

    Raises:
        SetupError: another process holds the lock.
    """
    with lock(target.parent, f"Another {what} is running in {target.parent}.", "Wait for it, or name another folder."):
        for left in target.parent.glob(f".{target.name}.making-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def aside(target: Path) -> Iterator[Path]:
    """Make a temporary folder beside ``target``. The caller moves it to ``target``; otherwise it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
    try:
        folder.chmod(0o755)  # mkdtemp's 0700 would keep a server under another user out
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def exchange(made: Path, target: Path) -> None:
    """Swap folder ``made`` with ``target``, atomically if possible; the old ``target``, if any, is then at ``made``."""
    if not target.exists():
        made.rename(target)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return
    # File systems without RENAME_EXCHANGE, such as NFS: two renames, not atomic.
    old = made.with_name(f".old-{made.name.lstrip('.')}")
    target.rename(old)
    try:
        made.rename(target)
    except OSError:
        old.rename(target)
        raise
    old.rename(made)
