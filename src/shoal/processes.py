"""Child processes that end with their parent, and process information from ``/proc``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
# Indices of the fields of stat behind the name; in proc_pid_stat(5) they are numbered from 3.
_STATE, _PARENT, _SESSION, _USER, _SYSTEM, _RESIDENT, _EXIT = 0, 1, 3, 11, 12, 21, 49
_GONE = FileNotFoundError, ProcessLookupError, PermissionError  # a process has ended meanwhile, or is another user's

_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]): sys.exit("the parent is gone")
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"error: {sys.argv[2]}: {error.strerror}")
"""


def bound(command: Sequence[str | Path]) -> list[str]:
    """Wrap ``command`` so that it gets SIGTERM when the *thread* that started it ends (PR_SET_PDEATHSIG)."""
    # -I: neither the current folder nor the user's packages can shadow a module
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *map(str, command)]


@dataclass(frozen=True)
class Process:
    """Snapshot of a process from ``/proc``: ``state`` is Linux's letter for it, ``seconds`` is its processor time."""

    pid: int
    parent: int
    session: int
    state: str
    seconds: float
    resident_bytes: int
    exit_code: int = 0  # as waitpid gives it, for a zombie

    @property
    def is_ended(self) -> bool:
        """Whether the process is a zombie or dead."""
        return self.state in "ZX"

    @property
    def ending(self) -> str:
        """Signal or exit code with which the process ended; empty while it runs."""
        if not self.is_ended:
            return ""
        if os.WIFSIGNALED(self.exit_code):
            return f"killed by {signal.Signals(os.WTERMSIG(self.exit_code)).name}"
        return f"with exit code {os.WEXITSTATUS(self.exit_code)}"

    def arguments(self) -> list[str]:
        """Read the command line; empty once the process has ended."""
        return _read(self.pid, "cmdline").split("\0")[:-1]

    def variables(self) -> dict[str, str]:
        """Read the environment variables at the process's start; empty without permission."""
        return dict(line.split("=", 1) for line in _read(self.pid, "environ").split("\0") if "=" in line)


def find_process(pid: int) -> Process | None:
    """Return the process with this id, if there is one."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    if not fields:
        return None
    return Process(
        pid=pid,
        parent=int(fields[_PARENT]),
        session=int(fields[_SESSION]),
        state=fields[_STATE],
        seconds=(int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS,
        resident_bytes=int(fields[_RESIDENT]) * _PAGE,
        exit_code=int(fields[_EXIT]),
    )


def find_descendants(pid: int) -> list[Process]:
    """Return the processes that a process has started, directly or through others."""
    found: list[Process] = []
    try:
        tasks = [*os.scandir(f"/proc/{pid}/task")]
    except _GONE:
        return found
    for task in tasks:
        for child in _read(pid, f"task/{task.name}/children").split():
            process = find_process(int(child))
            if process is not None:
                found += [process, *find_descendants(process.pid)]
    return found


def processes() -> Iterator[Process]:
    """Iterate over all processes."""
    for entry in os.scandir("/proc"):
        process = find_process(int(entry.name)) if entry.name.isdigit() else None
        if process is not None:
            yield process


def _read(pid: int, name: str) -> str:
    try:
        with FileIO(f"/proc/{pid}/{name}") as file:  # the gateway reads some hundred of these a second
            return file.readall().decode(errors="replace")
    except _GONE:
        return ""
