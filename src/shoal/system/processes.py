"""Child processes that end with their parent, and process information from ``/proc``.

As a program, this module is the helper of a ``Reaper``. It imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
# Indices of the fields of stat behind the name; in proc_pid_stat(5) they are numbered from 3.
_STATE, _PARENT, _GROUP, _USER, _SYSTEM, _RESIDENT, _EXIT = 0, 1, 2, 11, 12, 21, 49
_REAP_SECONDS = 5.0  # for a successor to end what is left
_MARK = "SHOAL_ENDS_WITH"  # environment variable of every process that is started while a reaper is open
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


def start_successor(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start Python with ``arguments`` as a program that acts when this process has ended, even if it was killed.

    The program reads its standard input, a pipe that then closes. What ends this process's group, such as Ctrl-C,
    leaves the program alone.
    """
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in (_MARK, "LD_PRELOAD")},
    )


class Reaper:
    """Context manager that ends the processes started in its ``with`` block, even if this process is killed.

    A successor finds these processes, and those that they start, by an environment variable that they inherit, so only
    one reaper can be open in a process. ``folder`` is for their files; it is created at the start. After the processes
    have ended, the folder and their shared memory are removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        mark = secrets.token_hex(8)
        # -I -S: neither the current folder nor any package is imported
        self._successor = start_successor("-I", "-S", Path(__file__).resolve(), mark, self._folder.resolve())
        os.environ[_MARK] = mark
        os.environ["SPT_NOENV"] = "1"  # or setproctitle would overwrite the variables of processes that it names
        return self

    def note(self) -> None:
        """Have the successor note the processes' shared memory now, because later they may all die at once."""
        with contextlib.suppress(BrokenPipeError):
            assert self._successor.stdin is not None
            self._successor.stdin.write(b"\n")
            self._successor.stdin.flush()

    def __exit__(self, *error: object) -> None:
        os.environ.pop(_MARK, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._successor.communicate(timeout=_REAP_SECONDS)


def _reap(mark: str, folder: str) -> None:
    """Wait for the end of the process that opened a ``Reaper``; then end the processes with its mark."""
    shared: set[str] = set()
    for _ in sys.stdin:
        _find_marked(mark, shared)
    while found := _find_marked(mark, shared):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for path in shared:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _find_marked(mark: str, shared: set[str]) -> list[int]:
    """Return the processes with a mark, and add their shared memory to ``shared``.

    Shared memory is usually removed by multiprocessing's resource tracker, a process of its own; but the tracker is
    killed with its starter's process group. If the tracker is alive, it ends by itself.
    """
    found = []
    for process in processes():
        is_tracker = any("resource_tracker" in argument for argument in process.arguments())
        if process.variables().get(_MARK) == mark and not is_tracker:
            found.append(process.pid)
            shared.update(re.findall(r"/dev/shm/psm_\S*", _read(process.pid, "maps")))
    return found


@dataclass(frozen=True)
class Process:
    """Snapshot of a process from ``/proc``: ``state`` is Linux's letter for it, ``seconds`` is its processor time."""

    pid: int
    parent: int
    group: int
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
        group=int(fields[_GROUP]),
        state=fields[_STATE],
        seconds=(int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS,
        resident_bytes=int(fields[_RESIDENT]) * _PAGE,
        exit_code=int(fields[_EXIT]),
    )


@dataclass(frozen=True)
class Thread:
    """Snapshot of a thread: Linux's letter for its state, and the times for which it ran and waited for a processor."""

    state: str
    run_ns: int
    waited_ns: int

    def find_wait(self, before: Thread | None, seconds: float) -> float:
        """Return how much of the last ``seconds`` the thread waited for a processor, since ``before``.

        The kernel counts a wait only when it ends: a thread that is to run and has not run since has waited all along.
        """
        if self.state == "R" and self.run_ns and (before is None or self.run_ns == before.run_ns):
            return seconds
        return (self.waited_ns - before.waited_ns) / 1e9 if before else 0.0


def find_threads(pid: int) -> dict[int, Thread]:
    """Return the threads of a process by id; none if it has ended. Without the kernel's statistics, times are 0."""
    found = {}
    with contextlib.suppress(*_GONE):
        for task in os.scandir(f"/proc/{pid}/task"):
            state = _read(pid, f"task/{task.name}/stat").rpartition(")")[2].split()[:1]
            times = _read(pid, f"task/{task.name}/schedstat").split()
            if state:
                found[int(task.name)] = Thread(state[0], *map(int, times[:2] or (0, 0)))
    return found


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


if __name__ == "__main__":
    _reap(*sys.argv[1:])
