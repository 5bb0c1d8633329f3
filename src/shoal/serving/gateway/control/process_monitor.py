"""Process monitor: detects processes of a server that ended, hang, or use too much memory.

A process that gets no processor time looks like one that hangs. So a hang is judged by the time that the process could
have used: of the time between two checks, what a thread of it waited for a processor does not count. The threads are
read only while a request takes long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.authoring.environment.embedded import served_model
from shoal.kit.component.ledger import read_beacon
from shoal.serving.server.launch import Server
from shoal.system.processes import Process, Thread, find_descendants, find_process, find_threads, processes

PERIOD = 0.2  # seconds between two checks
HANG_SECONDS = 1.5  # busy without processor time; a model that waits for something else sets hang_seconds
BATCH_SECONDS = 300.0  # that a batch may take
MOST_STARVED = 10  # times as long, on a machine on which its process hardly runs
STUCK_SECONDS = 5.0  # for a request to wait while no process of its model is busy
SILENCE = 0.02  # of a processor: background threads of a hanging process use less
FaultKind = Literal["died", "hangs", "memory", "wrong", "server"]


@dataclass(frozen=True)
class ProcessFault:
    """Fault of ``model`` or, if that is empty, of the whole server.

    ``kind`` is the fault's label in the metrics, ``what`` its description for logs and clients.
    """

    model: str
    kind: FaultKind
    what: str


@dataclass
class StubProcess:
    """Python backend process of a model instance, with its measured states of the last seconds.

    ``samples`` has the states by ``clock``: the seconds in which the process did not wait for a processor.
    """

    pid: int
    model: str
    samples: deque[tuple[float, Process]] = field(default_factory=deque)
    children: list[Process] = field(default_factory=list)  # such as an engine's workers
    busy: float = 0.0  # when it was last seen busy
    clock: float = 0.0
    since: float = 0.0  # start of its batch, or of its model's canary request; 0 while idle
    began: float = 0.0  # ``clock`` when that was first seen


@dataclass
class Wait:
    """A canary request in flight: when it was sent, and for how long the server could and could not work at it."""

    since: float
    usable: float = 0.0
    starved: float = 0.0


class ProcessMonitor:
    """Monitor of the processes that a Triton server had when it became ready.

    ``expected`` is the least number of processes of each model, ``members`` the models that each ensemble calls, and
    ``hang_seconds`` how long a model may be busy without using processor time. ``memory_mib`` is the largest memory of
    a model's process with its child processes; 0 means no limit.
    """

    def __init__(
        self,
        server: Server,
        *,
        expected: Mapping[str, int],
        members: Mapping[str, set[str]],
        hang_seconds: Mapping[str, float],
        memory_mib: float,
        clock: Callable[[], float] | None = None,  # the clock of the heartbeat files
    ) -> None:
        self._server, self._expected, self._members = server, expected, members
        self._hang_seconds, self._memory_mib, self._clock = hang_seconds, memory_mib, clock or time.monotonic
        self._since = self._moved = self._checked = self._clock()
        self._seconds = 0.0  # between the last two checks
        self._waits: dict[str, Wait] = {}  # the last canary requests, by model
        self._threads: dict[int, tuple[dict[int, Thread], float]] = {}  # by process, and how long it waited
        self._before = self._threads  # the same at the check before
        self.resident_bytes = 0  # of all processes, at the last check without faults
        self.stubs = [stub for process in processes() if (stub := _find_stub(process, server))]

    def check(self, waiting: Mapping[str, float], answered: float) -> list[ProcessFault]:
        """Check all processes, and return the faults that were found.

        ``waiting`` has, for each model with a canary request in flight, the time at which the canary was sent.
        ``answered`` is the time of the last answer from any model.
        """
        now = self._clock()
        self._seconds, self._checked = min(now - self._checked, 2 * PERIOD), now  # later is this process's own delay
        self._before, self._threads = self._threads, {}
        process = find_process(self._server.pid)
        if process is None or process.is_ended:
            return [ProcessFault("", "server", f"Triton ended{_why(process)}")]
        number = Counter(stub.model for stub in self.stubs)
        missing = [name for name, least in self._expected.items() if number[name] < least]
        if missing:  # it ended before the first check
            return [ProcessFault(missing[0], "died", f"a process of {missing[0]} ended")]
        waiting = {name: max(since, self._since) for name, since in waiting.items()}
        found = [fault for stub in self.stubs if (fault := self._look_at(stub, waiting))]
        if not found:
            latest = [each.resident_bytes for s in self.stubs for each in (s.samples[-1][1], *s.children)]
            self.resident_bytes = process.resident_bytes + sum(latest)
        return found or self._look_at_server(process, waiting, answered)

    def _look_at_server(self, process: Process, waiting: Mapping[str, float], answered: float) -> list[ProcessFault]:
        """Detect a hang of Triton itself.

        Triton hangs if its process is stopped, or if a canary request is not passed to any process of its model.
        """
        now = self._clock()
        if process.state not in "Tt":
            self._moved = now
        if now - self._moved > HANG_SECONDS:
            return [ProcessFault("", "server", "Triton hangs")]
        busy = {stub.model for stub in self.stubs if now - stub.busy < STUCK_SECONDS}
        for name, since in waiting.items():
            wait = self._waits.setdefault(name, Wait(since))
            if wait.since != since:
                wait = self._waits[name] = Wait(since)
            known = self._members.get(name, set()) | {name}
            if wait.since == since and now - since > PERIOD:
                usable = self._find_usable(process.pid, *(stub.pid for stub in self.stubs if stub.model in known))
                wait.usable, wait.starved = wait.usable + usable, wait.starved + self._seconds - usable
            has_beacons = known - {name} <= self._expected.keys() if name in self._members else name in self._expected
            if has_beacons and not known & busy and min(wait.usable, now - answered) > STUCK_SECONDS:
                return [ProcessFault("", "server", f"Triton hangs with a request to {name}")]
        return []

    def _look_at(self, stub: StubProcess, waiting: Mapping[str, float]) -> ProcessFault | None:
        process, now = find_process(stub.pid), self._clock()
        if process is None or process.is_ended or process.group != self._server.pid:
            return ProcessFault(stub.model, "died", f"a process of {stub.model} ended{_why(process)}")
        stub.children = find_descendants(stub.pid)
        mib = sum(each.resident_bytes for each in (process, *stub.children)) / 2**20
        if self._memory_mib and mib > self._memory_mib:
            what = f"a process of {stub.model} takes {mib:.0f} MiB, more than {self._memory_mib:.0f}"
            return ProcessFault(stub.model, "memory", what)
        limit = self._hang_seconds.get(stub.model, HANG_SECONDS)
        beacon = read_beacon(self._server.beacons, stub.pid)
        if beacon != 0:  # busy, or without a heartbeat
            stub.busy = now
        # a process without a heartbeat is judged by the canary request, which Triton has first
        since = waiting.get(stub.model, 0.0) if beacon is None else beacon
        seconds = self._advance(stub, since, *([self._server.pid] if beacon is None else []))
        if len(stub.samples) > 1 and stub.clock - stub.samples[-2][0] < PERIOD / 2:  # the clock hardly advances
            stub.samples.pop()
        stub.samples.append((stub.clock, process))
        while stub.clock - stub.samples[0][0] > limit and stub.clock - stub.samples[1][0] > limit:
            stub.samples.popleft()
        most, passed = max(BATCH_SECONDS, limit), now - max(since, self._since) if since else 0.0
        if beacon is not None and (seconds > most or passed > MOST_STARVED * most):
            what = f"a process of {stub.model} has been at one batch for {passed:.0f} s"
            return ProcessFault(stub.model, "hangs", what)
        siblings = [other for other in self.stubs if other.model == stub.model and other.samples]
        is_late = seconds > limit and (beacon is not None or all(_is_silent(each, limit) for each in siblings))
        return self._judge(stub, is_late=is_late, limit=limit)

    def _advance(self, stub: StubProcess, since: float, *others: int) -> float:
        """Advance a process's clock, and return for how long it could work at what it has had ``since`` then."""
        is_same = bool(since) and since == stub.since
        pids = (stub.pid, *(child.pid for child in stub.children), *others)
        stub.clock += self._find_usable(*pids) if is_same else self._seconds
        if not is_same:
            stub.since, stub.began = since, stub.clock
        return stub.clock - stub.began

    def _find_usable(self, *pids: int) -> float:
        """Return for how much of the time since the last check no thread of these processes waited for a processor."""
        return max(0.0, self._seconds - max(map(self._find_wait, pids)))

    def _find_wait(self, pid: int) -> float:
        if pid not in self._threads:
            threads, before = find_threads(pid), self._before.get(pid, ({}, 0.0))[0]
            waits = [thread.find_wait(before.get(each), self._seconds) for each, thread in threads.items()]
            self._threads[pid] = threads, max(waits, default=0.0)
        return self._threads[pid][1]

    def _judge(self, stub: StubProcess, *, is_late: bool, limit: float) -> ProcessFault | None:
        if (is_late and _is_silent(stub, limit)) or _is_stopped(stub, limit):
            return ProcessFault(stub.model, "hangs", f"a process of {stub.model} hangs")
        return None

    def forget(self) -> None:
        """Discard earlier measurements, because there was a time without checks."""
        self._since = self._moved = self._checked = self._clock()
        self._threads = {}
        for stub in self.stubs:
            stub.samples.clear()
            stub.since = 0.0

    def has_processes(self, model: str) -> bool:
        """Whether ``model`` runs in processes of its own."""
        return any(stub.model == model for stub in self.stubs)

    def may_be_late(self, model: str, seconds: float) -> bool:
        """Whether a canary request that took ``seconds`` is no sign of a fault.

        Either the monitor detects whether the model's processes hang, or the server got too little processor time.
        """
        return self.has_processes(model) or (model in self._waits and self._waits[model].starved > seconds / 2)

    def kill(self, model: str) -> None:
        """Kill a model's processes and the processes that they started, so that Triton fails their requests."""
        for stub in self.stubs:
            for pid in (stub.pid, *(child.pid for child in stub.children)) if stub.model == model else ():
                process = find_process(pid)
                if process is not None and process.group == self._server.pid:  # not another one of the same id
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _is_silent(stub: StubProcess, seconds: float) -> bool:
    """Whether a process used no processor time for ``seconds``, and was neither runnable nor waiting for a disk."""
    (first, before), (last, after) = stub.samples[0], stub.samples[-1]
    if last - first < seconds * 0.9 or any(process.state in "RD" for _, process in stub.samples):
        return False
    return after.seconds - before.seconds <= max(SILENCE * (last - first), 0.011)


def _is_stopped(stub: StubProcess, seconds: float) -> bool:
    first, last = stub.samples[0][0], stub.samples[-1][0]
    return last - first >= seconds * 0.9 and all(process.state in "Tt" for _, process in stub.samples)


def _find_stub(process: Process, server: Server) -> StubProcess | None:
    if process.group != server.pid or process.parent != server.pid:
        return None
    model = served_model(process.arguments())
    return StubProcess(process.pid, model) if model else None


def _why(process: Process | None) -> str:
    return f", {process.ending}" if process is not None and process.ending else ""
