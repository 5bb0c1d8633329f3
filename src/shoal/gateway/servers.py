"""Servers of a service: usually one, and a second one during a replacement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.client.grpc_transport import channel_options
from shoal.errors import ServerError, ShoalError
from shoal.gateway.canary import Canary, Verdict, WrongError
from shoal.gateway.logs import Tail, log
from shoal.server.launch import Server
from shoal.server.runtime import Runtime


class Servers:
    """Starts and stops servers, and forwards their logs. ``forget`` closes the fronts' connections to one."""

    def __init__(
        self,
        repository: Path,
        runtime: Runtime,
        load_seconds: float,
        canaries: dict[str, Canary],
        forget: Callable[[Server], Any],
    ) -> None:
        self._repository, self._runtime, self._load_seconds = repository, runtime, load_seconds
        self._canaries, self._forget = canaries, forget
        self._servers: set[Server] = set()
        self._tails: dict[Server, tuple[Tail, asyncio.Task[None]]] = {}

    def __contains__(self, server: Server) -> bool:
        return server in self._servers

    async def launch(self) -> Server:
        """Start a server, and return it once its models answer their canaries."""
        launching = asyncio.create_task(asyncio.to_thread(Server, self._repository, self._runtime))
        try:
            server = await asyncio.shield(launching)
        except asyncio.CancelledError:  # the thread cannot be cancelled: stop what it starts
            with contextlib.suppress(ShoalError, OSError):
                await self.end(await launching, 0)
            raise
        self._servers.add(server)
        try:
            tail = Tail(server.log)
            self._tails[server] = tail, asyncio.create_task(tail.follow())
            await asyncio.to_thread(server.wait_ready, self._load_seconds)
            await self._prove(server)
        except BaseException:
            await self.end(server, 0)
            raise
        return server

    async def _prove(self, server: Server) -> None:
        for name, canary in list(self._canaries.items()):
            is_first = not canary.expected
            try:
                async with open_stub(server) as stub:
                    await canary.ask(stub)
                    if is_first:  # whether the answer is reproducible
                        await canary.ask(stub)
            except WrongError as error:
                if not is_first or error.verdict in (Verdict.GONE, Verdict.LATE):
                    raise ServerError(f"{name} does not answer as it should: {error}.") from None
                log.warning("%s gets no canary requests: %s", name, error, extra={"model": name})
                del self._canaries[name]

    async def end(self, server: Server, seconds: float) -> None:
        """Stop a server; requests still running after ``seconds`` are lost."""
        await self._forget(server)
        if server in self._tails:
            tail, following = self._tails.pop(server)
            following.cancel()
            tail.read()
        await asyncio.to_thread(server.stop, seconds)
        self._servers.discard(server)

    async def end_all(self, seconds: float) -> None:
        """Stop all servers."""
        await asyncio.gather(*(self.end(server, seconds) for server in list(self._servers)))


@contextlib.asynccontextmanager
async def open_stub(server: Server) -> Any:
    """Open a gRPC stub of Triton's service, for the supervisor's own requests."""
    import grpc  # type: ignore[import-untyped]
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    async with grpc.aio.insecure_channel(server.grpc_url, options=channel_options(server.grpc_url)) as channel:
        yield GRPCInferenceServiceStub(channel)
