"""Serve a model repository: HTTP and gRPC front ends, a supervised Triton behind them, and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import InputError
from shoal.gateway.control.canary import make_canaries
from shoal.gateway.control.health import Health
from shoal.gateway.control.supervisor import Servers, Supervisor
from shoal.gateway.core.dispatcher import Dispatcher
from shoal.gateway.core.listener import listen
from shoal.gateway.core.models import find_below, find_default, find_exposed, find_slots
from shoal.gateway.core.stream_requests import Streaming
from shoal.gateway.logs import log
from shoal.gateway.options import HEALTH_CONNECTIONS, Options, Pool
from shoal.gateway.v2.grpc_front import GrpcFront, make_server
from shoal.gateway.v2.http_front import HttpFront
from shoal.gateway.v2.screening import read_rules
from shoal.repository.manifest import read_composed
from shoal.repository.model_folders import read_configs
from shoal.server.checks import check_start
from shoal.server.launch import find_ports
from shoal.server.orphans import clean_up

SECOND_SIGNAL = 1  # exit code after a second signal, which ends the service without waiting
_CLOSING = 0.5  # seconds for idle connections to close


class Addresses(NamedTuple):
    """Addresses of the service's three ports, each ``host:port``."""

    http: str
    grpc: str
    metrics: str


def run_service(repository: Path | str, options: Options, on_ready: Callable[[Addresses], None]) -> int:
    """Serve ``repository`` until SIGTERM or SIGINT; return the exit code.

    ``on_ready`` is called with the service's addresses when all models are ready. After the first signal, the service
    refuses new requests and waits for the requests in flight. A second signal ends the wait.

    Raises:
        InputError: Triton does not support the path, or there is no repository.
        SetupError: a port is taken, or this machine cannot run the server.
        ServerError: a model did not load, or no server could be started for ten minutes.
    """
    path = Path(repository).resolve()
    runtime = check_start(path)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes one
    for folder in clean_up():
        log.info("Removed files of a server that was killed: %s", folder)
    return asyncio.run(_Service(path, options).run(runtime, on_ready))


class _Service:
    def __init__(self, repository: Path, options: Options) -> None:
        self._repository, self._options = repository, options
        self._signals = 0
        self._signalled = asyncio.Event()

    async def run(self, runtime: Any, on_ready: Callable[[Addresses], None]) -> int:
        options, configs = self._options, read_configs(self._repository)
        self._listen()
        if unknown := [name for name in options.exposed if name not in configs]:
            raise InputError(f"--expose {unknown[0]} names no model of {self._repository}.", "Name one of its models.")
        composed = read_composed(self._repository)
        exposed = find_exposed(configs, [*options.exposed, *composed])
        below = find_below(configs)
        dispatcher = Dispatcher(
            configs,
            exposed=exposed,
            visible=exposed.union(*(below[name] for name in exposed)),
            default=find_default(configs, exposed, composed),
            max_wait=options.max_wait,
            resends=options.resends,
            limits=options.limits,
            slots=find_slots(configs),
        )
        log.info("Clients may call %s.", ", ".join(sorted(exposed)))
        canaries, streaming, rules = make_canaries(configs), Streaming(configs), read_rules(configs)
        front, http = GrpcFront(dispatcher, rules, streaming), HttpFront(dispatcher, rules, streaming)
        health = Health(dispatcher, canaries, streaming)
        servers = Servers(self._repository, runtime, options.load_seconds, canaries)
        supervisor = Supervisor(
            configs, options, servers=servers, dispatcher=dispatcher, canaries=canaries, health=health
        )
        async with _open_doors(options, front, http, health) as at:
            try:
                if await self._until_signal(supervisor.start()):
                    on_ready(at)
                    await self._until_signal(supervisor.run())
                    log.info("Stopping: %d requests are in flight.", dispatcher.num_requests)
                    if self._signals < 2:
                        self._signalled.clear()
                        await self._until_signal(supervisor.drain())
            finally:
                await supervisor.stop(*([0.0] if self._signals > 1 else []))
        return SECOND_SIGNAL if self._signals > 1 else 0

    def _listen(self) -> None:
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


@asynccontextmanager
async def _open_doors(options: Options, front: GrpcFront, http: HttpFront, health: Health) -> AsyncIterator[Addresses]:
    """Listen at the ports for HTTP, gRPC and health checks while the context is open.

    Requests that arrive before Triton is ready are refused with the reason.
    """
    limits, host = options.limits, options.host
    ports = find_ports(options.http_port, options.grpc_port, options.metrics_port, host=host)
    addresses = Addresses(*(f"{host}:{port}" for port in ports))
    connections = Pool(limits.connections, limits.client_share)
    async with contextlib.AsyncExitStack() as held:
        few = Pool(HEALTH_CONNECTIONS, limits.client_share)
        for app, port, pool in ((health.app, ports[2], few), (http.app, ports[0], connections)):
            await held.enter_async_context(listen(app, host, port, limits, pool, is_open=options.is_open))
        server = make_server(front, addresses.grpc, limits)
        await server.start()
        held.push_async_callback(server.stop, _CLOSING)
        yield addresses
