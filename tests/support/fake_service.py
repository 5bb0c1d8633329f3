"""Supervisor over fake servers, processes and canary answers, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.calls import Call
from shoal.errors import ServerError
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.control import supervisor
from shoal.serving.gateway.control.canary import make_canaries
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.control.process_monitor import ProcessMonitor
from shoal.serving.gateway.control.supervisor import Servers, Supervisor
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.stream_requests import StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.options import Options
from tests.support.configs import PYTHON, chain, make_configs
from tests.support.fake_processes import SERVER, FakeProcesses
from tests.support.fake_upstream import FakeClient, FakeServer, FakeUpstream
from tests.support.virtual_time import run

A, B = 1, 2  # number of a model's process, after that of its server
WARMUP = """model_warmup [ { name: "one" batch_size: 1
  inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } } ]"""
CONFIGS = make_configs(a=PYTHON + WARMUP, b=PYTHON, both=chain("a", "b"))


class FakeService:
    """Models ``a`` and ``b`` and the ensemble ``both``; ``a`` and ``both`` get canaries.

    ``answer`` answers canaries. ``failures`` are raised by the next launches, ``unready`` while the next servers load.
    ``memory`` is what the machine has left. Each server has a process of each of ``models``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: Options | None = None) -> None:
        self.options = options or Options(grace=10.0, max_restarts=2)
        self.processes, self.servers, self.upstreams = FakeProcesses(monkeypatch), list[FakeServer](), list[Any]()
        self.failures: list[Exception] = []
        self.unready: list[Exception] = []
        self.launches: list[float] = []
        self.was_stopped: list[bool] = []  # whether the first server was, at each launch
        self.memory, self.models = 2**40, ["a", "b"]
        self.answer: Callable[[Call], Any] = lambda call: {"Y": np.zeros(1)}
        monkeypatch.setattr(supervisor, "Server", self._launch)
        monkeypatch.setattr(supervisor, "Upstream", self._connect)
        monkeypatch.setattr(supervisor, "TritonHttp", lambda server: None)
        monkeypatch.setattr(supervisor, "available_memory", lambda: self.memory)
        monkeypatch.setitem(ProcessMonitor.__init__.__kwdefaults__ or {}, "clock", lambda: time.monotonic())
        self.active = ActiveServer()
        self.traffic = Traffic(self.active, CONFIGS, self.options.limits, max_wait=1.0, slots={"a": 1})
        gate = self.gate = Gate(
            self.active, self.traffic, Exposure(CONFIGS), StreamRequests(CONFIGS), self.options.limits
        )
        self.canaries = make_canaries(CONFIGS)
        self.health = Health(gate, self.canaries)
        self.pool = Servers(Path(), None, 600.0, self.canaries)  # type: ignore[arg-type]
        self.supervisor = Supervisor(
            CONFIGS, self.options, servers=self.pool, active=self.active, traffic=self.traffic,
            exposure=gate.exposure, canaries=self.canaries, health=self.health,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    def _launch(self, *_: Any, **given: Any) -> FakeServer:
        self.given = given
        self.launches.append(time.monotonic())
        self.was_stopped.append(bool(self.servers and self.servers[0].stopped))
        if self.failures:
            raise self.failures.pop(0)
        pid = SERVER + 10 * len(self.servers)
        self.processes.add(pid, parent=1)
        for number, model in enumerate(self.models, 1):
            self.processes.add(pid + number, model, parent=pid, group=pid)
        self.servers.append(FakeServer(pid, self._load))
        return self.servers[-1]

    def _load(self, seconds: float) -> None:
        assert seconds == 600.0
        if self.unready:
            raise self.unready.pop(0)

    def _connect(self, server: FakeServer, _: None) -> FakeUpstream:
        self.upstreams.append(FakeUpstream(server, FakeClient(lambda call: self.answer(call))))
        return self.upstreams[-1]  # type: ignore[no-any-return]

    async def start(self) -> None:
        """Start the first server and the supervision."""
        await self.supervisor.start()
        self.running = asyncio.create_task(self.supervisor.run())

    def end(self, number: int = 0, process: int = B) -> None:
        """End a process of a server, or the server itself (0)."""
        self.processes.set(SERVER + 10 * number + process, state="Z")

    async def wait_for(self, num_servers: int, seconds: float = 5.0) -> float:
        """Wait until so many servers have been active in all, and return after how many seconds."""
        start = time.monotonic()
        while len(self.upstreams) < num_servers or self.active.upstream is not self.upstreams[-1]:
            await asyncio.sleep(0.05)
            assert time.monotonic() - start < seconds
        return time.monotonic() - start

    async def stop(self) -> None:
        """Stop everything."""
        if self.running is not None:
            self.running.cancel()
        await self.supervisor.stop()


def refuse_to_start(number: int) -> list[Exception]:
    """Return failures of launches."""
    return [ServerError("It did not start.") for _ in range(number)]


Play = Callable[[Callable[[FakeService], Awaitable[None]]], None]


def player(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return what runs a scene with a started service, and stops the service after it."""

    def play(scene: Callable[[FakeService], Awaitable[None]]) -> None:
        async def work() -> None:
            service = FakeService(monkeypatch)
            await service.start()
            await scene(service)
            await service.stop()
            assert all(each.is_closed for each in service.upstreams)

        run(work())

    return play
