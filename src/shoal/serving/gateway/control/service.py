"""Serve a model repository: HTTP and gRPC front ends, a supervised Triton behind them, and graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from shoal.authoring.repository.call_graph import find_below
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.manifest import read_composed
from shoal.authoring.repository.model_folders import read_configs
from shoal.errors import InputError, suggest
from shoal.serving.gateway.callers.access_log import Audit
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.callers.key_ring import KeyRing
from shoal.serving.gateway.control.canary import make_canaries
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.control.supervisor import Servers, Supervisor
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.models import find_default, find_exposed, find_load_seconds, find_slots, find_widths
from shoal.serving.gateway.core.stream_requests import StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.http.certificates import Certificates
from shoal.serving.gateway.http.listener import listen
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.options import HEALTH_CONNECTIONS, Addresses, Options
from shoal.serving.server.checks import check_start
from shoal.serving.server.launch import find_ports
from shoal.serving.server.orphans import clean_up
from shoal.serving.server.snapshot import take_snapshot

SECOND_SIGNAL = 1  # exit code after a second signal, which ends the service without waiting
_COLLECT_SECONDS = 1.0  # between two looks whether nothing is in flight
_SELDOM = 1000  # collections of young objects, each of thousands of allocations, for a full one
OpenFronts = Callable[
    [Gate, Mapping[str, ModelConfig], Options, Addresses, Certificates | None], AbstractAsyncContextManager[None]
]


class Service:
    """A supervised Triton server, and the ports for operators and, by ``open_fronts``, for clients."""

    def __init__(self, repository: Path, options: Options, open_fronts: OpenFronts) -> None:
        self._repository, self._options, self._open_fronts = repository, options, open_fronts
        self._signals = 0

    def run(self, on_ready: Callable[[Addresses, Path], None]) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code (see ``run_service``)."""
        runtime = check_start(self._repository)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes one
        for folder in clean_up():
            log.info("Removed files of a server that was killed: %s", folder)
        with take_snapshot(self._repository) as self._snapshot:
            if shared := self._snapshot.shared:
                log.warning("Files cannot be copied, and are used where they are: %s", ", ".join(map(str, shared)))
            return asyncio.run(self._run(runtime, on_ready))

    async def _run(self, runtime: Any, on_ready: Callable[[Addresses, Path], None]) -> int:
        options, snapshot, configs = self._options, self._snapshot, read_configs(self._snapshot.folder)
        self._signalled = asyncio.Event()
        self._handle_signals()
        gate = self._make_gate(configs)
        canaries = make_canaries(configs)
        health = Health(gate, canaries)
        seconds = find_load_seconds(configs) if options.load_seconds is None else options.load_seconds
        servers = Servers(snapshot.folder, runtime, seconds, canaries, options.cache_mib, snapshot.show)
        supervisor = Supervisor(
            configs,
            options,
            servers=servers,
            active=gate.active,
            traffic=gate.traffic,
            exposure=gate.exposure,
            canaries=canaries,
            health=health,
        )
        async with self._open_ports(gate, configs, health) as at:
            try:
                snapshot.announce(f"http{'s' if options.tls_cert else ''}://{at.http}")
                if await self._until_signal(supervisor.start()):
                    on_ready(at, snapshot.folder)
                    await self._until_signal(supervisor.run())
                    log.info("Stopping: %d requests are in flight.", gate.traffic.num_requests)
                    if self._signals < 2:
                        self._signalled.clear()
                        await self._until_signal(supervisor.drain())
            finally:
                await supervisor.stop(*([0.0] if self._signals > 1 else []))
                if gate.audit is not None:
                    gate.audit.close()
        return SECOND_SIGNAL if self._signals > 1 else 0

    def _make_gate(self, configs: Mapping[str, ModelConfig]) -> Gate:
        options = self._options
        if unknown := [name for name in options.exposed if name not in configs]:
            raise InputError(f"--expose {unknown[0]} names no model of {self._repository}.", "Name one of its models.")
        composed = read_composed(self._snapshot.folder)
        exposed = find_exposed(configs, [*options.exposed, *composed])
        self._check_aliases(configs, exposed)
        log.info("Clients may call %s.", ", ".join(sorted(exposed)))
        below = find_below(configs)
        visible = exposed.union(*(below[name] for name in exposed))
        active = ActiveServer()
        return Gate(
            active,
            Traffic(
                active,
                configs,
                options.limits,
                max_wait=options.max_wait,
                slots=find_slots(configs),
                widths=find_widths(configs),
            ),
            Exposure(exposed, visible, find_default(configs, exposed, composed)),
            StreamRequests(configs),
            options.limits,
            resends=options.resends,
            keys=KeyRing(options.keys, configs) if options.keys else None,
            audit=Audit(options.audit) if options.audit else None,
        )

    def _check_aliases(self, configs: Mapping[str, ModelConfig], exposed: Container[str]) -> None:
        for name, model in self._options.aliases.items():
            given = f"--alias {name}={model}"
            if name in configs:
                raise InputError(f"{given}: {name} is a model of {self._repository}.", "Give a name that is not.")
            if model not in configs:
                raise InputError(f"{given} names no model of {self._repository}.", suggest(model, configs))
            if model not in exposed:
                raise InputError(f"{given} names a model that clients may not ask.", f"Add --expose {model}.")

    @asynccontextmanager
    async def _open_ports(
        self, gate: Gate, configs: Mapping[str, ModelConfig], health: Health
    ) -> AsyncIterator[Addresses]:
        options, host = self._options, self._options.host
        ports = find_ports(options.http_port, options.grpc_port, options.metrics_port, host=host)
        at = Addresses(*(f"{host}:{port}" for port in ports))
        tls = Certificates.of(options)
        async with (
            listen(health.app, at.metrics, options, tls, most=HEALTH_CONNECTIONS),
            self._open_fronts(gate, configs, options, at, tls),
        ):
            following = [asyncio.create_task(_collect_when_idle(gate.traffic))]
            if tls:
                following.append(asyncio.create_task(tls.follow()))
            if isinstance(keys := gate.callers.keys, KeyRing):
                following.append(asyncio.create_task(keys.follow(gate.callers.end_invalid)))
            try:
                yield at
            finally:
                for task in following:
                    task.cancel()

    def _handle_signals(self) -> None:
        def note(name: str) -> None:
            log.info("%s: %s.", name, "not waiting any longer" if self._signals else "stopping")
            self._signals += 1
            self._signalled.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, note, number.name)

    async def _until_signal(self, work: Any) -> bool:
        """Await ``work`` or a signal; return whether ``work`` ended first."""
        tasks = {asyncio.ensure_future(work), asyncio.ensure_future(self._signalled.wait())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks - done, return_exceptions=True)
        for task in done:
            task.result()
        return not self._signalled.is_set()


async def _collect_when_idle(traffic: Traffic) -> None:
    """Make full collections of garbage while no request is in flight.

    One stops the event loop for half a microsecond an object: for 80 ms while 40 answers of 2,048 documents are made.
    The interpreter itself makes them only if the service is never idle.
    """
    young, middle, usual = gc.get_threshold()
    gc.set_threshold(young, middle, _SELDOM)
    try:
        while True:
            await asyncio.sleep(_COLLECT_SECONDS)
            if gc.get_count()[2] > usual and not traffic.num_requests:
                gc.collect()
    finally:
        gc.set_threshold(young, middle, usual)
