"""Removal of shared memory, temporary folders and unpacked environments that killed servers left behind.

Each server has a temporary folder with a lock file, the *lease*. The process that starts the server and all processes
of the server hold the lock through an inherited descriptor. The kernel releases the lock when the last of them ends,
so a lease that can be locked belongs to a server that has ended. The names of the server's shared memory follow from
the folder's name. The lease has the server's process group on its first line, then the folders into which Triton has
unpacked environments for the server.

If the process that started the server is killed, the server's processes are orphans: they are killed too. This module,
run as a program beside each server, does so at once; the next start does so if that program was killed as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from shoal.errors import SetupError
from shoal.system.processes import processes, start_successor

SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT = re.compile(r"/tmp/python_env_\w{6}")  # where Triton unpacks one, regardless of TMPDIR
_LEASE = "lease"
_FOLDER = re.compile(r"shoal-(\d+)-\w{8}")
_PAUSE = 0.1  # seconds between two attempts to lock the lease of processes that were killed
_ATTEMPTS = 50
_WATCH_SECONDS = 60.0  # for a server's end, after that of its starter


def make_folder() -> Path:
    """Create the temporary folder of a server.

    Raises:
        SetupError: the folder cannot be created.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=f"shoal-{os.getpid()}-"))
    except OSError as error:
        raise SetupError(f"No temporary folder can be created: {error}.", "Name another place: TMPDIR=...") from None


def find_prefix(folder: Path) -> str:
    """Return the prefix of the names of a server's shared memory, given the server's temporary folder."""
    return f"{folder.name.replace('-', '_')}_"


class Lease:
    """Lock file that marks a server's folder and shared memory as in use."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._group = folder, ""
        new = folder / f"{_LEASE}.new"
        self._file = new.open("w", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        new.rename(folder / _LEASE)  # it becomes visible only once it is locked

    @property
    def file(self) -> int:
        """Descriptor of the lock file, which the server's processes inherit."""
        return self._file.fileno()

    def begin(self, group: int) -> None:
        """Record the process group of the server's processes."""
        self._group = str(group)
        self.note(())

    def note(self, environments: Iterable[str]) -> None:
        """Record the folders into which Triton has unpacked environments for the server, or a snapshot's elsewhere."""
        self._file.seek(0)
        self._file.truncate()
        self._file.writelines(f"{line}\n" for line in (self._group, *environments))
        self._file.flush()

    def end(self) -> None:
        """Remove the server's folder, shared memory and unpacked environments. The server must have ended."""
        _remove(self._folder)
        self._file.close()


def watch(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that cleans up after a server when this process ends: it reads a pipe that then closes."""
    return start_successor("-P", "-m", "shoal.serving.server.orphans", folder)


def clean_up() -> list[Path]:
    """End and remove what servers of this user left behind when their starters were killed; return their folders."""
    return [folder for folder in find_folders() if _clean(folder / _LEASE)]


def find_folders() -> list[Path]:
    """Return the temporary folders of this user's servers and services; some may have ended."""
    found = sorted(Path(tempfile.gettempdir()).glob(f"shoal-*/{_LEASE}"))
    return [path.parent for path in found if _FOLDER.fullmatch(path.parent.name) and _is_own(path)]


def _is_own(lease: Path) -> bool:
    """Whether a lock file and its folder belong to this user, and no other user may write to them."""
    with contextlib.suppress(OSError):
        found = [path.lstat() for path in (lease, lease.parent)]
        return all(
            entry.st_uid == os.geteuid() and not stat.S_ISLNK(entry.st_mode) and not entry.st_mode & 0o022
            for entry in found
        )
    return False


def _clean(path: Path) -> bool:
    try:
        with path.open("r+", encoding="utf-8") as file:
            for _ in range(_ATTEMPTS):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not _kill_orphans(path):
                        return False
                    time.sleep(_PAUSE)
            else:
                return False
            if not path.is_file():  # another process removed it first
                return False
            _remove(path.parent)
            return True
    except OSError:  # it was removed meanwhile
        return False


def _kill_orphans(lease: Path) -> bool:
    """Kill the processes of the server that holds a lease, and return whether there were any; not if its starter runs.

    The starter's process id is in the name of the folder. Processes that it forked hold the lease too, and are left
    alone: they are not in the server's process group.
    """
    name, held = _FOLDER.fullmatch(lease.parent.name), lease.stat()
    group = lease.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    holders = [each for each in processes() if each.pid != os.getpid() and _has_open(each.pid, held)]
    if name is None or int(name[1]) in [os.getpid(), *(each.pid for each in holders)]:
        return False
    if group not in {str(each.group) for each in holders}:
        return False
    for each in processes():
        if str(each.group) == group and each.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, signal.SIGKILL)
    return True


def _has_open(pid: int, file: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.path.samestat(entry.stat(), file):
                    return True
    return False


def _remove(folder: Path) -> None:
    for region in SHARED_MEMORY.glob(f"{find_prefix(folder)}*"):
        with contextlib.suppress(OSError):
            region.unlink()
    with contextlib.suppress(OSError):
        for line in (folder / _LEASE).read_text(encoding="utf-8", errors="replace").splitlines():
            # nothing else may be deleted, whatever the file says
            if ENVIRONMENT.fullmatch(line) or Path(line).name == f".{folder.name}":
                shutil.rmtree(line, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    place = Path(sys.argv[1])
    end = time.monotonic() + _WATCH_SECONDS
    while place.is_dir() and not _clean(place / _LEASE) and time.monotonic() < end:  # its starter may take a moment
        time.sleep(_PAUSE)
