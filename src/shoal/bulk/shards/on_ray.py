"""Workers of a sharded run on a Ray cluster: actors, since a task would load the model for each shard."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.bulk.shards.folders import Folder
from shoal.bulk.shards.work import Job, Message, Scorer
from shoal.bulk.shards.workers import DiedError, Worker
from shoal.errors import InputError, SetupError, needs


class _Actor(Scorer):
    def __init__(self, working: str, folder: Folder, job: Job) -> None:
        with suppress(OSError):  # relative names are those of the driver, where the machine has its folder
            os.chdir(working)
        super().__init__(folder, job)


class RayWorker(Worker):
    """Actor of a Ray cluster; Ray chooses its machine, again after each death."""

    def __init__(self, ray: Any, folder: Folder, job: Job, resources: dict[str, float]) -> None:
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


def make_ray_workers(address: str, folder: Folder, job: Job, number: int) -> list[RayWorker]:
    """Connect to a Ray cluster, and return workers among which its CPUs and GPUs are divided.

    Raises:
        InputError: the cluster has fewer CPUs than workers.
        SetupError: Ray is not installed, or the cluster cannot be reached.
    """
    with needs("ray"):
        import ray
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SetupError(f"No Ray cluster answers at {address}: {reason}", "Check it: ray status") from None
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    shares = (each for each in range(sum(cpus) // number, 0, -1) if sum(here // each for here in cpus) >= number)
    num_cpus = next(shares, 0)  # the largest number of CPUs that so many workers can have
    if not num_cpus:
        raise InputError(f"The Ray cluster has {sum(cpus)} CPUs for {number} workers.", "Give fewer --workers.")
    num_gpus = sum(node.get("GPU", 0) for node in nodes) / number
    gpus = num_gpus if num_gpus < 1 else int(num_gpus)
    return [RayWorker(ray, folder, job, {"num_cpus": num_cpus, "num_gpus": gpus}) for _ in range(number)]
