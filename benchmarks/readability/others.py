"""LitServe and PyTriton as processes of their own, and clients that send them single texts."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from shoal.processes import bound
from shoal.server.runtime import find_runtime

HOST = "127.0.0.1"
START_SECONDS = 300.0
NUM_CONNECTIONS = 64  # the most callers

Score = Callable[[str], float]  # one request
# What is tried before the rounds. With a batch timeout of 0 LitServe's worker never sleeps, so it is not among them.
LITSERVE_SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {"max_batch_size": size, "batch_timeout": seconds, "fast_queue": is_fast}
    for size, seconds, is_fast in (
        (16, 0.002, True),
        (16, 0.01, True),
        (16, 0.05, True),
        (8, 0.01, True),
        (16, 0.01, False),
    )
)
PYTRITON_SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {"max_batch_size": size, "max_queue_delay_microseconds": delay}
    for size, delay in ((16, 0), (16, 2_000), (16, 10_000), (16, 50_000), (8, 2_000))
)


def is_installed(package: str) -> bool:
    """Whether ``litserve`` or ``pytriton`` can be imported."""
    return importlib.util.find_spec(package) is not None


@contextmanager
def run(name: str, settings: Mapping[str, Any]) -> Iterator[Other]:
    """``litserve`` or ``pytriton``, started with these settings and ready; ended afterwards."""
    with ExitStack() as held:
        yield (_litserve if name == "litserve" else _pytriton)(settings, held)


class Other:
    """A server that runs, and ``score``, which sends it one text.

    It stands still but for ``awake``: LitServe's worker looks for requests a thousand times a second, which the systems
    whose turn it is would pay for.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, score: Score) -> None:
        self._process, self._log, self.score = process, log, score
        self.await_answer()
        self._signal(signal.SIGSTOP)

    def await_answer(self) -> None:
        """Wait until a text is answered.

        Raises:
            RuntimeError: the server ended, or was not ready in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.score("Is it there?")
                return
            except Exception:  # each client has errors of its own for a server that is not there yet
                time.sleep(0.2)
        raise RuntimeError(f"The server did not start:\n{self._log.read_text(errors='replace')[-4000:]}")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


@contextmanager
def _process(script: str, settings: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """One of the scripts beside this file, in a group of its own that is ended as a whole."""
    path = Path(__file__).with_name(script)
    environment = find_runtime().environment()  # PyTriton's stub, too, needs libpython on LD_LIBRARY_PATH
    environment |= {"OMP_NUM_THREADS": str(settings["threads"]), "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as folder:
        environment["PYTRITON_HOME"] = folder  # it leaves a copy of its server there when it is ended
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                bound([sys.executable, "-W", "ignore", path, json.dumps(dict(settings))]),
                env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                process_group=0,  # if we are killed, the kernel wakes what stands still and ends it
            )  # fmt: skip
        try:
            yield process, log
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
            process.wait()
            for region in Path("/dev/shm").glob(f"pytrtion{process.pid}-*"):  # PyTriton's own spelling
                region.unlink(missing_ok=True)


def _litserve(settings: Mapping[str, Any], held: ExitStack) -> Other:
    (port,) = free_ports(1)
    process, log = held.enter_context(_process("litserve_server.py", {**settings, "port": port}))
    connections = [http.client.HTTPConnection(HOST, port) for _ in range(NUM_CONNECTIONS)]
    for connection in connections:
        held.callback(connection.close)
    free = _fill(connections)

    def score(text: str) -> float:
        connection = free.get()
        try:
            try:
                return _post(connection, text)
            except ConnectionError:  # it had been idle for some seconds, and was closed over there
                connection.close()
                return _post(connection, text)
        except BaseException:
            connection.close()
            raise
        finally:
            free.put(connection)

    return Other(process, log, score)


def _post(connection: http.client.HTTPConnection, text: str) -> float:
    connection.request("POST", "/predict", json.dumps({"text": text}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"LitServe answered {answer.status}: {body!r}")
    return float(json.loads(body)["score"])


def _pytriton(settings: Mapping[str, Any], held: ExitStack) -> Other:
    import tritonclient.grpc as triton

    ports = free_ports(3)
    process, log = held.enter_context(_process("pytriton_server.py", {**settings, "ports": ports}))
    clients = [triton.InferenceServerClient(f"{HOST}:{ports[1]}") for _ in range(NUM_CONNECTIONS)]
    for client in clients:
        held.callback(client.close)
    free = _fill(clients)

    def score(text: str) -> float:
        tensor = triton.InferInput("text", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], np.object_))
        client = free.get()
        try:
            return float(client.infer("readability", [tensor]).as_numpy("score")[0, 0])
        finally:
            free.put(client)

    return Other(process, log, score)


def _fill(members: Sequence[Any]) -> SimpleQueue[Any]:
    free: SimpleQueue[Any] = SimpleQueue()
    for member in members:
        free.put(member)
    return free


def free_ports(number: int) -> list[int]:
    """Ports of the loopback that nobody uses now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
