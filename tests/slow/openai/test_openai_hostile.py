"""Whatever bodies, headers and metadata hold, the event loop goes on, memory returns, and others are answered."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Self

import pytest

from tests.conftest import Scale
from tests.support.hostile_bodies import EMBEDDINGS, LEAST
from tests.support.service import Service
from tests.support.storms import Peak, memory_mib
from tests.support.ticks import START

MOST_SILENCE = 0.05  # seconds of processor time of the loop's own thread
MORE_MIB = 64


class Served:
    """A service, and the file with the longest silence of its loop."""

    def __init__(self, repository: Path, home: Path) -> None:
        self._ticks = home / "ticks"
        self.service = Service(repository, home / "log", main=["-c", START.format(path=str(self._ticks))])

    def reset(self) -> None:
        """Forget the silences so far."""
        self._ticks.unlink(missing_ok=True)
        time.sleep(0.1)

    @property
    def silence(self) -> float:
        """Seconds of the longest silence."""
        while not (text := self._ticks.read_text(encoding="ascii")):  # it is being written
            time.sleep(0.001)
        return float(text)


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(repository, tmp_path_factory.mktemp("hostile"))
    with made.service:
        yield made


class Honest:
    """A caller that asks for an embedding again and again, and looks at every answer."""

    def __init__(self, service: Service) -> None:
        self._service, self._stop, self._thread = service, Event(), Thread(target=self._ask)
        self.seconds, self.failures = list[float](), list[str]()

    def _ask(self) -> None:
        connection = HTTPConnection(self._service.http, timeout=60)
        body, wanted = json.dumps(LEAST[EMBEDDINGS]), None
        while not self._stop.wait(0.005):
            start = time.monotonic()
            connection.request("POST", EMBEDDINGS, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            answer = json.loads(reply.read())
            self.seconds.append(time.monotonic() - start)
            wanted = wanted or answer
            if reply.status != 200 or answer != wanted:
                self.failures.append(str(answer))
        connection.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98]


def attack(service: Service, what: str, number: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.hostile_bodies", what, service.http, service.grpc, str(number)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    outcomes: dict[str, int] = json.loads(found.stdout)
    return outcomes


@pytest.mark.parametrize(("what", "sample", "full"), [("bodies", 150, 5000), ("heads", 500, 10_000)])
def test_hostile_requests_leave_no_trace(
    served: Served, scale: Scale, record: Callable[..., None], what: str, sample: int, full: int
) -> None:
    service, number = served.service, scale(sample, full=full)
    attack(service, what, number // 5)  # by then, pools and caches have their sizes
    time.sleep(2)
    before = memory_mib(service.process.pid)
    with Honest(service) as alone:
        time.sleep(scale(2, full=10))
    served.reset()
    start = time.monotonic()
    with Peak([service.process.pid]) as peak, Honest(service) as beside:
        outcomes = attack(service, what, number)
    seconds, silence = time.monotonic() - start, served.silence
    time.sleep(2)
    more = memory_mib(service.process.pid) - before
    record(
        f"hostile {what} of OpenAI's API", requests=number, seconds=round(seconds), outcomes=outcomes,
        silence_ms=round(1000 * silence, 1), more_mib=round(more, 1), peak_mib=round(peak.mib - before, 1),
        p99_ratio=round(beside.p99 / alone.p99, 2), p99_ms=round(1000 * beside.p99, 1),
        median_ms=[round(1000 * statistics.median(each.seconds), 1) for each in (alone, beside)],
    )  # fmt: skip
    assert not alone.failures + beside.failures
    assert not {name for name in outcomes if name in ("500", "silent", "UNKNOWN", "INTERNAL")}, outcomes
    assert "400" in outcomes, outcomes
    assert "200" in outcomes or (what == "bodies" and not scale.is_full), outcomes  # few bodies may all be refused
    assert service.metric("shoal_restarts_total") == service.metric("shoal_in_flight") == 0
    assert silence < MOST_SILENCE
    assert more < MORE_MIB
    assert peak.mib < 1024 + before
    if scale.is_full:  # bodies of megabytes hold the interpreter's lock for milliseconds each
        assert statistics.median(beside.seconds) < 4 * statistics.median(alone.seconds)
