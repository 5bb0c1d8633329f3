"""Looks at a server's processes from outside: which ended, hangs, or takes too much memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.component.beacon import read_beacon
from shoal.environment.stub import STUB
from shoal.processes import Process, find_process, processes
from shoal.serving.server import Server

PERIOD = 0.2  # seconds between two looks
HANG_SECONDS = 1.5  # at work without the processor's time: a model that waits for something else says hang_seconds
HANG_PARAMETER = "hang_seconds"  # of a model's configuration
BATCH_SECONDS = 300.0  # that a batch may take
STUCK_SECONDS = 5.0  # in which a request waits though no process of its model is at work
SILENCE = 0.02  # of a processor: what runs beside a batch that hangs takes less


@dataclass(frozen=True)
class Fault:
    """What is wrong with ``model``, or with the whole server where there is none; ``kind`` is a word for metrics."""

    model: str
    kind: str
    what: str


@dataclass
class Stub:
    """A process of a model's instance, and its processor time in the last seconds."""

    pid: int
    model: str
    samples: deque[tuple[float, Process]] = field(default_factory=deque)
    busy: float = 0.0  # when it was last seen at work


class Watch:
    """The processes of one server, as they were when it became ready."""

    def __init__(
        self,
        server: Server,
        *,
        hang_seconds: Mapping[str, float],
        memory_mib: float,
        clock: Callable[[], float] = time.monotonic,  # as beacons tell the time
    ) -> None:
        self._server, self._hang_seconds, self._memory_mib, self._clock = server, hang_seconds, memory_mib, clock
        self._moved = clock()
        self.stubs = [stub for process in processes() if (stub := _find_stub(process, server))]

    def look(self, waiting: Mapping[str, float]) -> list[Fault]:
        """What is wrong now. ``waiting`` tells since when a model owes an answer, for those that do not tell it."""
        process = find_process(self._server.pid)
        if process is None or process.is_ended:
            return [Fault("", "server", f"Triton ended{_why(process)}")]
        found = [fault for stub in self.stubs if (fault := self._look_at(stub, waiting))]
        return found or self._look_at_server(process, waiting)

    def _look_at_server(self, process: Process, waiting: Mapping[str, float]) -> list[Fault]:
        """Whether Triton itself stands still: stopped, or with a request that it hands to nobody."""
        now = self._clock()
        if process.state not in "Tt":
            self._moved = now
        busy = {stub.model for stub in self.stubs if now - stub.busy < STUCK_SECONDS}
        stuck = [name for name, since in waiting.items() if now - since > STUCK_SECONDS and name not in busy]
        if now - self._moved > HANG_SECONDS or stuck:
            return [Fault("", "server", f"Triton hangs{f' with a request to {stuck[0]}' if stuck else ''}")]
        return []

    def _look_at(self, stub: Stub, waiting: Mapping[str, float]) -> Fault | None:
        process, now = find_process(stub.pid), self._clock()
        if process is None or process.is_ended or process.session != self._server.pid:
            return Fault(stub.model, "died", f"a process of {stub.model} ended{_why(process)}")
        mib = process.resident_bytes / 2**20
        if self._memory_mib and mib > self._memory_mib:
            what = f"a process of {stub.model} takes {mib:.0f} MiB, more than {self._memory_mib:.0f}"
            return Fault(stub.model, "memory", what)
        limit = self._hang_seconds.get(stub.model, HANG_SECONDS)
        stub.samples.append((now, process))
        while now - stub.samples[0][0] > limit and now - stub.samples[1][0] > limit:
            stub.samples.popleft()
        since = read_beacon(self._server.beacons, stub.pid)
        if since != 0:  # at work, or it does not tell
            stub.busy = now
        if since is None:
            since = waiting.get(stub.model, 0.0)
        if since and now - since > BATCH_SECONDS:
            what = f"a process of {stub.model} has been at one batch for {now - since:.0f} s"
            return Fault(stub.model, "hangs", what)
        if (since and now - since > limit and self._is_silent(stub, limit)) or self._is_stopped(stub, limit):
            return Fault(stub.model, "hangs", f"a process of {stub.model} hangs")
        return None

    def _is_silent(self, stub: Stub, seconds: float) -> bool:
        """Whether it has taken no processor time for so long, and did not wait for a processor either."""
        (first, before), (last, after) = stub.samples[0], stub.samples[-1]
        if last - first < seconds * 0.9 or any(process.state == "R" for _, process in stub.samples):
            return False
        return after.seconds - before.seconds <= max(SILENCE * (last - first), 0.011)

    def _is_stopped(self, stub: Stub, seconds: float) -> bool:
        first, last = stub.samples[0][0], stub.samples[-1][0]
        return last - first >= seconds * 0.9 and all(process.state in "Tt" for _, process in stub.samples)

    def forget(self) -> None:
        """Judge by what is seen from now on: nobody looked for a while."""
        self._moved = self._clock()
        for stub in self.stubs:
            stub.samples.clear()

    def resident_bytes(self) -> int:
        """The memory of its processes, Triton's own included."""
        found = map(find_process, [self._server.pid, *(stub.pid for stub in self.stubs)])
        return sum(process.resident_bytes for process in found if process is not None)

    def kill(self, model: str) -> None:
        """End a model's processes, so that Triton gives up on what they have."""
        for stub in self.stubs:
            if stub.model == model:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stub.pid, signal.SIGKILL)


def _find_stub(process: Process, server: Server) -> Stub | None:
    """Triton starts it as STUB model.py REGION ... INSTANCE RUNTIME-FOLDER; an instance is MODEL_GROUP_NUMBER."""
    if process.session != server.pid or process.parent != server.pid:
        return None
    arguments = process.arguments()
    if len(arguments) < 3 or not arguments[0].endswith(STUB):
        return None
    return Stub(process.pid, re.sub(r"(_\d+){1,2}$", "", arguments[-2]))


def _why(process: Process | None) -> str:
    return f", {process.ending}" if process is not None and process.ending else ""
