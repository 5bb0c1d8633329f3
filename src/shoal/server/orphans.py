"""Remove shared memory and temporary folders left by servers that were killed.

A lease is a lock file in the server's temporary folder. The starting process and all of the server's processes hold
its lock through an inherited descriptor. The kernel releases it with the last of them: a free lock means an orphan.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.processes import Process, processes

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "shoal-"  # of a server's temporary folder
_LEASE = "lease"
_REGIONS = re.compile(r"shoal_\d+_[0-9a-f]{8}_")
ENVIRONMENT = re.compile(r"/tmp/python_env_\w{6}")  # where Triton unpacks one, regardless of TMPDIR
_PATIENCE = 2.0  # seconds, for a killed process to be gone


class Lease:
    """Lock file that marks ``folder`` and the shared memory with the prefix ``shared_memory`` as in use."""

    def __init__(self, folder: Path, shared_memory: str) -> None:
        self.folder, self._content = folder, {"shared_memory": shared_memory, "environments": list[str](), "session": 0}
        new = folder / f"{_LEASE}.new"
        self._file = new.open("w+", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.set_inheritable(self._file.fileno(), True)
        self._write()
        new.rename(folder / _LEASE)  # it becomes visible only once it is locked

    @property
    def file(self) -> int:
        """The file's descriptor, for the server to inherit."""
        return self._file.fileno()

    def note(self, *, session: int, environments: Iterable[str] = ()) -> None:
        """Record the session of the server's processes, and the folders of its unpacked environments."""
        self._content |= {"session": session, "environments": sorted(environments)}
        self._write()

    def _write(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump(self._content, self._file)
        self._file.flush()

    def end(self) -> None:
        """Remove everything that the lease names. The server must have ended."""
        _remove(self.folder, self._content)
        self._file.close()


def clean_up() -> list[Path]:
    """Clean up after ended servers of this user that left files behind; returns their folders.

    If both the server and its parent have ended, hanging child processes are killed.
    """
    found = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LEASE}"))
    return [path.parent for path in found if _is_own(path) and _clean(path)]


def _is_own(lease: Path) -> bool:
    """Whether the lease and its folder belong to this user and are writable by no other."""
    with contextlib.suppress(OSError):
        found = [path.lstat() for path in (lease, lease.parent)]
        return all(
            entry.st_uid == os.geteuid() and not stat.S_ISLNK(entry.st_mode) and not entry.st_mode & 0o022
            for entry in found
        )
    return False


def _clean(path: Path) -> bool:
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(path.open("r+", encoding="utf-8"))
            content = json.load(file)
        except (OSError, ValueError):  # removed meanwhile, or not written by shoal
            return False
        if not _is_sound(content):
            return False
        if not _lock(file) and not (_end_orphans(path, int(content["session"])) and _wait_for_lock(file)):
            return False
        if not path.is_file():  # another process removed it first
            return False
        _remove(path.parent, content)
        return True


def _is_sound(content: Any) -> bool:
    """Whether a lease names only resources that servers create; anything else must not be deleted."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("session"), int)
        and _REGIONS.fullmatch(str(content.get("shared_memory"))) is not None
        and isinstance(content.get("environments"), list)
        and all(ENVIRONMENT.fullmatch(str(path)) for path in content["environments"])
    )


def _lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _wait_for_lock(file: Any) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not (is_locked := _lock(file)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_locked


def _end_orphans(lease: Path, session: int) -> bool:
    """Kill the holders of ``lease`` if all belong to ``session`` and the server, its leader, has ended."""
    holders = [process for process in processes() if process.pid != os.getpid() and _holds(process, lease)]
    if not session or not holders or any(p.session != session or p.pid == session for p in holders):
        return False
    for process in holders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return True


def _holds(process: Process, lease: Path) -> bool:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if link.samefile(lease):
                    return True
    return False


def _remove(folder: Path, content: dict[str, Any]) -> None:
    for region in SHARED_MEMORY.glob(f"{content['shared_memory']}*"):
        with contextlib.suppress(OSError):
            region.unlink()
    for environment in content["environments"]:
        shutil.rmtree(environment, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
