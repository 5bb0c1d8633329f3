"""Workers of a sharded run: processes of this machine. Each scores one shard at a time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shoal.clients.bulk.shards.folders import Folder
from shoal.clients.bulk.shards.shard_task import Message, Scorer, ScoringJob

_END_SECONDS = 10.0  # for an idle worker to close its model


class DiedError(Exception):
    """Worker that is gone, with the reason."""


class Worker(ABC):
    """Worker that is started for its first shard. ``shard`` is None while it is idle.

    ``rows`` are those that it has answered of the shard. ``is_ready`` is whether it has loaded the model.
    """

    def __init__(self) -> None:
        self.shard: int | None = None
        self.rows = 0
        self.is_ready = self._is_started = False
        self._place = ""
        self._heard = 0.0

    def begin(self, number: int) -> None:
        """Let the worker score a shard."""
        if not self._is_started:
            self.start()
            self._is_started, self.is_ready = True, False
        self.shard, self.rows, self._place, self._heard = number, 0, "", time.monotonic()
        self.send(number)

    def receive(self, hung_seconds: float) -> Message | None:
        """Return the message that ends the shard, ``("died", why)`` if the worker is gone, else None."""
        try:
            for message in self.messages():
                self._heard = time.monotonic()
                if message[0] == "ready":
                    self.is_ready = True
                elif message[0] == "rows":
                    self.rows, self._place = message[1:]
                elif message[0] != "alive":
                    return message
        except DiedError as error:
            return "died", f"The worker died ({error}){self._tell()}."
        if time.monotonic() - self._heard > hung_seconds:
            return "died", f"The worker answered no request for {hung_seconds:.0f} seconds{self._tell()}."
        return None

    def _tell(self) -> str:
        if not self.is_ready:
            return " while it loaded the model"
        return f" after {self.rows:,} rows of part {self.shard}, the last being {self._place or 'none'}"

    def restart(self) -> None:
        """End the worker; it is started again for its next shard."""
        self.end()
        self._is_started = self.is_ready = False

    @abstractmethod
    def start(self) -> None:
        """Start the worker."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Send it the number of a shard; if it is gone, ``messages`` says so."""

    @abstractmethod
    def messages(self) -> Iterator[Message]:
        """Yield the messages that are there.

        Raises:
            DiedError: the worker is gone.
        """

    @abstractmethod
    def end(self) -> None:
        """End the worker, if it runs."""

    @staticmethod
    @abstractmethod
    def wait(workers: Sequence[Any], seconds: float) -> None:
        """Wait until one of these workers has a message or is gone, or the time is over."""


class ProcessWorker(Worker):
    """Process of this machine, on some of its cores."""

    def __init__(self, folder: Folder, job: ScoringJob, cores: Sequence[int]) -> None:
        super().__init__()
        self._arguments = folder, job, cores
        self._process: BaseProcess | None = None
        self._pipe: Connection

    def start(self) -> None:
        """Start the process."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Its temporary files are removed even if it is killed. Not a daemon, which may have no processes of its own.
        self._room = tempfile.TemporaryDirectory(prefix="shoal-worker-", ignore_cleanup_errors=True)
        arguments = theirs, self._room.name, *self._arguments
        self._process = context.Process(target=_work, args=arguments, name="shoal-worker")
        self._process.start()
        theirs.close()

    def send(self, number: int) -> None:
        """Send it the number of a shard."""
        with suppress(OSError):
            self._pipe.send(number)

    def messages(self) -> Iterator[Message]:
        """Yield the messages that are there."""
        assert self._process is not None
        try:
            while self._pipe.poll():
                yield self._pipe.recv()
            if self._process.exitcode is not None:  # a process of its own may still hold the pipe
                raise EOFError
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode or 0
            how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise DiedError(how) from None

    def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._pipe.close()  # an idle one then closes its model
            self._process.join(_END_SECONDS if self.shard is None else 0)
            self._process.kill()
            self._process.join()
            self._room.cleanup()
            self._process = None

    @staticmethod
    def wait(workers: Sequence[ProcessWorker], seconds: float) -> None:
        """Wait for a message, or the end of a process."""
        ends = [worker._process.sentinel for worker in workers if worker._process]
        connection.wait([*(worker._pipe for worker in workers), *ends], seconds)


def make_processes(folder: Folder, job: ScoringJob, number: int) -> list[ProcessWorker]:
    """Return workers of this machine. With the pipeline in them, the machine's cores are divided among them."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[at::number] if job.where != "server" else cores for at in range(number)]
    return [ProcessWorker(folder, job, share or cores) for share in shares]


def _work(pipe: Connection, room: str, folder: Folder, job: ScoringJob, cores: Sequence[int]) -> None:
    """Run a worker process: score the shards whose numbers come through ``pipe``, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_end_with_parent, args=(room,), daemon=True).start()
    os.sched_setaffinity(0, cores)  # before a library counts them
    tempfile.tempdir = room
    with closing(Scorer(folder, job)) as scorer, suppress(EOFError):
        while True:
            for message in scorer.score(pipe.recv()):
                pipe.send(message)


def _end_with_parent(room: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    while Path(room).exists():  # the other threads are still writing
        shutil.rmtree(room, ignore_errors=True)
    os._exit(1)
