"""Three keys, one of which sends ten times too much: how long the answers of the others take."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.clients.client.client import Client
from shoal.errors import ShoalError
from shoal.serving.gateway.callers.key_file import KeyFile
from tests.conftest import Scale
from tests.support.service import Service, make_repository

CALLERS = 2  # of a key; the one that sends too much has ten times as many


class Sender:
    """Callers with one key, that ask again and again; half of them by HTTP."""

    def __init__(self, service: Service, key: str, number: int) -> None:
        self._service, self._key, self._stop = service, key, threading.Event()
        self.seconds, self.failures = list[float](), list[str]()
        self._threads = [threading.Thread(target=self._call, args=(index,)) for index in range(number)]

    def _call(self, index: int) -> None:
        url, protocol = (self._service.grpc, "grpc") if index % 2 else (self._service.http, "http")
        with Client(url, protocol=protocol, api_key=self._key, retries=0, timeout=60) as client:
            while not self._stop.is_set():
                start = time.monotonic()
                try:
                    client.infer("other", X=[[1.0]])
                    self.seconds.append(time.monotonic() - start)
                except ShoalError as error:
                    self.failures.append(str(error))
                    time.sleep(0.02)

    def __enter__(self) -> Sender:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Service, list[str]]]:
    """A service whose model takes 50 ms for up to four rows, and three keys."""
    repository, file = make_repository(tmp_path), KeyFile(tmp_path / "keys.json")
    keys = [file.new(name) for name in ("one", "two", "much")]
    (tmp_path / "other").write_text("0.05")
    with Service(repository, tmp_path / "log", "--keys", file.path) as found:
        yield found, keys


def test_a_key_that_sends_too_much_does_not_slow_the_others_down(
    service: tuple[Service, list[str]], scale: Scale
) -> None:
    (served, keys), seconds = service, scale(9, 30)

    def measure(seconds: float) -> list[float]:
        """Return the medians of the two keys that send little, none of whose requests is refused."""
        senders = [Sender(served, key, CALLERS) for key in keys[:2]]
        with senders[0], senders[1]:
            time.sleep(seconds)
        assert [sender.failures for sender in senders] == [[], []]
        return [statistics.median(sender.seconds) for sender in senders]

    before = measure(seconds / 3)
    with Sender(served, keys[2], 10 * CALLERS) as much:
        beside = measure(seconds)
    assert much.seconds
    alone = [max(each) for each in zip(before, measure(seconds / 3), strict=True)]  # the machine may be busier now
    assert all(with_it <= 1.5 * without for with_it, without in zip(beside, alone, strict=True)), (alone, beside)
