"""A small repository for a service, with models that misbehave on request."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.clients.client.client import Client
from shoal.errors import ShoalError
from shoal.system.processes import Process, find_process, processes
from tests.support.planted import write
from tests.support.secured import VARIABLE, Secured

# What a component does is written in a file of the test's: hang, spin, raise, garbage, leak, busy SECONDS; or the
# seconds that it sleeps. With "refuse", it goes on, but does not start.
MODEL = """
import time
from pathlib import Path

from shoal import Component


class Step(Component):
    def setup(self, context):
        self.told = Path(context.spec.parameters["told"])
        self.kept = []
        if self.told.exists() and self.told.read_text(encoding="utf-8") == "refuse":
            raise RuntimeError("told not to start")

    def run(self, batch):
        what = self.told.read_text(encoding="utf-8") if self.told.exists() else ""
        if what == "hang":
            time.sleep(1000)
        while what == "spin":
            pass
        if what == "raise":
            raise RuntimeError("told to raise")
        if what == "leak":
            self.kept.append(b"x" * 2**26)
        if what.startswith("busy "):
            end = time.monotonic() + float(what.removeprefix("busy "))
            while time.monotonic() < end:
                pass
        if what.replace(".", "").isdigit():
            time.sleep(float(what))
        return {"Y": batch["X"] * (-1 if what == "garbage" else 2)}


TritonPythonModel = Step.for_triton()
"""
CONFIG = """
backend: "python"
max_batch_size: 4
dynamic_batching { }
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: COUNT } ]
parameters { key: "told" value { string_value: "TOLD" } }
parameters { key: "public" value { string_value: "true" } }
model_warmup [ {
  name: "one" batch_size: 1
  inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "X" } }
} ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "first" model_version: -1
      input_map { key: "X" value: "X" } output_map { key: "Y" value: "t" } },
    { model_name: "second" model_version: -1
      input_map { key: "X" value: "t" } output_map { key: "Y" value: "Z" } }
  ]
}
"""
MAIN = ["-c", "from shoal.cli import main; main()"]
SHOAL = [sys.executable, *MAIN]
THREE = b"\x00\x00\x40\x40"  # 3.0, as FP32 travels


def make_repository(folder: Path, *, num_instances: int = 1) -> Path:
    """``chain`` of ``first`` and ``second``, which double X each, and ``other``, which doubles it alone."""
    repository = folder / "repository"
    for name in ("first", "second", "other"):
        config = CONFIG.replace("TOLD", str(folder / name)).replace("COUNT", str(num_instances))
        write(repository / name / "config.pbtxt", config)
        write(repository / name / "1" / "model.py", MODEL)
        data = repository / name / "warmup" / "X"
        data.parent.mkdir()
        data.write_bytes(THREE)
    write(repository / "chain" / "config.pbtxt", ENSEMBLE)
    write(repository / "chain" / "1" / ".gitkeep", "")
    return repository


class Service:
    """``shoal serve`` over a repository, as a process of its own, in this environment or that of another ``python``.

    ``descriptors`` is how many it may open, and ``main`` are the arguments of Python that start the command. With
    ``SHOAL_TEST_KEYS``, it has keys and TLS (see ``secured.py``), unless ``arguments`` say something about either.
    """

    def __init__(
        self,
        repository: Path,
        log: Path,
        *arguments: object,
        python: str = sys.executable,
        descriptors: int = 0,
        main: Sequence[str] = MAIN,
    ) -> None:
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self._secured: Secured | None = None
        if os.environ.get(VARIABLE) and {"--keys", "--tls-cert"}.isdisjoint(map(str, arguments)):
            self._secured = Secured(log)
            arguments = *(each for each in arguments if each != "--open"), *self._secured.options
        command = [python, *main, "serve", repository, *ports, *arguments]
        if descriptors:
            command = ["prlimit", f"--nofile={descriptors}", *command]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=file, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready: "), log.read_text(encoding="utf-8")
        addresses = line.split()[2::2]
        self.http, self.grpc, self.metrics = self._secured.serve(*addresses) if self._secured else addresses

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the metrics port."""
        try:
            with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def is_ready(self) -> bool:
        """Whether the service reports that it is ready."""
        return self.get("/health/ready")[0] == 200

    def wait(self, *, is_ready: bool, seconds: float) -> float:
        """Until it is ready, or no longer; how many seconds that took."""
        start = time.monotonic()
        while self.is_ready() != is_ready:
            assert time.monotonic() - start < seconds, self.log.read_text(encoding="utf-8")[-2000:]
            time.sleep(0.01)
        return time.monotonic() - start

    def servers(self) -> list[Process]:
        """Its Tritons: one, but while another one takes over."""
        own = [p for p in processes() if p.parent == self.process.pid and p.group == p.pid and not p.is_ended]
        return [p for p in own if any(word.endswith("tritonserver") for word in p.arguments())]

    def stubs(self) -> list[Process]:
        """The processes of models."""
        parents = {server.pid for server in self.servers()}
        return [p for p in processes() if p.parent in parents and not p.is_ended]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of the service's log."""
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def regions(self) -> set[str]:
        """Its shared memory."""
        return {path.name for path in Path("/dev/shm").glob(f"shoal_{self.process.pid}_*")}

    def stop(self) -> int:
        """Its exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                if self._secured:
                    with suppress(OSError):
                        self.get("/metrics")  # which passes where the key is looked for
                    self._secured.search(self.process.pid)
            finally:
                self.process.terminate()
                self.process.send_signal(signal.SIGINT)  # the second one ends it at once; Triton takes 3 s otherwise
                self.process.wait(60)
        if self._secured:
            self._secured.search(self.process.pid)
            self._secured.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert not self.regions()


class Callers:
    """Threads that ask ``chain`` again and again, half of them by HTTP, and look at every answer."""

    def __init__(self, service: Service, number: int = 16, model: str = "chain") -> None:
        self._service, self._model, self._stop = service, model, threading.Event()
        self.num_answers, self.failures, self.seconds = 0, list[str](), list[float]()
        self._answered = set[int]()
        self._threads = [threading.Thread(target=self._call, args=(index,)) for index in range(number)]

    def _call(self, index: int) -> None:
        url, protocol = (self._service.grpc, "grpc") if index % 2 else (self._service.http, "http")
        output, factor = ("Z", 4) if self._model == "chain" else ("Y", 2)
        with Client(url, protocol=protocol, retries=0, timeout=60) as client:
            while not self._stop.is_set():
                value, start = random.random(), time.monotonic()
                try:
                    answer = client.infer(self._model, X=[[value]])[output]
                    assert abs(float(answer[0, 0]) - factor * value) < 1e-5, (value, answer)
                    self.num_answers += 1
                    self.seconds.append(time.monotonic() - start)
                    self._answered.add(index)
                except ShoalError as error:
                    self.failures.append(str(error))
                    if "it is stopping" in str(error):
                        return  # what is on its way when the doors close is not answered any more
                    time.sleep(0.05)
                except AssertionError as error:
                    self.failures.append(f"wrong: {error}")

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def unexpected(self) -> list[str]:
        """Failures of other kinds than those of a model that is away, or of a request that its process had alone."""
        known = ("unavailable", "ended while it had this request")
        return [failure for failure in self.failures if not any(words in failure.lower() for words in known)]

    def wait_up(self) -> None:
        """Until each of them has had an answer."""
        assert wait_until(lambda: len(self._answered) == len(self._threads), 30), self.failures[:5]

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_until(is_so: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it becomes so in time."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def are_gone(pids: Sequence[int]) -> bool:
    """Whether all these processes have ended; zombies count as ended."""
    return all(process.is_ended for pid in pids if (process := find_process(pid)))


def arrive(ask: Callable[[int], object], *, rate: float, seconds: float, most_callers: int) -> None:
    """Call ``ask`` at random times, ``rate`` per second, whether or not the calls before have returned."""
    gaps = np.random.default_rng(0).exponential(1 / rate, int(rate * seconds))
    begin, running = time.monotonic(), deque[Future[object]]()
    with ThreadPoolExecutor(most_callers) as callers:
        for number, arrival in enumerate(np.cumsum(gaps)):
            time.sleep(max(begin + arrival - time.monotonic(), 0))
            running.append(callers.submit(ask, number))
            while running and running[0].done():
                running.popleft().result()
    for future in running:
        future.result()


INFER, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"
