"""Measurement of pipelines, each on its own server, with interleaved repeats."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from shoal.bench.figures import Cell, Figures, Measured
from shoal.bench.inputs import Inputs
from shoal.bench.load import Load, closed_loop
from shoal.bench.steps import Counters, read_counters, summarise_step
from shoal.bench.target import Sender, Target
from shoal.bench.usage import Usage, read_usage
from shoal.errors import ServerError
from shoal.machine import usable_cores
from shoal.progress import OnProgress
from shoal.server.launch import KEEP_LOG, Server, serve

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement: ``seconds`` per load, after ``warm_seconds``."""

    protocol: str = "grpc"
    seconds: float = 4.0
    warm_seconds: float = 1.0
    repeats: int = 3


@dataclass(frozen=True)
class _Reading:
    """Snapshot of the server's counters and of CPU usage."""

    counters: Mapping[str, Counters]
    usage: Usage
    at: float  # seconds
    local_ms: float | None  # since the last reading


class Running:
    """A measured pipeline (``target``) with its running server and clients."""

    def __init__(self, target: Target, inputs: Inputs, settings: Settings, held: ExitStack) -> None:
        self.target, self._settings = target, settings
        self.server: Server = held.enter_context(serve(target.repository))
        self.sender = Sender(target, self.server, inputs, settings.protocol, held)
        self._process = self.server.pid
        self._steps = target.steps()

    def warm(self, batch: int) -> None:
        """Send one request of this size: some models compile, and memory pools grow."""
        self.sender.send(0, batch)

    def load(self, cell: Cell) -> Figures:
        """Measure the pipeline under a closed loop."""
        seconds, warm = self._settings.seconds, self._settings.warm_seconds
        self.sender.connect(cell.callers)
        readings: list[_Reading] = []

        def read() -> None:
            readings.append(self._read())

        load = closed_loop(
            lambda number: self.sender.send(number, cell.batch),
            callers=cell.callers, seconds=seconds, warm_seconds=warm, on_open=read, on_close=read,
        )  # fmt: skip
        return self._summarise(load, *readings)

    def _read(self) -> _Reading:
        local_ms = self.sender.take_local_ms()
        return _Reading(read_counters(self.server), read_usage(self._process), time.perf_counter(), local_ms)

    def _summarise(self, load: Load, before: _Reading, after: _Reading) -> Figures:
        seconds, used = after.at - before.at, after.usage - before.usage
        spent = {name: now - before.counters.get(name, Counters()) for name, now in after.counters.items()}
        if any(counter.failed for counter in spent.values()):
            names = ", ".join(name for name, counter in spent.items() if counter.failed)
            raise ServerError(
                f"Requests to {names} failed while {self.target.label} was measured: {self.server.cause()}", KEEP_LOG
            )
        top = spent[self.target.name]
        cores, own = usable_cores(), used.server + used.client
        available = seconds * cores
        spare = seconds * (len(os.sched_getaffinity(0)) - cores)  # beyond the quota: others may use these freely
        return Figures(
            rows_per_s=load.rows_per_second,
            requests=len(load.latencies),
            p50_ms=1000 * load.percentile(50),
            p90_ms=1000 * load.percentile(90),
            p99_ms=1000 * load.percentile(99),
            max_ms=1000 * load.percentile(100),
            server_cpu=used.server / available,
            client_cpu=used.client / available,
            other_cpu=max(0.0, min(used.cores - spare, available) - own) / available,
            server_ms=top.total_ns / top.requests / 1e6 if top.requests else None,
            local_ms=after.local_ms,
            steps={
                name: summarise_step(spent[name], seconds, config.spec.num_instances, used.models.get(name))
                for name, config in self._steps.items()
                if spent[name].requests  # excludes steps that run in the client
            },
        )


def measure(
    targets: Sequence[Target], cells: Sequence[Cell], inputs: Inputs, settings: Settings, on_progress: OnProgress
) -> list[Measured]:
    """Measure every load on every target. Each target has its own server; only one server is under load at a time.

    Repeats are interleaved: every load once on every target, then all of them again. A machine that gets slower, or a
    temporary neighbour, thus affects all targets alike. The first target rotates.
    """
    with ExitStack() as held:
        running = []
        for number, target in enumerate(targets):
            on_progress("starting servers", number, len(targets))
            running.append(Running(target, inputs, settings, held))
        on_progress("starting servers", len(targets), len(targets))
        batches = sorted({cell.batch for cell in cells})
        for number, batch in enumerate(batches):
            on_progress("warming up", number, len(batches))
            for one in running:
                one.warm(batch)
        on_progress("warming up", len(batches), len(batches))
        found: dict[tuple[str, Cell], list[Figures]] = {(t.label, cell): [] for t in targets for cell in cells}
        total = settings.repeats * len(cells) * len(running)
        rounds = ((cell, one) for turn in range(settings.repeats) for cell in cells for one in _rotated(running, turn))
        for number, (cell, one) in enumerate(rounds):
            on_progress("measuring", number, total)
            found[one.target.label, cell].append(one.load(cell))
        on_progress("measuring", total, total)
    return [Measured(label, cell, tuple(figures)) for (label, cell), figures in found.items()]


def _rotated(items: Sequence[T], turn: int) -> list[T]:
    begin = turn % len(items)
    return [*items[begin:], *items[:begin]]
