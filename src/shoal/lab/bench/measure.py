"""Measurement of several subjects in turns, and of models that answer requests of rows."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from queue import LifoQueue
from typing import Any, Generic, NamedTuple, TypeVar, Unpack

import numpy as np

from shoal.authoring.repository.devices import is_in_client
from shoal.clients.client.calls import Answer
from shoal.clients.client.client import Client
from shoal.clients.client.tls import Access
from shoal.clients.local import Pipeline, load
from shoal.errors import ShoalError
from shoal.lab.bench.inputs import Inputs
from shoal.lab.bench.load import Load, closed_loop
from shoal.lab.bench.record import BenchSettings, C, Cell, F, Figures, Measured
from shoal.lab.bench.steps import Reading, summarise_step
from shoal.lab.bench.target import BenchTarget
from shoal.system.machine import usable_cores
from shoal.system.progress import OnProgress

TIMEOUT = 600.0  # seconds of one request: hundreds of texts on a CPU take minutes
_RECOVERY = 60.0  # seconds
_CLOSE = 1e-3  # absolute and relative difference of floats that count as equal
T = TypeVar("T")
_Call = tuple[float, float]  # begin and end of a call, in clock seconds


class Subject(ABC, Generic[C, F]):
    """A column of the tables, with its label: one model on one server."""

    label: str

    @abstractmethod
    def first(self, cell: C) -> Mapping[str, Any]:
        """Send the first request of a load, and return its answer's arrays or texts."""

    @abstractmethod
    def load(self, cell: C) -> F:
        """Measure one load."""

    def recover(self) -> None:
        """Wait after a failure until the server is ready again, for a minute at most."""


class Outcome(NamedTuple, Generic[C, F]):
    """Results of all loads, and sentences on what failed, differed, or was not measured."""

    measured: list[Measured[C, F]]
    notes: list[str]
    is_interrupted: bool


def measure(
    subjects: Sequence[Subject[C, F]], cells: Sequence[C], settings: BenchSettings, on_progress: OnProgress
) -> Outcome[C, F]:
    """Measure every load on every subject; only one is under load at a time.

    Repeats are interleaved: every load once on every subject, then all of them again. If the machine gets slower, or
    another program runs for a while, all subjects are thus affected alike. Each repeat begins with another subject.
    A load that fails on a subject is left out there, and named in a note; so are answers that differ from those of the
    first subject. Ctrl-C ends the measurement.

    Raises:
        ShoalError: every load failed; the error is the first one.
        KeyboardInterrupt: nothing was measured before Ctrl-C.
    """
    failed: dict[tuple[str, C], ShoalError] = {}
    notes = list(_compare_answers(subjects, cells, failed, on_progress))
    found: dict[tuple[str, C], list[F]] = {(s.label, cell): [] for cell in cells for s in subjects}
    total = settings.repeats * len(found)
    rounds = ((cell, s) for turn in range(settings.repeats) for cell in cells for s in _rotated(subjects, turn))
    is_interrupted = False
    try:
        for number, (cell, subject) in enumerate(rounds):
            on_progress("measuring", number, total)
            if (key := (subject.label, cell)) in failed:
                continue
            try:
                found[key].append(subject.load(cell))
            except ShoalError as error:
                failed[key] = error
                subject.recover()
    except KeyboardInterrupt:
        is_interrupted = True
        number = sum(map(len, found.values()))
        if not number:
            raise
        notes.append(f"Interrupted: {number} of {total} measurements were made.")
    on_progress("measuring", total, total)
    measured = [Measured(label, c, tuple(f)) for (label, c), f in found.items() if f and (label, c) not in failed]
    if not measured and failed:
        raise next(iter(failed.values()))
    notes += [f"{label} failed at {cell}, and is left out there: {error}" for (label, cell), error in failed.items()]
    return Outcome(measured, notes, is_interrupted)


def _rotated(items: Sequence[T], turn: int) -> list[T]:
    begin = turn % len(items)
    return [*items[begin:], *items[:begin]]


def _compare_answers(
    subjects: Sequence[Subject[C, F]],
    cells: Sequence[C],
    failed: dict[tuple[str, C], ShoalError],
    on_progress: OnProgress,
) -> Iterator[str]:
    """Send each subject the first request of each size, which also warms it up; yield how their answers differ."""
    sizes = {cell._replace(**{cell._fields[-1]: 1}): cell for cell in cells}  # without the callers
    said: set[str] = set()
    for number, cell in enumerate(sizes):
        on_progress("warming up", number, len(sizes))
        answers: dict[str, Mapping[str, Any]] = {}
        for subject in subjects:
            try:
                answers[subject.label] = subject.first(cell)
            except ShoalError as error:
                failed |= {(subject.label, c): error for c in cells if c[:-1] == cell[:-1]}
                subject.recover()
        first, *others = answers or [""]
        for other in others:
            if other not in said and (words := _tell_apart(answers[first], answers[other])):
                said.add(other)
                yield f"The answers of {other} differ from those of {first}, first at {cell}: {words}."
    on_progress("warming up", len(sizes), len(sizes))


def _tell_apart(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how an answer differs from the first one in their common outputs, as a clause; empty if it does not."""
    differing = []
    for name in (name for name in first if name in other):
        mine, its = np.asarray(first[name]), np.asarray(other[name])
        if mine.shape != its.shape:
            differing.append(f"{name} has shape {list(its.shape)} instead of {list(mine.shape)}")
        elif mine.dtype.kind != "f":
            if number := int(np.sum(mine != its)):
                differing.append(f"{name} in {number} of {mine.size} values")
        elif not np.allclose(mine, its, _CLOSE, _CLOSE, equal_nan=True):
            differing.append(f"{name} by up to {np.nanmax(np.abs(mine.astype(float) - its)):.4g}")
    return ", ".join(differing)


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

    def wait_ready(self, model: str) -> None:
        """Wait until the server has ``model`` loaded, for a minute at most."""
        deadline = time.monotonic() + _RECOVERY
        while time.monotonic() < deadline:
            with self.take() as client, suppress(ShoalError):
                if client.is_ready(model):
                    return
            time.sleep(0.5)

    def close(self) -> None:
        """Close every connection."""
        for client in self._made:
            client.close()


class Rows(Subject[Cell, Figures]):
    """A model that answers once (``target``), on its server, with clients.

    If the target is in the client, the Python components run in the thread that sends the request, as in a real client.
    """

    def __init__(self, target: BenchTarget, inputs: Inputs, settings: BenchSettings, held: ExitStack) -> None:
        self.label, self._model, self._inputs, self._settings = target.label, target.name, inputs, settings
        self._endpoint = target.open(held)
        self.steps = target.steps()
        self._pool = Pool(self._endpoint.url, target.servers.protocol, **self._endpoint.access)
        held.callback(self._pool.close)
        self._pool.connect(1)
        self._pipeline: Pipeline | None = None
        self._calls: list[_Call] = []  # of the pipeline, if it runs in the client
        if target.is_client and target.graph:
            self._pipeline = load(target.graph.config.folder, remote=self._pool)
            held.callback(self._pipeline.close)
        self._levels = _remote_levels(self._pipeline) if self._pipeline else [[target.name]]
        if self._pipeline:  # the server may have the others too, and ask them whether they are well
            self.steps = {name: self.steps[name] for level in self._levels for name in level}

    def first(self, cell: Cell) -> Mapping[str, Any]:
        """Send the first request of a load."""
        return self._ask(0, cell.batch)

    def recover(self) -> None:
        """Wait until the server is ready again."""
        self._pool.wait_ready(next(chain.from_iterable(self._levels), self._model))

    def _ask(self, number: int, rows: int) -> Mapping[str, Any]:
        """Send the ``number``-th request of ``rows`` rows."""
        tensors = self._inputs.take(number * rows, rows)
        if self._pipeline is None:
            return self._pool.infer(self._model, tensors)
        begin = time.perf_counter()
        answer = self._pipeline(tensors)
        self._calls.append((begin, time.perf_counter()))
        return answer

    def load(self, cell: Cell) -> Figures:
        """Measure the pipeline under the closed loop ``cell``."""
        models = [model for level in self._levels for model in level]
        self._pool.connect(cell.callers * len(models), models)
        readings: list[Reading] = []

        def send(number: int) -> int:
            self._ask(number, cell.batch)
            return cell.batch

        def note() -> None:
            readings.append(self._endpoint.read())

        settings = self._settings
        load = closed_loop(
            send, callers=cell.callers, seconds=settings.seconds, warm_seconds=settings.warm_seconds, on_edge=note
        )
        return self._summarise(load, *readings)

    def _summarise(self, load: Load, before: Reading, after: Reading) -> Figures:
        spent = after - before
        seconds, counters = spent.at, spent.counters
        self._endpoint.check(spent, self.label)
        top = counters.get(self._model)
        cores = usable_cores()
        available = seconds * cores
        spare = seconds * (len(os.sched_getaffinity(0)) - cores)  # beyond the quota: others may use these freely
        own, busy = (spent.server or 0.0) + spent.client, min(spent.cores - spare, available)
        return Figures(
            rows_per_s=load.rows_per_second,
            requests=len(load.latencies),
            p50_ms=1000 * load.percentile(50),
            p90_ms=1000 * load.percentile(90),
            p99_ms=1000 * load.percentile(99),
            max_ms=1000 * load.percentile(100),
            server_cpu=None if spent.server is None else spent.server / available,
            client_cpu=spent.client / available,
            other_cpu=None if spent.server is None else max(0.0, busy - own) / available,
            server_ms=top.total_ns / top.requests / 1e6 if top and top.requests else None,
            local_ms=self._local_ms(before.at, after.at),
            steps={
                name: summarise_step(counters[name], seconds, config.spec.num_instances, spent.models.get(name))
                for name, config in self.steps.items()
                if name in counters and counters[name].requests  # excludes steps that run in the client
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
    """Return the models that a pipeline in the client calls on the server; the models of one list run in parallel."""
    graph = pipeline.graph
    found: dict[int, list[str]] = {}
    for step, level in zip(graph.steps, graph.levels(), strict=True):
        if not is_in_client(graph.members[step.model]):
            found.setdefault(level, []).append(step.model)
    return list(found.values())


def start_rows(
    targets: Sequence[BenchTarget], inputs: Inputs, settings: BenchSettings, held: ExitStack, on_progress: OnProgress
) -> list[Rows]:
    """Start or reach the server of each target."""
    found = []
    for number, target in enumerate(targets):
        on_progress("opening", number, len(targets))
        found.append(Rows(target, inputs, settings, held))
    on_progress("opening", len(targets), len(targets))
    return found
