"""Measurement of pipelines, each on its own server, with interleaved repeats."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import LifoQueue
from typing import Any, TypeVar, Unpack

from shoal.authoring.repository.devices import is_in_client
from shoal.clients.client.calls import Answer
from shoal.clients.client.client import Client
from shoal.clients.client.tls import Access
from shoal.clients.local import Pipeline, load
from shoal.errors import ServerError
from shoal.lab.bench.inputs import Inputs
from shoal.lab.bench.load import Load, closed_loop
from shoal.lab.bench.record import BenchSettings, Cell, Figures, Measured
from shoal.lab.bench.steps import Reading, read, summarise_step
from shoal.lab.bench.target import BenchTarget
from shoal.serving.server.launch import KEEP_LOG, Server, serve
from shoal.system.machine import usable_cores
from shoal.system.progress import OnProgress

TIMEOUT = 600.0  # seconds of one request: hundreds of texts on a CPU take minutes
T = TypeVar("T")
_Call = tuple[float, float]  # begin and end of a call, in clock seconds


class Pool:
    """Pool of clients of one server, each used by one caller at a time.

    Requests are not retried: a rejection ends the measurement instead of appearing as latency.
    """

    def __init__(self, url: str, protocol: str, **access: Unpack[Access]) -> None:
        self._connect = partial(Client, url, protocol=protocol, timeout=TIMEOUT, concurrency=1, retries=0, **access)
        self._idle: LifoQueue[Client] = LifoQueue()  # the last one used is taken first: its connection is warm
        self._made: list[Client] = []
        self.calls: defaultdict[str, list[_Call]] = defaultdict(list)  # by model

    def connect(self, number: int, models: Collection[str] = ()) -> None:
        """Create clients until there are ``number``, and cache these models' descriptions in each new client."""
        while len(self._made) < number:
            client = self._connect()
            self._made.append(client)
            for model in models:
                client.describe(model)
            self._idle.put(client)

    @contextmanager
    def take(self) -> Iterator[Client]:
        """Lend an idle client inside the context; wait until one is idle."""
        client = self._idle.get()
        try:
            yield client
        finally:
            self._idle.put(client)

    def infer(self, model: str, inputs: Mapping[str, Any] | None = None, /, **options: Any) -> Answer:
        """Send a request with an idle client, and record its begin and end in ``calls``."""
        with self.take() as client:
            begin = time.perf_counter()
            answer = client.infer(model, inputs, **options)
            self.calls[model].append((begin, time.perf_counter()))
            return answer

    def close(self) -> None:
        """Close every connection."""
        for client in self._made:
            client.close()


class Running:
    """A measured pipeline (``target``) with its running server and clients.

    With the placement ``hybrid``, the Python components run in the thread that sends the request, as in a real client.
    """

    def __init__(self, target: BenchTarget, inputs: Inputs, settings: BenchSettings, held: ExitStack) -> None:
        self.target, self._inputs, self._settings = target, inputs, settings
        self.server: Server = held.enter_context(serve(target.repository))
        self._steps = target.steps()
        self._pool = Pool(
            self.server.grpc_url if settings.protocol == "grpc" else self.server.http_url, settings.protocol
        )
        held.callback(self._pool.close)
        self._pool.connect(1)
        self._pipeline: Pipeline | None = None
        self._calls: list[_Call] = []  # of the pipeline, in ``hybrid``
        if target.is_hybrid:
            self._pipeline = load(target.repository / target.name, remote=self._pool)
            held.callback(self._pipeline.close)
        self._levels = _remote_levels(self._pipeline) if self._pipeline else [[target.name]]

    def send(self, number: int, rows: int) -> int:
        """Send the ``number``-th request of ``rows`` rows; return ``rows``."""
        tensors = self._inputs.take(number * rows, rows)
        if self._pipeline is None:
            self._pool.infer(self.target.name, tensors)
        else:
            begin = time.perf_counter()
            self._pipeline(**tensors)
            self._calls.append((begin, time.perf_counter()))
        return rows

    def load(self, cell: Cell) -> Figures:
        """Measure the pipeline under the closed loop ``cell``."""
        models = [model for level in self._levels for model in level]
        self._pool.connect(cell.callers * len(models), models)
        readings: list[Reading] = []

        def note() -> None:
            readings.append(read(self.server))

        send, settings = partial(self.send, rows=cell.batch), self._settings
        load = closed_loop(
            send, callers=cell.callers, seconds=settings.seconds, warm_seconds=settings.warm_seconds, on_edge=note
        )
        return self._summarise(load, *readings)

    def _summarise(self, load: Load, before: Reading, after: Reading) -> Figures:
        spent = after - before
        seconds, counters = spent.at, spent.counters
        if failed := [name for name, counter in counters.items() if counter.failed]:
            raise ServerError(
                f"Requests to {', '.join(failed)} failed while {self.target.label} was measured: {self.server.cause()}",
                KEEP_LOG,
            )
        top = counters[self.target.name]
        cores, own = usable_cores(), spent.server + spent.client
        available = seconds * cores
        spare = seconds * (len(os.sched_getaffinity(0)) - cores)  # beyond the quota: others may use these freely
        return Figures(
            rows_per_s=load.rows_per_second,
            requests=len(load.latencies),
            p50_ms=1000 * load.percentile(50),
            p90_ms=1000 * load.percentile(90),
            p99_ms=1000 * load.percentile(99),
            max_ms=1000 * load.percentile(100),
            server_cpu=spent.server / available,
            client_cpu=spent.client / available,
            other_cpu=max(0.0, min(spent.cores - spare, available) - own) / available,
            server_ms=top.total_ns / top.requests / 1e6 if top.requests else None,
            local_ms=self._local_ms(before.at, after.at),
            steps={
                name: summarise_step(counters[name], seconds, config.spec.num_instances, spent.models.get(name))
                for name, config in self._steps.items()
                if counters[name].requests  # excludes steps that run in the client
            },
        )

    def _local_ms(self, opened: float, closed: float) -> float | None:
        """Return the mean ms per request of the steps in the client, between two times; None if it runs no steps.

        This is the time of the requests minus the time of their calls to the server, since parallel steps run in
        threads that do not know their request. Of the models called in parallel, only the slowest is subtracted.
        """
        number = sum(opened <= end <= closed for _, end in self._calls)
        if self._pipeline is None or not number:
            return None
        waited = sum(
            max(_time_within(self._pool.calls[model], opened, closed) for model in level) for level in self._levels
        )
        return 1000 * max(0.0, _time_within(self._calls, opened, closed) - waited) / number


def _time_within(calls: Sequence[_Call], opened: float, closed: float) -> float:
    """Return the sum of the calls' seconds that lie between the times ``opened`` and ``closed``."""
    return sum(max(0.0, min(end, closed) - max(begin, opened)) for begin, end in calls)


def _remote_levels(pipeline: Pipeline) -> list[list[str]]:
    """Return the models that a ``hybrid`` pipeline calls on the server; the models of one list run in parallel."""
    graph = pipeline.graph
    found: dict[int, list[str]] = {}
    for step, level in zip(graph.steps, graph.levels(), strict=True):
        if not is_in_client(graph.members[step.model]):
            found.setdefault(level, []).append(step.model)
    return list(found.values())


def measure(
    targets: Sequence[BenchTarget],
    cells: Sequence[Cell],
    inputs: Inputs,
    settings: BenchSettings,
    on_progress: OnProgress,
) -> list[Measured[Cell, Figures]]:
    """Measure every load on every target. Each target has its own server; only one server is under load at a time.

    Repeats are interleaved: every load once on every target, then all of them again. If the machine gets slower, or
    another program runs for a while, all targets are thus affected alike. Each repeat begins with another target.
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
                one.send(0, batch)  # some models compile, and memory pools grow
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
