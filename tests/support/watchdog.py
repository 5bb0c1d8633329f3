"""The longest silence of a service's event loop, measured by a process of its own.

    python -m tests.support.watchdog HOST:PORT

asks ``/health/live`` every 10 ms until its input ends, and prints the seconds that each answer took, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from typing import Self

PERIOD = 0.01


class Watchdog:
    """Context in which a service is asked whether it lives; afterwards, ``seconds`` are the times of the answers."""

    def __init__(self, address: str) -> None:
        self._command = [sys.executable, "-m", __name__, address]
        self.seconds: list[float] = []

    @property
    def longest(self) -> float:
        """Seconds of the slowest answer, about the longest time that the loop was busy with one thing."""
        return max(self.seconds)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = json.loads(self._process.communicate()[0])
        assert self.seconds


def main(address: str) -> None:
    """Ask until the input ends."""
    connection, seconds, ended = HTTPConnection(address, timeout=300), list[float](), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    sys.stdout.write("began\n")
    sys.stdout.flush()
    while not seconds or not ended.wait(PERIOD):  # once at least, however short the context is
        start = time.perf_counter()
        connection.request("GET", "/health/live")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - start)
    sys.stdout.write(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
