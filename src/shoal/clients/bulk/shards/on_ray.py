"""Workers of a sharded run on a Ray cluster: actors, since a task would load the model for each shard."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.clients.bulk.shards.folders import Folder
from shoal.clients.bulk.shards.shard_task import Message, Scorer, ScoringJob
from shoal.clients.bulk.shards.workers import DiedError, Worker
from shoal.errors import InputError, SetupError, needs

_CONNECT_SECONDS = 10.0


class _Actor(Scorer):
    def __init__(self, working: str, folder: Folder, job: ScoringJob) -> None:
        with suppress(OSError):  # relative names are those of the driver, where the machine has its folder
            os.chdir(working)
        super().__init__(folder, job)


class RayWorker(Worker):
    """Actor of a Ray cluster; Ray chooses its machine, again after each death."""

    def __init__(self, ray: Any, folder: Folder, job: ScoringJob, resources: dict[str, float]) -> None:
        super().__init__()
        self._ray, self._arguments = ray, (str(Path.cwd()), folder, job)
        self._class = ray.remote(**resources)(_Actor)
        self._actor: Any = None
        self._answers: Any = None

    def start(self) -> None:
        """Start an actor; Ray does so when a machine has the resources."""
        self._actor = self._class.remote(*self._arguments)

    def send(self, number: int) -> None:
        """Send it the number of a shard."""
        self._answers = self._actor.score.options(num_returns="streaming").remote(number)

    def messages(self) -> Iterator[Message]:
        """Yield the messages that are there."""
        try:
            while self._ray.wait([self._answers], timeout=0)[0]:
                yield self._ray.get(next(self._answers))
        except StopIteration:  # after the last message
            return
        except self._ray.exceptions.RayError as error:
            raise DiedError(" ".join(str(error).split())[:300]) from None

    def end(self) -> None:
        """End the actor."""
        if self._actor is not None:
            self._ray.kill(self._actor)

    @staticmethod
    def wait(workers: Sequence[RayWorker], seconds: float) -> None:
        """Wait for a message, or the end of an actor."""
        workers[0]._ray.wait([worker._answers for worker in workers], timeout=seconds)


def make_ray_workers(address: str, folder: Folder, job: ScoringJob, number: int) -> list[RayWorker]:
    """Connect to a Ray cluster, and return workers among which its CPUs and GPUs are divided.

    Raises:
        InputError: the cluster has fewer CPUs than workers.
        SetupError: Ray is not installed, or the cluster cannot be reached.
    """
    with needs("ray"):
        import ray
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ImportError, OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SetupError(f"No Ray cluster answers at {address}: {reason}.", "Check it: ray status") from None
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [(each.get("CPU", 0), each.get("GPU", 0)) for each in resources]
    cpus, gpus = divide(nodes, number)
    return [RayWorker(ray, folder, job, {"num_cpus": cpus, "num_gpus": gpus}) for _ in range(number)]


def divide(nodes: Sequence[tuple[float, float]], number: int) -> tuple[int, float]:
    """Return the most GPUs, then CPUs, that each of so many workers can have on nodes of (CPUs, GPUs).

    With GPUs in the cluster, each worker has one or more, or a fraction of one.

    Raises:
        InputError: there are too few.
    """
    cpus, gpus = (int(sum(each)) for each in zip(*nodes, strict=True))
    fractions = [1 / count for count in range(2, number + 1)]
    for gpu in [*range(gpus // number, 0, -1), *fractions] if gpus else [0]:
        for cpu in range(cpus // number, 0, -1):
            if sum(_count_places(node, cpu, gpu) for node in nodes) >= number:
                return cpu, gpu
    raise InputError(f"The Ray cluster has {cpus} CPUs and {gpus} GPUs for {number} workers.", "Give fewer --workers.")


def _count_places(node: tuple[float, float], cpu: int, gpu: float) -> int:
    places = int(node[0]) // cpu
    if not gpu:
        return places
    return min(places, int(node[1]) // int(gpu) if gpu >= 1 else int(node[1]) * round(1 / gpu))
