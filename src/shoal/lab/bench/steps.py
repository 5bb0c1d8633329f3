"""Readings of a server under load: Triton's statistics of each model, and CPU time from /proc."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.authoring.environment.embedded import served_model
from shoal.system.processes import processes

_NS_PER_MS = 1e6
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")  # per second
_BUSY = (1, 2, 3, 6, 7, 8)  # fields of a core in /proc/stat: user, nice, system, irq, softirq, steal


@dataclass(frozen=True)
class Counters:
    """Triton's counters of one model; subtract an earlier reading to get what was counted since.

    Nanoseconds are summed over requests, and each request counts the whole time of its batch. Only ``busy_ns`` is
    summed over executions, so that each batch counts once.
    """

    requests: int = 0
    failed: int = 0
    rows: int = 0
    executions: int = 0
    total_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    busy_ns: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, before: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Reading:
    """Clock time, CPU time and Triton's counters; subtract an earlier reading to get what was used since.

    All times are in seconds; ``at`` is the clock's. The CPU times are those of the server with its stub processes
    (``server``; None if they are not known), of this process (``client``), of all programs on the cores that this
    process may use (``cores``), and of each model's stub processes (``models``).
    """

    at: float
    server: float | None
    client: float
    cores: float
    models: Mapping[str, float]
    counters: Mapping[str, Counters]

    def __sub__(self, before: Reading) -> Reading:
        return Reading(
            self.at - before.at,
            None if self.server is None or before.server is None else self.server - before.server,
            self.client - before.client,
            self.cores - before.cores,
            {name: seconds - before.models.get(name, 0.0) for name, seconds in self.models.items()},
            {name: counters - before.counters.get(name, Counters()) for name, counters in self.counters.items()},
        )


def read_group(group: int, counters: Mapping[str, Counters]) -> Reading:
    """Take a reading of a server's process ``group``, with its ``counters``, and of this process and the cores."""
    total, models = 0.0, defaultdict[str, float](float)
    for process in processes():
        if process.group == group:
            total += process.seconds
            if model := served_model(process.arguments()):
                models[model] += process.seconds
    return replace(read_client(counters), server=total, models=dict(models))


def read_client(counters: Mapping[str, Counters]) -> Reading:
    """Take a reading of this process and of the cores, with a server's ``counters``."""
    own = os.times()
    return Reading(time.perf_counter(), None, own.user + own.system, _read_cores(), {}, counters)


def _read_cores() -> float:
    """Return the busy seconds since boot of the cores that this process may use, with time stolen by the hypervisor."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in (_PROC / "stat").read_text(encoding="utf-8").splitlines())
    return sum(sum(int(fields[at]) for at in _BUSY) for fields in lines if fields[0] in mine) / _TICKS


def read_statistics(reply: Any) -> dict[str, Counters]:
    """Return the counters of every model in a ``ModelStatisticsResponse``, each summed over the model's versions."""
    found: dict[str, Counters] = {}
    for entry in reply.model_stats:
        found[entry.name] = _counters(entry) + found.get(entry.name, Counters())
    return found


def _counters(entry: Any) -> Counters:
    stats = entry.inference_stats
    executed = [(batch.compute_input, batch.compute_infer, batch.compute_output) for batch in entry.batch_stats]
    return Counters(
        requests=stats.success.count,
        failed=stats.fail.count,
        rows=entry.inference_count,
        executions=entry.execution_count,
        total_ns=stats.success.ns,
        queue_ns=stats.queue.ns,
        input_ns=stats.compute_input.ns,
        infer_ns=stats.compute_infer.ns,
        output_ns=stats.compute_output.ns,
        busy_ns=sum(part.ns for parts in executed for part in parts),
    )


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step under one load.

    ``queue_ms`` to ``output_ms`` are means per request, and ``execution_ms`` is the mean per execution. ``busy`` is the
    share of time in which the step's instances ran, averaged over the instances. ``cpu_ms`` is the CPU time per row,
    None for a model without Python stub processes.
    """

    requests_per_execution: float
    rows_per_execution: float
    queue_ms: float
    input_ms: float
    infer_ms: float
    output_ms: float
    execution_ms: float
    busy: float
    cpu_ms: float | None = None

    @property
    def total_ms(self) -> float:
        """Mean milliseconds of a request in this step, including the queue."""
        return self.queue_ms + self.input_ms + self.infer_ms + self.output_ms


def summarise_step(spent: Counters, seconds: float, instances: int, cpu_seconds: float | None) -> StepFigures:
    """Compute the figures of a step whose counters grew by ``spent`` within ``seconds``."""
    executions, scale = max(1, spent.executions), 1 / max(1, spent.requests) / _NS_PER_MS
    return StepFigures(
        requests_per_execution=spent.requests / executions,
        rows_per_execution=spent.rows / executions,
        queue_ms=spent.queue_ns * scale,
        input_ms=spent.input_ns * scale,
        infer_ms=spent.infer_ns * scale,
        output_ms=spent.output_ns * scale,
        execution_ms=spent.busy_ns / executions / _NS_PER_MS,
        busy=spent.busy_ns / 1e9 / (seconds * max(1, instances)),
        cpu_ms=None if cpu_seconds is None else 1000 * cpu_seconds / max(1, spent.rows),
    )
