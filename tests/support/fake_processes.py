"""Stand-in for /proc and the heartbeat files, as the process monitor reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.serving.gateway.control import process_monitor
from shoal.system.processes import Process, Thread

SERVER = 100  # process id of Triton
MIB = 2**20
EXITED, KILLED = 3 << 8, 9  # statuses, as waitpid gives them


@dataclass(frozen=True)
class FakeProcess(Process):
    """A process with a given command line."""

    command: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the command line."""
        return [*self.command]


class FakeProcesses:
    """All processes by id, their children, threads and heartbeats. ``killed`` are the ids that were killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: dict[int, FakeProcess] = {}
        self.children: dict[int, list[int]] = {}
        self.beacons: dict[int, float] = {}
        self.threads: dict[int, dict[int, Thread]] = {}
        self.num_read = 0  # how often threads were read
        self.killed: list[int] = []
        self.error: OSError | None = None
        monkeypatch.setattr(process_monitor, "find_process", self.find)
        monkeypatch.setattr(process_monitor, "processes", lambda: iter(self.all.values()))
        monkeypatch.setattr(process_monitor, "find_descendants", self._descendants)
        monkeypatch.setattr(process_monitor, "find_threads", self._find_threads)
        monkeypatch.setattr(process_monitor, "read_beacon", self._beacon)
        monkeypatch.setattr("os.kill", lambda pid, _: self._kill(pid))
        self.add(SERVER, parent=1)

    def add(self, pid: int, model: str = "", *, parent: int = SERVER, group: int = SERVER, beacon: bool = True) -> None:
        """Add a process that sleeps; with ``model``, Triton's stub for that model, with an idle heartbeat."""
        command = ("/opt/triton_python_backend_stub", "model.py", "region", f"{model}_0_0", "runtime") if model else ()
        self.all[pid] = FakeProcess(pid, parent, group, "S", 0.0, 10 * MIB, command=command)
        if model and beacon:
            self.beacons[pid] = 0.0

    def set(self, pid: int, **values: object) -> None:
        """Change a process: its ``state``, ``seconds``, ``resident_bytes``, ``group`` or ``exit_code``."""
        self.all[pid] = FakeProcess(**{**vars(self.all[pid]), **values})

    def find(self, pid: int) -> FakeProcess | None:
        """Return a process."""
        if self.error:
            raise self.error
        return self.all.get(pid)

    def _descendants(self, pid: int) -> list[Process]:
        return [self.all[child] for child in self.children.get(pid, [])]

    def _find_threads(self, pid: int) -> dict[int, Thread]:
        self.num_read += 1
        return self.threads.get(pid, {})

    def _beacon(self, _: Path, pid: int) -> float | None:
        return self.beacons.get(pid)

    def _kill(self, pid: int) -> None:
        self.killed.append(pid)
        if self.all[pid].is_ended:
            raise ProcessLookupError
        self.set(pid, state="Z", exit_code=KILLED)
