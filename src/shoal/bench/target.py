"""Measured pipelines: their repository, and the clients that send them requests."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.bench.inputs import Inputs
from shoal.client.calls import Answer
from shoal.client.client import Client
from shoal.errors import ArtifactError, InputError
from shoal.local import Pipeline, load
from shoal.repository.config import ModelConfig, read_config
from shoal.repository.default_model import find_graph
from shoal.repository.describe import describe
from shoal.repository.graph import Graph
from shoal.repository.manifest import read_manifest
from shoal.repository.placement import HYBRID
from shoal.server.launch import Server

TIMEOUT = 600.0  # seconds of one request: hundreds of texts on a CPU take minutes
PLAN = ("placement", "dtype", "target")  # manifest fields in which repositories of one pipeline differ


@dataclass(frozen=True)
class Target:
    """A pipeline in a repository, with its label in tables."""

    label: str
    repository: Path
    graph: Graph
    plan: Mapping[str, str]  # placement, dtype, target; "-" where there is no manifest

    @property
    def name(self) -> str:
        """Name of the model that requests are sent to."""
        return self.graph.config.name

    @property
    def is_hybrid(self) -> bool:
        """Whether Python components run in the client."""
        return self.plan["placement"] == HYBRID

    def steps(self) -> dict[str, ModelConfig]:
        """Return the non-ensemble models of this pipeline and its nested ensembles, in the order of the steps."""
        configs = (read_config(path.parent) for path in self.repository.glob("*/config.pbtxt"))
        return _leaves(self.graph.config, {config.name: config for config in configs})

    def describe(self) -> dict[str, Any]:
        """Return the JSON form for the record."""
        described = describe(self.graph)
        return {
            "label": self.label,
            "repository": self.repository.name,
            "model": self.name,
            **self.plan,
            "max_batch_size": described["max_batch_size"],
            "contents": read_manifest(self.repository).get("contents", {}),
            "steps": [
                {key: step[key] for key in ("name", "level", "backend", "device", "instances", "batching")}
                for step in described["steps"]
            ],
        }


def _leaves(config: ModelConfig, models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    if not config.is_ensemble:
        return {config.name: config}
    found: dict[str, ModelConfig] = {}
    for step in config.steps:
        found |= _leaves(models[step.model], models)
    return found


def find_targets(places: Sequence[Path], model: str = "") -> list[Target]:
    """Find the pipelines of these repositories (or model folders), which must all take the same inputs.

    Each is labelled by its placement, or by another property if two have the same.

    Raises:
        InputError: they take different inputs, one is named twice, or has no such model.
        ArtifactError: one is not a repository.
    """
    targets = [_find(place, model) for place in places]
    first = targets[0]
    for other in targets[1:]:
        if other.graph.config.spec.inputs != first.graph.config.spec.inputs:
            raise InputError(
                f"{other.name} in {other.repository} takes different inputs from {first.name} in {first.repository}.",
                "Compare repositories of one pipeline, or name it: --model NAME",
            )
    if len({target.repository for target in targets}) < len(targets):
        raise InputError("A repository is named twice.", "Name each once.")
    for key in ("placement", "dtype", "folder", "path"):
        labels = [_label(target, key) for target in targets]
        if len(set(labels)) == len(labels):
            break
    return [replace(target, label=label) for target, label in zip(targets, labels, strict=True)]


def _label(target: Target, key: str) -> str:
    placement = target.plan["placement"]
    ways = {
        "placement": target.repository.name if placement == "-" else placement,
        "dtype": f"{placement} {target.plan['dtype']}",
        "folder": target.repository.name,
        "path": str(target.repository),
    }
    return ways[key]


def _find(place: Path, model: str) -> Target:
    if not place.is_dir():
        raise ArtifactError(f"There is no repository {place}.", "Make one: shoal compose ENSEMBLE REPOSITORY")
    graph = find_graph(place, model)
    repository = graph.config.folder.parent
    manifest = read_manifest(repository)
    return Target("", repository, graph, {key: str(manifest.get(key, "-")) for key in PLAN})


class Clock:
    """Sums the seconds of calls over all threads; running calls count up to now. A context manager around each call."""

    # A start subtracts the clock and an end adds it; read() adds the clock once for each running call.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds, self._running, self._ended = 0.0, 0, 0

    def __enter__(self) -> None:
        with self._lock:
            self._seconds -= time.perf_counter()
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._seconds += time.perf_counter()
            self._running -= 1
            self._ended += 1

    def read(self) -> tuple[float, int]:
        """Return the seconds of all calls so far, and the number of ended calls."""
        with self._lock:
            return self._seconds + self._running * time.perf_counter(), self._ended


class Pool:
    """Pool of clients of one server, each used by one caller at a time.

    Requests are not retried: a rejection ends the measurement instead of appearing as latency.
    """

    def __init__(self, url: str, protocol: str) -> None:
        self._url, self._protocol = url, protocol
        self._idle: deque[Client] = deque()
        self._made: list[Client] = []
        self.clocks: defaultdict[str, Clock] = defaultdict(Clock)  # of its requests, by model

    def connect(self, number: int, models: Collection[str]) -> None:
        """Open ``number`` clients per model, with its description cached, so that this does not happen under load."""
        while len(self._made) < number * len(models):
            client = self._make()
            for model in models:
                client.describe(model)
            self._idle.append(client)

    def _make(self) -> Client:
        client = Client(self._url, protocol=self._protocol, timeout=TIMEOUT, concurrency=1, retries=0)
        self._made.append(client)
        return client

    @contextmanager
    def take(self) -> Iterator[Client]:
        """Hold an idle client."""
        try:
            client = self._idle.pop()  # the last one used: its connection is warm
        except IndexError:
            client = self._make()
        try:
            yield client
        finally:
            self._idle.append(client)

    def infer(self, model: str, inputs: Mapping[str, Any] | None = None, /, **options: Any) -> Answer:
        """Send a request with an idle client."""
        with self.take() as client, self.clocks[model]:
            return client.infer(model, inputs, **options)

    def close(self) -> None:
        """Close every connection."""
        for client in self._made:
            client.close()


class Sender:
    """Sends requests to a target on its server, as a client of its placement does.

    In ``hybrid`` the Python components run in the caller's thread.
    """

    def __init__(self, target: Target, server: Server, inputs: Inputs, protocol: str, held: ExitStack) -> None:
        self._target, self._inputs = target, inputs
        url = server.grpc_url if protocol == "grpc" else server.http_url
        self._pool = Pool(url, protocol)
        held.callback(self._pool.close)
        self._pipeline: Pipeline | None = None
        if target.is_hybrid:
            self._pipeline = load(target.repository / target.name, remote=self._pool)
            held.callback(self._pipeline.close)
        self._clock = Clock()  # of whole requests
        self._before = (0.0, 0)

    def connect(self, callers: int) -> None:
        """Open the connections for this many callers."""
        levels = self._remote_levels() if self._pipeline else [[self._target.name]]
        self._pool.connect(callers, [model for level in levels for model in level])

    def send(self, number: int, rows: int) -> int:
        """Send the ``number``-th request of ``rows`` rows; return ``rows``."""
        tensors = self._inputs.take(number * rows, rows)
        if self._pipeline is None:
            self._pool.infer(self._target.name, tensors)
        else:
            with self._clock:
                self._pipeline(**tensors)
        return rows

    def take_local_ms(self) -> float | None:
        """Return the mean ms per request spent in the client's steps since the last call; None except in ``hybrid``.

        It is the total time minus the time spent waiting for the server, since parallel steps run in threads that do
        not know their request. Of models called in parallel, the slowest counts.
        """
        if self._pipeline is None:
            return None
        whole, requests = self._clock.read()
        clocks = self._pool.clocks
        remote = sum(max(clocks[model].read()[0] for model in level) for level in self._remote_levels())
        before, self._before = self._before, (whole - remote, requests)
        here, number = self._before[0] - before[0], self._before[1] - before[1]
        return 1000 * max(here, 0.0) / number if number else None

    def _remote_levels(self) -> list[list[str]]:
        """Return the models that a ``hybrid`` pipeline calls on the server; those in one list run in parallel."""
        assert self._pipeline is not None
        graph = self._pipeline.graph
        found: dict[int, list[str]] = {}
        for step, level in zip(graph.steps, graph.levels(), strict=True):
            if graph.members[step.model].backend != "python":
                found.setdefault(level, []).append(step.model)
        return list(found.values())
