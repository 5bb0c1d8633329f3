"""Clients that hold what they can of ``shoal serve``: others are answered, and memory and health hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import shoal
from tests.conftest import Scale
from tests.support.service import Callers, Service, make_repository
from tests.support.storms import Peak, Storm, memory_mib

MEMORY_MIB = 1024.0  # what the service holds for clients by default
HERE = "127.0.0.1"
ONE_KEY = "the storm and the other callers have one key, and so the same share"
BODIES = {"announce": 200, "stall": 1000, "inflate": 40}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storms")
    make_repository(folder)
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    """Streams come from the address that they say, as through a proxy."""
    with Service(home / "repository", home / "log", "--trusted-proxy", HERE) as running:
        yield running


@pytest.fixture(scope="module")
def strict(home: Path) -> Iterator[Service]:
    """A service with little patience."""
    options = ("--body-seconds", 1, "--head-seconds", 1, "--body-kib", 64, "--unread-seconds", 2)
    with Service(home / "repository", home / "log3", *options) as running:
        yield running


@pytest.fixture(scope="module")
def small(home: Path) -> Iterator[Service]:
    """A service that may open few descriptors."""
    with Service(home / "repository", home / "log4", descriptors=1024) as running:
        yield running


def pids(service: Service) -> list[int]:
    return [service.process.pid, *(process.pid for process in (*service.servers(), *service.stubs()))]


def p99(callers: Callers) -> float:
    assert not callers.failures, callers.failures[:5]
    return statistics.quantiles(callers.seconds, n=100)[98]


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_that_do_not_come(service: Service, scale: Scale, record: Callable[..., None], kind: str) -> None:
    """From another address than the honest callers'."""
    seconds, ratios, before = scale(2, full=10), [], memory_mib(*pids(service))
    with Peak(pids(service)) as peak:
        for _ in range(scale(1, full=5)):
            with Callers(service, 8) as calm:
                time.sleep(seconds)
            with Storm(kind, service.http, BODIES[kind]) as storm:
                storm.wait_up()
                with Callers(service, 8) as callers:
                    time.sleep(seconds)
                assert service.is_ready()
            ratios.append(p99(callers) / p99(calm))
            assert set(storm.found) <= {"open", "closed", "413", "429"}, storm.found
    assert peak.mib - before < MEMORY_MIB
    record(
        f"bodies that do not come: {kind}",
        p99_ratios=[round(ratio, 2) for ratio in ratios],
        more_mib=round(peak.mib - before, 1),
    )
    if scale.is_full:
        assert statistics.median(ratios) <= 2


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_that_do_not_come_from_the_same_address(service: Service, kind: str) -> None:
    before = memory_mib(*pids(service))
    with Peak(pids(service)) as peak, Storm(kind, service.http, BODIES[kind], source=HERE) as storm:
        storm.wait_up()
        for _ in range(10):
            start = time.monotonic()
            assert service.is_ready()
            assert time.monotonic() - start < 5
            time.sleep(0.1)
    assert peak.mib - before < MEMORY_MIB
    service.wait(is_ready=True, seconds=5)
    with Callers(service, 2) as callers:
        time.sleep(1)
    assert not callers.failures


def test_a_body_and_a_head_have_their_time(strict: Service) -> None:
    with Storm("announce", strict.http, 5) as bodies, Storm("idle", strict.http, 5) as heads:
        bodies.wait_up()
        heads.wait_up()
        time.sleep(4)
    assert bodies.found == {"408": 5}
    assert heads.found == {"closed": 5}
    assert strict.metric("shoal_refusals_total") == 5


def test_messages_of_which_the_end_does_not_come(service: Service, scale: Scale) -> None:
    """Each connection has a hundred calls of 60 MiB under way."""
    before = memory_mib(*pids(service))
    with Peak(pids(service)) as peak, Storm("half", service.grpc, 5) as storm:
        storm.wait_up()
        time.sleep(scale(5, full=60))
        assert service.is_ready()
    assert peak.mib - before < MEMORY_MIB


@pytest.mark.without_keys(ONE_KEY)
@pytest.mark.parametrize(("kind", "number"), [("silent", 2100), ("answered", 256)])
def test_streams_that_hold_their_places(service: Service, kind: str, number: int) -> None:
    with Storm(kind, service.grpc, number, 0) as storm:
        storm.wait_up()
        with Callers(service, 8) as callers:
            time.sleep(2)
        assert not callers.failures
        assert callers.num_answers > 10
        with Storm("answered", service.grpc, 1, 0, source="10.0.0.1") as honest:
            honest.wait_up()
            time.sleep(1)
        assert honest.found["answers"] == 1
    refused = storm.found.get("RESOURCE_EXHAUSTED", 0) + storm.found.get("UNAVAILABLE", 0)
    assert refused >= number - 128 - storm.found.get("DEADLINE_EXCEEDED", 0) - storm.found.get("CANCELLED", 0)


@pytest.mark.without_keys(ONE_KEY)
def test_streams_of_large_messages(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    """Another storm adds next to nothing to what the one before left."""
    number, left = scale(4, full=20), []
    with Peak(pids(service)) as peak:
        for _ in range(scale(2, full=6)):
            with Storm("large", service.grpc, 1, 50_000_000, number) as storm:
                storm.wait_up()
                with Callers(service, 2) as callers:
                    time.sleep(number)
            assert not callers.failures
            assert storm.found["errors"] == storm.found["answers"] == number
            time.sleep(1)
            left.append(memory_mib(*pids(service)))
    record("streams of large messages", left_mib=[round(mib) for mib in left], peak_mib=round(peak.mib))
    growth = statistics.median(after / before for before, after in pairwise(left))
    assert growth < (1.05 if scale.is_full else 1.5)


@pytest.mark.parametrize("port", ["http", "grpc", "metrics"])
def test_more_connections_than_descriptors(small: Service, port: str) -> None:
    """Earlier connections are answered throughout, health within a second, and the log stays short.

    One who comes later over gRPC is turned away: its connections have no share for each address.
    """
    with Callers(small, 2) as callers:
        callers.wait_up()
        with Storm("idle", getattr(small, port), 2000) as storm:
            storm.wait_up()
            for _ in range(20):
                for path in ("/health/live", "/health/ready"):
                    start = time.monotonic()
                    assert small.get(path)[0] == 200
                    assert time.monotonic() - start < 1
                time.sleep(0.1)
    assert not callers.failures
    assert storm.found["closed"] > 1500
    assert small.log.stat().st_size < 2**20


def test_unread_answers(strict: Service) -> None:
    with Storm("unread", strict.http, 10) as storm, shoal.Client(strict.http, protocol="http") as client:
        storm.wait_up()
        time.sleep(6)
        assert client.infer("chain", X=[[3.0]])["Z"].item() == 12.0
    assert strict.is_ready()
