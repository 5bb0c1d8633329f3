"""A stream that had an error is read to its status: cancelled before, it may end Triton 24.10."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.failures import CallError
from shoal.clients.client.grpc_transport import AsyncGrpc, Grpc

SECONDS = {"late": 0.3, "endless": 60.0}  # until the status
CALL = Call(Method.STREAM, "late", {})


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Sends an error, and its status later; or not, as a model that goes on."""

    def __init__(self, wait: float) -> None:
        self.wait = wait
        self.was_cancelled: bool | None = None

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        next(requests)
        yield service_pb2.ModelStreamInferResponse(error_message="it is late")
        end = time.monotonic() + self.wait
        while context.is_active() and time.monotonic() < end:
            time.sleep(0.01)
        self.was_cancelled = not context.is_active()


@pytest.fixture(params=SECONDS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str]]:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), Server(SECONDS[request.param])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


def ask(url: str) -> None:
    transport = Grpc(url)
    try:
        transport.stream(CALL).read(30)
    finally:
        transport.close()


def ask_async(url: str) -> None:
    async def run() -> None:
        transport = AsyncGrpc(url)
        try:
            await transport.stream(CALL).read(30)
        finally:
            await transport.close()

    asyncio.run(run())


@pytest.mark.parametrize("ask", [ask, ask_async])
def test_an_error_ends_a_stream_at_its_status(ask: Any, served: tuple[Server, str]) -> None:
    server, url = served
    start = time.monotonic()
    with pytest.raises(CallError, match="it is late"):
        ask(url)
    assert time.monotonic() - start < 20
    while server.was_cancelled is None:
        time.sleep(0.01)
    assert server.was_cancelled == (server.wait > 1)
