"""CPU time of a server, in total and per model, from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.environment.stub import served_model
from shoal.processes import processes

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")  # per second
_BUSY = (1, 2, 3, 6, 7, 8)  # fields of a core in /proc/stat: user, nice, system, irq, softirq, steal


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far: of the server with its stubs, of this process, of all use of this process's cores, and of
    each model with stubs.

    Subtract two for the time spent between them.
    """

    server: float
    client: float
    cores: float
    models: Mapping[str, float]

    def __sub__(self, before: Usage) -> Usage:
        models = {name: seconds - before.models.get(name, 0.0) for name, seconds in self.models.items()}
        return Usage(self.server - before.server, self.client - before.client, self.cores - before.cores, models)


def read_usage(server: int) -> Usage:
    """Read the CPU seconds of the server with this process id (a session leader), and of this process."""
    total, models = 0.0, defaultdict[str, float](float)
    for process in processes():
        if process.session == server:
            total += process.seconds
            if model := served_model(process.arguments()):
                models[model] += process.seconds
    own = os.times()
    return Usage(total, own.user + own.system, _read_cores(), dict(models))


def _read_cores() -> float:
    """Return the busy seconds of the cores that this process may use, including time stolen by the hypervisor."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in (_PROC / "stat").read_text(encoding="utf-8").splitlines())
    return sum(sum(int(fields[at]) for at in _BUSY) for fields in lines if fields[0] in mine) / _TICKS
