"""Bottlenecks that were planted, and what `shoal bench --report` says of them; test_bench_command.py has two more."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench import write_repository
from tests.support.commands import Shoal
from tests.support.service import Service

DELAY = 0.05  # seconds, in each direction


class Delay(socketserver.BaseRequestHandler):
    """Passes on what it gets 50 ms later."""

    there: tuple[str, int]

    def handle(self) -> None:
        with socket.create_connection(self.there) as there:
            back = threading.Thread(target=self.pass_on, args=(there, self.request))
            back.start()
            self.pass_on(self.request, there)
            back.join()

    def pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                time.sleep(DELAY)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def delayed(url: str) -> Iterator[str]:
    host, _, port = url.rpartition(":")
    handler = type("Handler", (Delay,), {"there": (host, int(port))})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A pipeline whose steps take no time worth naming."""
    repository = write_repository(tmp_path_factory.mktemp("planted") / "repository", seconds="0")
    with Service(repository, repository.parent / "log") as running:
        yield running


def report(shoal: Shoal, subject: object, rows: Path, concurrency: str) -> dict[str, dict[str, Any]]:
    asked = ("bench", subject, "--inputs", rows, "--batches", "1", "--concurrency", concurrency)
    (advice,) = json.loads(shoal(*asked, "--seconds", "1", "--repeats", "1", "--json"))["advice"].values()
    return {entry["kind"]: entry for entry in advice}


def test_the_way_to_the_server(service: Service, shoal: Shoal, tmp_path: Path) -> None:
    rows = write_repository(tmp_path / "rows", seconds="0") / "rows.csv"
    with delayed(service.grpc) as url:
        found = report(shoal, url, rows, "1")["bottleneck"]
    assert found["what"] == "No step is the bottleneck."
    assert "the rest is on the way, in the network or a proxy" in found["why"]


def test_a_queue_delay(shoal: Shoal, tmp_path: Path) -> None:
    lines = "dynamic_batching { max_queue_delay_microseconds: 40000 }"
    repository = write_repository(tmp_path / "repository", seconds="0", more=lines)
    found = report(shoal, repository, repository / "rows.csv", "1")["delay"]
    assert found["what"] == "Remove the queue delay of slow."
