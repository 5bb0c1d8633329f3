"""Clients of other keys that send what cannot fit, or read nothing, beside an honest one of a language model."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from shoal.authoring.composition.compose import compose
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.gateway.callers.key_file import KeyFile
from tests.conftest import Scale
from tests.support.service import Service

HOGS = 4  # keys
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, list[str]]]:
    """``llm`` with weights of 0.6 million numbers, an honest key and four others."""
    folder = tmp_path_factory.mktemp("hogs")
    repository = compose("llm", folder / "repository", weights=make_tiny(folder / "weights"))
    file = KeyFile(folder / "keys.json")
    keys = [file.new(name) for name in ("honest", *(f"hog{number}" for number in range(HOGS)))]
    with Service(repository, folder / "log", "--keys", file.path) as running:
        yield running, keys


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "llm", "messages": [{"role": "user", "content": text}], **fields}).encode()


class Honest:
    """A client that asks one chat after the other, each answered with 16 tokens."""

    def __init__(self, service: Service, key: str) -> None:
        self._connection = http.client.HTTPConnection(service.http, timeout=60)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, seconds: float) -> float:
        """Ask for so long, and return the median of the answers' seconds; none may be refused."""
        times, end = list[float](), time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.monotonic()
            body = chat("Hello", max_tokens=16, ignore_eos=True)
            self._connection.request("POST", PATH, body, self._headers)
            answer = self._connection.getresponse()
            said = answer.read()
            assert answer.status == 200, said
            times.append(time.monotonic() - start)
            time.sleep(0.05)
        self._connection.close()  # until it asks again
        return statistics.median(times)


@contextmanager
def running(work: Callable[[threading.Event, str], None], keys: list[str]) -> Iterator[None]:
    """Run ``work`` for each key in a thread, until the context ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop, key)) for key in keys]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_prompts_that_cannot_fit(service: tuple[Service, list[str]], scale: Scale, record: Any) -> None:
    served, keys = service
    statuses = list[int]()
    body = chat("The fish swims in the sea. " * 33_000)  # 900 KB; the context has 1,024 tokens

    def send(stop: threading.Event, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        while not stop.is_set():
            connection = http.client.HTTPConnection(served.http, timeout=60)
            connection.request("POST", PATH, body, headers)
            answer = connection.getresponse()
            assert b"context" in answer.read()
            statuses.append(answer.status)
            connection.close()

    honest = Honest(served, keys[0])
    alone = honest.ask(scale(2, full=20))
    with running(send, keys[1:]):
        beside = honest.ask(scale(5, full=60))
    assert set(statuses) == {400}
    assert served.metric("shoal_in_flight") == 0
    record("prompts that cannot fit", alone_s=alone, beside_s=beside, refused=len(statuses))
    assert beside < scale(6, full=3) * alone, (alone, beside)


@pytest.mark.parametrize(("num_streams", "most"), [(1, 3), (25, 12)])
def test_streams_that_are_not_read(
    service: tuple[Service, list[str]], scale: Scale, record: Any, num_streams: int, most: int
) -> None:
    """With 25 streams a key, more than the model computes at once: the honest key has its part, and is not refused."""
    served, keys = service
    num_opened = [0]
    host, port = served.http.split(":")

    def open_stream(key: str) -> socket.socket:
        num_opened[0] += 1
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((host, int(port)))
        body = chat("Hello", max_tokens=1000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=5)
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        made.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        made.setblocking(False)
        return made

    def hold(stop: threading.Event, key: str) -> None:
        held = [open_stream(key) for _ in range(num_streams)]
        while not stop.wait(0.2):
            for index, each in enumerate(held):
                with suppress(OSError):
                    each.sendall(b"\r\n")  # fails once the service has closed the connection
                    continue
                each.close()
                with suppress(OSError):
                    held[index] = open_stream(key)
        for each in held:
            each.close()

    honest = Honest(served, keys[0])
    alone = honest.ask(scale(2, full=20))
    with running(hold, keys[1:]):
        time.sleep(2)
        beside = honest.ask(scale(5, full=60))
    claim = f"{num_streams} streams of each of four keys are not read"
    record(claim, alone_s=alone, beside_s=beside, opened=num_opened[0])
    assert beside < scale(2, full=1) * most * alone, (alone, beside)
    end = time.monotonic() + 60
    while served.metric("shoal_in_flight"):
        assert time.monotonic() < end, "streams of clients that left are still in flight"
        time.sleep(0.2)
