"""The service from its start to its end: signals, draining and exit codes, over fake servers."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError, ServerError
from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.control import service as module
from shoal.serving.gateway.control.service import SECOND_SIGNAL, Service
from shoal.serving.gateway.control.supervisor import STOP_SECONDS
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.options import Addresses, Options
from shoal.serving.server.snapshot import Snapshot
from tests.support.fake_service import FakeService, refuse_to_start
from tests.support.service import make_repository
from tests.support.virtual_time import run

OPTIONS = Options(http_port=0, grpc_port=0, metrics_port=0, grace=10.0)


class Bench:
    """A service over a repository. ``schedule`` maps seconds after the start to what happens then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, options: Options = OPTIONS) -> None:
        self.fake = FakeService(monkeypatch)
        self.fake.models = ["first", "second", "other"]
        self.repository = make_repository(folder)
        self.service = Service(self.repository, options, self._open)
        self.gate: Gate | None = None
        self.is_closed, self.ready = False, list[Addresses]()
        self.schedule: dict[float, Callable[[], Any]] = {}
        self.ended, self._admitted = 0.0, ExitStack()
        monkeypatch.setattr(module, "check_start", lambda _: None)
        monkeypatch.setattr(module, "clean_up", lambda: [Path("/tmp/left")])
        snapshot = Snapshot(self.repository, self.repository, [], folder)
        monkeypatch.setattr(module, "take_snapshot", lambda _: nullcontext(snapshot))
        monkeypatch.setattr("resource.setrlimit", lambda *_: None)
        monkeypatch.setattr("asyncio.run", lambda work: run(self._time(work)))

    @asynccontextmanager
    async def _open(self, gate: Gate, *_: Any) -> AsyncIterator[None]:
        self.gate = gate
        try:
            yield
        finally:
            self.is_closed = True

    async def _time(self, work: Any) -> int:
        loop = asyncio.get_running_loop()
        for seconds, action in self.schedule.items():
            loop.call_later(seconds, action)
        start = loop.time()
        try:
            code: int = await work
        finally:
            self.ended = loop.time() - start
        return code

    def run(self) -> int:
        """Run the service until it ends, and return its exit code."""
        return self.service.run(lambda at, _: self.ready.append(at))

    def admit(self) -> None:
        assert self.gate is not None
        self._admitted.enter_context(self.gate.traffic.admit("other", 0, ANYONE))

    def release(self) -> None:
        self._admitted.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


def send(name: str) -> Callable[[], None]:
    return lambda: signal.raise_signal(getattr(signal, name))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_drains_and_stops(bench: Bench, name: str) -> None:
    bench.schedule = {20.0: bench.admit, 30.0: send(name), 35.0: bench.release}
    assert bench.run() == 0
    assert len(bench.ready) == 1
    assert bench.ended == pytest.approx(35, abs=1.5)
    assert [each.stopped for each in bench.fake.servers] == [[STOP_SECONDS]]
    assert bench.is_closed


def test_each_server_gets_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(monkeypatch, tmp_path, replace(OPTIONS, cache_mib=3.0))
    bench.schedule = {20.0: send("SIGTERM")}
    assert bench.run() == 0
    assert bench.fake.given == {"cache_mib": 3.0}


def test_requests_in_flight_have_the_grace(bench: Bench) -> None:
    bench.schedule = {20.0: bench.admit, 30.0: send("SIGTERM")}
    assert bench.run() == 0
    assert bench.ended == pytest.approx(40, abs=1.5)


@pytest.mark.parametrize("seconds", [30.0, 33.0])
def test_a_second_signal_ends_at_once(bench: Bench, seconds: float) -> None:
    first, second = send("SIGTERM"), send("SIGINT")
    if seconds == 30.0:  # both before the service has seen the first one
        bench.schedule = {20.0: bench.admit, 30.0: lambda: (first(), second())}
    else:
        bench.schedule = {20.0: bench.admit, 30.0: first, seconds: second}
    assert bench.run() == SECOND_SIGNAL
    assert bench.ended == pytest.approx(seconds, abs=1.5)
    assert bench.fake.servers[0].stopped == [0.0]


def test_a_signal_while_it_starts(bench: Bench) -> None:
    bench.schedule = {0.0: send("SIGTERM")}
    assert bench.run() == 0
    assert bench.ready == []
    assert bench.is_closed


def test_garbage_is_collected_while_nothing_is_in_flight(bench: Bench) -> None:
    full, usual = list[str](), gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append("busy" if bench.gate and bench.gate.traffic.num_requests else "idle")

    def make_old() -> None:
        for _ in range(usual[2] + 1):
            gc.collect(1)

    bench.schedule = {20.0: bench.admit, 21.0: make_old, 29.0: bench.release, 40.0: send("SIGTERM")}
    gc.callbacks.append(note)
    try:
        assert bench.run() == 0
    finally:
        gc.callbacks.remove(note)
    assert full
    assert set(full) == {"idle"}
    assert gc.get_threshold() == usual


def test_a_server_that_does_not_start(bench: Bench) -> None:
    bench.fake.unready = refuse_to_start(1)
    with pytest.raises(ServerError, match="did not start"):
        bench.run()
    assert bench.is_closed
    assert bench.fake.servers[0].stopped == [0]


def test_a_service_whose_server_is_gone_for_good(bench: Bench) -> None:
    def end() -> None:
        bench.fake.failures = refuse_to_start(1000)
        bench.fake.end(0, 0)

    bench.schedule = {10.0: end}
    with pytest.raises(ServerError, match="10 minutes"):
        bench.run()
    assert len(bench.ready) == 1
    assert bench.is_closed


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("gpt-4o", "chian", r"--alias gpt-4o=chian names no model of .* Did you mean chain\?"),
        ("other", "chain", r"--alias other=chain: other is a model of .* Give a name that is not\."),
        ("gpt-4o", "first", r"--alias gpt-4o=first names a model that clients may not ask\. Add --expose first\."),
    ],
)
def test_an_alias_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, model: str, message: str
) -> None:
    options = Options(http_port=0, grpc_port=0, metrics_port=0, aliases={name: model})
    bench = Bench(monkeypatch, tmp_path, options)
    config = bench.repository / "first" / "config.pbtxt"
    config.write_text(config.read_text().replace('"public"', '"private"'))
    with pytest.raises(InputError, match=message):
        bench.run()
    assert bench.fake.servers == []


def test_exposed_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(monkeypatch, tmp_path, Options(http_port=0, grpc_port=0, metrics_port=0, exposed=("nope",)))
    with pytest.raises(InputError, match="--expose nope names no model"):
        bench.run()
    bench = Bench(monkeypatch, tmp_path / "again")
    for name in ("first", "second", "other"):
        config = bench.repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"public"', '"private"'))
    bench.schedule = {1.0: send("SIGTERM")}
    assert bench.run() == 0
    assert bench.gate is not None
    exposure = bench.gate.exposure
    assert [exposure.is_exposed(name) for name in ("chain", "first", "other")] == [True, False, False]
    assert [exposure.is_visible(name) for name in ("chain", "first", "other")] == [True, True, False]
    assert exposure.default == "chain"
