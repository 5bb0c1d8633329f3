"""The four ways to a server, under one interface; a wire that can be cut; and models that misbehave when asked to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.calls import Answer
from shoal.clients.client.client import Client
from shoal.clients.client.streams import AsyncReplies
from shoal.errors import ServerError
from shoal.serving.server.launch import Server

WAYS = ("grpc", "http", "grpc-async", "http-async")


class AwaitedReplies:
    """An ``AsyncReplies`` without its ``await``."""

    def __init__(self, runner: asyncio.Runner, replies: AsyncReplies) -> None:
        self._runner, self._replies = runner, replies

    def __iter__(self) -> AwaitedReplies:
        return self

    def __next__(self) -> Answer:
        async def read() -> Answer | None:
            return await anext(self._replies, None)

        answer = self._runner.run(read())
        if answer is None:
            raise StopIteration
        return answer

    def close(self) -> None:
        self._runner.run(self._replies.close())


class Awaited:
    """An ``AsyncClient`` without its ``await``."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient) -> None:
        self._runner, self._client = runner, client

    def stream(self, *args: Any, **options: Any) -> AwaitedReplies:
        return AwaitedReplies(self._runner, self._client.stream(*args, **options))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *args, **options: self._runner.run(found(*args, **options))


@contextmanager
def connect(way: str, url: str, **options: Any) -> Iterator[Any]:
    """A client of ``url``, by one of the ``WAYS``."""
    protocol, _, is_async = way.partition("-")
    if not is_async:
        with Client(url, protocol=protocol, **options) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        awaited = AsyncClient(url, protocol=protocol, **options)
        try:
            yield Awaited(runner, awaited)
        finally:
            runner.run(awaited.close())


def url_of(server: Server, way: str) -> str:
    return server.grpc_url if way.startswith("grpc") else server.http_url


class Relay:
    """Passes on what comes, to ``target`` and back; ``cut`` is how many more connections break, each at its next byte
    from the client."""

    def __init__(self, target: str, port: int = 0) -> None:
        host, _, number = target.partition(":")
        self._target = (host, int(number))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = 0
        self.num_connections = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=run, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self.num_connections += 1
                self._sockets += [near, far]
                self._start(self._pass_on, near, far, True)
                self._start(self._pass_on, far, near, False)

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_clients: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_clients and self.cut:
                    self.cut -= 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def answering(behave: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of something that does with each connection as ``behave`` does, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                behave(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


# --- models ------------------------------------------------------------------------------------------------------

MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        get = lambda name: pb.get_input_tensor_by_name(request, name).as_numpy()
{body}
        return pb.InferenceResponse([pb.Tensor("Y", y)])
"""
# Sleeps X seconds; less than none, and its process is gone.
SLOW = """
        x = get("X")
        if x.min() < 0:
            os._exit(1)
        time.sleep(float(x.max()))
        y = x
"""
FLAT = "        y = np.concatenate([get('A'), get('timeout')])"
WIDE = "        y = np.ones((len(get('X')), int(get('X').max())), np.float32)"
ONE_ROW = "        y = np.ones((1, 1), np.float32)"
TENSOR = '{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [{dims}] }}'


def write_models(folder: Path) -> None:
    """A repository of ``slow``, ``flat`` (which does not batch), ``wide`` and ``one_row``."""
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    _write(folder / "slow", SLOW, {"X": "1"}, "1", 1, queue)
    _write(folder / "flat", FLAT, {"A": "-1", "timeout": "-1"}, "-1", 0)
    _write(folder / "wide", WIDE, {"X": "1"}, "-1", 2)
    _write(folder / "one_row", ONE_ROW, {"X": "1"}, "1", 2)


def _write(folder: Path, body: str, inputs: dict[str, str], output: str, size: int, more: str = "") -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL.format(body=body), encoding="utf-8")
    tensors = [TENSOR.format(side="input", name=name, dims=dims) for name, dims in inputs.items()]
    tensors.append(TENSOR.format(side="output", name="Y", dims=output))
    config = (
        f'backend: "python" max_batch_size: {size}\n{"".join(tensors)}instance_group {{ kind: KIND_CPU }}\n{more}\n'
    )
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def numbers(replies: Any) -> list[int]:
    return [int(answer["NUMBER"].item()) for answer in replies]


def wait_for(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def failure(way: str, url: str, *args: Any, inputs: Any = None, **options: Any) -> str:
    """The words of the ServerError."""
    with connect(way, url, **{"retries": 0, **options}) as client, pytest.raises(ServerError) as error:
        client.infer(*(args or ("slow",)), inputs or {"X": [0.0]})
    return str(error.value)


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
