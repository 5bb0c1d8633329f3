"""Supervision: detects models that die, hang or answer wrongly, and replaces the server without downtime.

Sections: servers, which are started and stopped; the supervisor, which decides when.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.authoring.repository.call_graph import find_leaves, find_users
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.launch_flags import CACHE_MIB
from shoal.errors import ServerError, ShoalError
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.control.canary import PATIENCE, Canary, Verdict, WrongError
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.control.process_monitor import PERIOD, ProcessFault, ProcessMonitor
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.models import count_processes, read_hang_seconds
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.http.triton_http import TritonHttp
from shoal.serving.gateway.logs import Tail, log
from shoal.serving.gateway.options import RESTARTS_SECONDS, Options
from shoal.serving.server.launch import Server
from shoal.serving.server.runtime import Runtime
from shoal.system.machine import available_memory

MOST_PAUSE = 8.0  # seconds before another try to start a server
MOST_RESTART_PAUSE = 60.0  # seconds before another server, after too many restarts or while the old one still serves
DRAIN_SECONDS = 10.0  # at most, for the requests of a server that has to end before the next one starts
GIVE_UP_SECONDS = 600.0  # without a started server
AGAIN_SECONDS = 0.5  # before a failed canary is sent again
SETTLED_SECONDS = 1.0  # since the latest lost request: without a fault until then, the server is healthy
STILL_SECONDS = 0.5  # of delay of this loop, after which earlier samples of processes are discarded
STOP_SECONDS = 3.0  # for Triton to unload its models, once it has nothing to do
_NO_MEMORY = re.compile(r"memory|alloc|No space left", re.I)  # of the machine, of a GPU or in /dev/shm


# --- servers ---------------------------------------------------------------------------------------------------------


class Servers:
    """Starts and stops Triton servers and forwards their logs. Usually one runs; during a replacement, two do.

    ``show`` changes each line of their logs.
    """

    def __init__(
        self,
        repository: Path,
        runtime: Runtime,
        load_seconds: float,
        canaries: dict[str, Canary],
        cache_mib: float = CACHE_MIB,
        show: Callable[[str], str] = str,
    ) -> None:
        self._repository, self._runtime, self._load_seconds = repository, runtime, load_seconds
        self._canaries, self._cache_mib, self._show = canaries, cache_mib, show
        self._running: dict[Upstream, tuple[Tail, asyncio.Task[None]]] = {}

    def __contains__(self, upstream: Upstream) -> bool:
        return upstream in self._running

    async def launch(self) -> Upstream:
        """Start a server, and return it when its models have answered their canary (test) requests."""
        starting = asyncio.to_thread(Server, self._repository, self._runtime, cache_mib=self._cache_mib)
        launching = asyncio.create_task(starting)
        try:
            server = await asyncio.shield(launching)
        except asyncio.CancelledError:  # the thread cannot be cancelled: stop what it starts
            with contextlib.suppress(ShoalError, OSError):
                await asyncio.to_thread((await launching).stop, 0)
            raise
        upstream, tail = Upstream(server, TritonHttp(server)), Tail(server.log, self._show)
        self._running[upstream] = tail, asyncio.create_task(tail.follow())
        try:
            await asyncio.to_thread(server.wait_ready, self._load_seconds)
            await self._prove(upstream)
        except BaseException:
            await self.end(upstream, 0)
            raise
        return upstream

    async def _prove(self, upstream: Upstream) -> None:
        for name, canary in list(self._canaries.items()):
            is_first = not canary.expected
            try:
                await canary.ask(upstream.client)
                if is_first:  # whether the answer is reproducible
                    await canary.ask(upstream.client)
            except WrongError as error:
                if not is_first or error.verdict in (Verdict.GONE, Verdict.LATE):
                    raise ServerError(f"{name} does not answer as it should: {error}.") from None
                log.warning("%s gets no canary requests: %s", name, error, extra={"model": name})
                del self._canaries[name]

    async def end(self, upstream: Upstream, seconds: float) -> None:
        """Stop a server; its requests are cancelled first. Triton's processes are killed after ``seconds``."""
        upstream.stop()
        await upstream.close()
        if upstream in self._running:
            tail, following = self._running[upstream]
            following.cancel()
            tail.read()
        await asyncio.to_thread(upstream.server.stop, seconds)
        self._running.pop(upstream, None)

    async def end_all(self, seconds: float) -> None:
        """Stop all servers."""
        await asyncio.gather(*(self.end(upstream, seconds) for upstream in list(self._running)))


# --- the supervisor --------------------------------------------------------------------------------------------------


class Supervisor:
    """Owns the active Triton server: health checks, restart, hand-over to the next server."""

    def __init__(
        self,
        configs: Mapping[str, ModelConfig],
        options: Options,
        *,
        servers: Servers,
        active: ActiveServer,
        traffic: Traffic,
        exposure: Exposure,
        canaries: dict[str, Canary],
        health: Health,
    ) -> None:
        self._configs, self._options, self._servers = configs, options, servers
        self._active, self._traffic, self._exposure = active, traffic, exposure
        self._canaries, self._health = canaries, health
        self._users = find_users(self._configs)
        self._monitored: dict[str, Any] = {
            "expected": count_processes(self._configs),
            "members": find_leaves(self._configs),
            "hang_seconds": read_hang_seconds(self._configs),
            "memory_mib": options.model_memory_mib,
        }
        self._broken: asyncio.Event = asyncio.Event()
        self._current: Upstream | None = None
        self._monitor: ProcessMonitor | None = None
        self._looking: asyncio.Task[None] | None = None  # checks the processes of the active server
        self._testing: list[asyncio.Task[None]] = []  # send canaries to its models
        self._retiring: set[asyncio.Task[Any]] = set()
        self._restarts: deque[tuple[float, Upstream]] = deque()

    async def start(self) -> None:
        """Start the first server, and admit requests.

        Raises:
            ServerError: the server does not start.
        """
        await self._take_over(await self._servers.launch())

    async def run(self) -> None:
        """Replace the server whenever something is wrong with it.

        Raises:
            ServerError: for ten minutes, no server could be started and no model was available to clients.
        """
        while True:
            broken = asyncio.create_task(self._broken.wait())
            watchers = {task for task in (self._looking, *self._testing) if task}
            done, _ = await asyncio.wait({broken, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            broken.cancel()
            for task in done & watchers:
                task.result()  # they end only with an error of our own: rather stop than serve unsupervised
            self._broken.clear()
            await self._replace()

    # --- a server ------------------------------------------------------------------------------------------------

    async def _take_over(self, upstream: Upstream) -> None:
        """Make a server the active one, and start its health checks."""
        self._current = upstream
        self._monitor = ProcessMonitor(upstream.server, **self._monitored)
        self._looking = asyncio.create_task(self._look(upstream))
        self._start_tests(upstream)
        await self._active.activate(upstream)

    # --- what is wrong -------------------------------------------------------------------------------------------

    async def _look(self, upstream: Upstream) -> None:
        assert self._monitor is not None
        while True:
            canaries = self._canaries.items() if self._testing else ()
            waiting = {name: canary.sent for name, canary in canaries if canary.sent}
            try:
                faults = self._monitor.check(waiting, self._active.answered)
            except OSError as error:  # out of file descriptors
                log.warning("The processes cannot be checked: %s", error)
                faults = []
            for fault in faults:
                self._note(upstream, fault)
            lost = self._active.suspected
            if lost and time.monotonic() - lost > SETTLED_SECONDS and not self._broken.is_set():
                self._active.suspected = 0.0
                await self._active.confirm_healthy()
            self._traffic.end_unread()
            start = time.monotonic()
            await asyncio.sleep(PERIOD)
            if (seconds := time.monotonic() - start - PERIOD) > STILL_SECONDS:
                log.warning("The service itself was stalled for %.1f s: was the machine busy, or paused?", seconds)
                self._monitor.forget()

    async def _test(self, upstream: Upstream, canary: Canary) -> None:
        # a single error may be chance; an ensemble gets one more, so that a faulty member is reported first
        num_errors, most = 0, 2 if self._configs[canary.model].is_ensemble else 1
        while True:
            await asyncio.sleep(AGAIN_SECONDS if num_errors else canary.period)
            if canary.model in self._active.blocked or self._traffic.is_full(canary.model):
                continue
            try:
                await canary.ask(upstream.client)
                num_errors, self._active.answered = 0, time.monotonic()
            except WrongError as error:
                assert self._monitor is not None
                upstream.kill_unhealthy(str(error))
                is_late = error.verdict is Verdict.LATE and self._monitor.may_be_late(canary.model, PATIENCE)
                if is_late or error.verdict is Verdict.BUSY:
                    continue  # the monitor detects whether these hang
                num_errors += 1
                log.warning("%s failed its canary: %s", canary.model, error)
                if num_errors > most:
                    self._note(
                        upstream, ProcessFault(canary.model, "wrong", f"{canary.model} does not answer as it did")
                    )

    def _note(self, upstream: Upstream, fault: ProcessFault) -> None:
        """Block a faulty model and the models that call it, kill the former's processes, and request a new server."""
        if upstream is not self._current or self._active.blocked.get(fault.model) or self._is_down():
            return
        log.error("%s", fault.what, extra={"model": fault.model, "kind": fault.kind})
        affected = self._users.get(fault.model, set()) | {fault.model} if fault.model else {*self._configs, ""}
        self._active.block(affected, fault.what)
        if self._monitor is not None and fault.model:
            self._monitor.kill(fault.model)
        self._health.restarts[fault.kind] += 1
        self._broken.set()

    def _is_down(self) -> bool:
        return "" in self._active.blocked

    # --- replacement ---------------------------------------------------------------------------------------------

    async def _replace(self) -> None:
        old, began = self._current, time.monotonic()
        assert old is not None
        self._cancel_tests()  # the next server gets the canaries
        num_failed, has_room = 0, True
        await self._pause(old)
        while True:
            try:
                if not (has_room and self._has_room()) or (num_failed and not self._is_useful(old)):
                    await self._give_way(old)
                upstream = await self._servers.launch()
            except (ShoalError, OSError) as error:
                num_failed += 1
                has_room = has_room and not _NO_MEMORY.search(str(error))
                is_useful = self._is_useful(old)
                if time.monotonic() - began > GIVE_UP_SECONDS and not is_useful:
                    raise ServerError(
                        f"No server has started for {GIVE_UP_SECONDS / 60:g} minutes: {error}",
                        "The log above has the reasons.",
                    ) from None
                pause = min(MOST_RESTART_PAUSE if is_useful else MOST_PAUSE, 0.5 * 2**num_failed)
                log.error("The next server did not start: %s Trying again in %g s.", error, pause)
                await self._rest(old, pause)
            else:
                break
        if self._looking is not None:
            self._looking.cancel()
        self._active.suspected = 0.0
        self._broken.clear()
        await self._take_over(upstream)
        log.info("All models answer again, after %.1f s.", time.monotonic() - began)
        self._retire(old)

    async def _pause(self, old: Upstream) -> None:
        """Wait before another server is started, if there were too many restarts in the last ten minutes."""
        now = time.monotonic()
        self._restarts.append((now, old))
        while now - self._restarts[0][0] > RESTARTS_SECONDS:
            self._restarts.popleft()
        # a server that got a resent request may have died of the same request as the one before it: not counted
        num = sum(not server.is_repeat for _, server in self._restarts)
        if (beyond := num - self._options.max_restarts) > 0:
            away = self._active.blocked if self._is_useful(old) else {*self._configs, ""}
            self._active.block([*away], "its server had to be replaced too often, and is started again after a pause")
            pause = min(MOST_RESTART_PAUSE, 2.0**beyond)
            log.error("The server was replaced %d times within ten minutes. The next one starts in %g s.", num, pause)
            await self._rest(old, pause)

    async def _rest(self, old: Upstream, seconds: float) -> None:
        """Wait before the next start, or until another fault. The models that are left are tested meanwhile."""
        self._active.next_start = time.monotonic() + seconds
        if self._is_useful(old):
            self._start_tests(old)
        self._broken.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._broken.wait(), seconds)
        self._cancel_tests()

    def _start_tests(self, upstream: Upstream) -> None:
        self._testing = [asyncio.create_task(self._test(upstream, each)) for each in self._canaries.values()]

    def _cancel_tests(self) -> None:
        for task in self._testing:
            task.cancel()
        self._testing = []
        for canary in self._canaries.values():
            canary.sent = 0.0

    def _has_room(self) -> bool:
        """Whether memory suffices for a second server beside the running one."""
        return self._monitor is None or self._monitor.resident_bytes < available_memory()

    def _is_useful(self, server: Upstream) -> bool:
        """Whether a server still has a model that clients may ask."""
        available = self._configs.keys() - self._active.blocked.keys()
        return server in self._servers and any(map(self._exposure.is_exposed, available))

    async def _give_way(self, old: Upstream) -> None:
        """Stop the old server before the next one starts.

        This is done if memory does not suffice for both, or if no model of the old one is available to clients and the
        next one failed to start beside it.
        """
        if old in self._servers:
            log.warning("The server is stopped before the next one starts.")
            self._active.refuse({*self._configs, ""}, "its server is started again")
            await self._end(old, min(DRAIN_SECONDS, self._options.grace))

    def _retire(self, old: Upstream) -> None:
        """Let the old server finish its requests to healthy models, then stop it."""
        task = asyncio.create_task(self._end(old, self._options.grace))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end(self, old: Upstream, seconds: float) -> None:
        """Stop a server, after at most ``seconds`` for its requests. Those that go on are sent to the next one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(old.wait_idle(), seconds)
        if old in self._servers:
            await self._servers.end(old, 0)  # a graceful stop would wait for its dead process

    # --- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until all requests in flight are answered, or the grace period is over."""
        await self._active.close("it is stopping")
        deadline = time.monotonic() + self._options.grace
        while self._traffic.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._current is not None:
            self._current.end_streams()
        if self._traffic.num_requests:
            log.error("%d requests were not answered within %g s.", self._traffic.num_requests, self._options.grace)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop all health checks and all servers; requests still running after ``seconds`` are lost."""
        await self._active.close("it is stopping")
        self._cancel_tests()
        for task in (*self._retiring, *([self._looking] if self._looking else [])):
            task.cancel()
        await self._servers.end_all(seconds)
