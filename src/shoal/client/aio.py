"""Asynchronous client with the interface of ``shoal.Client``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from shoal.client.calls import Answer, Call, Parameter
from shoal.client.channels import ChannelPool
from shoal.client.failures import CallError, Kind, connection_failure, explain
from shoal.client.flow import Flow, Flows
from shoal.client.retries import Attempts
from shoal.client.settings import Settings, merge
from shoal.client.wire import HEADER_LENGTH, HttpReply, from_grpc, from_http, to_grpc, to_http
from shoal.component.spec import TensorSpec
from shoal.errors import InputError, ShoalError

T = TypeVar("T")


class AsyncClient:
    """Client of one server, bound to one event loop::

        async with shoal.AsyncClient("127.0.0.1:8001") as client:
            answer = await client.infer("my_ensemble", TEXT=["A text."], WEIGHT=[0.7])

    Options and errors are those of ``shoal.Client``.
    """

    def __init__(
        self,
        url: str = "127.0.0.1:8001",
        *,
        protocol: str = "grpc",
        timeout: float = 60.0,
        concurrency: int = 4,
        retries: int = 3,
        is_repeatable: bool = False,
    ) -> None:
        self._settings = Settings.checked(url, protocol, timeout, concurrency, retries, is_repeatable)
        self.url, self.protocol, self.timeout = self._settings.url, protocol, timeout
        self._flows = Flows()
        self._senders = asyncio.Semaphore(concurrency)
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        **named: Any,
    ) -> Answer:
        """Send one request, as ``Client.infer`` does.

        Raises:
            InputError: an input or output is not what the model declares, or the model refused it.
            ServerError: no server answers, or not in time, or it failed.
        """
        options: dict[str, Any] = {"request_id": request_id, "timeout": timeout, "parameters": parameters}
        return await self._run_flow(self._flows.infer(model, merge(inputs, named), outputs=outputs, **options))

    async def is_ready(self, model: str) -> bool:
        """Whether the server has ``model`` loaded."""
        return await self._run_flow(self._flows.is_ready(model))

    async def default_model(self) -> str:
        """Return the name of the server's default model.

        A shoal service names it. On any other server it is the only ensemble that no other ensemble calls, else the
        only model.

        Raises:
            InputError: there are several, or the server does not list them.
        """
        return await self._run_flow(self._flows.find_default())

    async def inputs(self, model: str) -> tuple[TensorSpec, ...]:
        """Return the inputs of ``model`` as the server describes them.

        A server that restricts access to configurations does not say which are optional: all are reported as such.
        """
        return (await self._run_flow(self._flows.describe(model))).inputs

    async def outputs(self, model: str) -> tuple[TensorSpec, ...]:
        """Return the outputs of ``model``."""
        return (await self._run_flow(self._flows.describe(model))).outputs

    async def max_batch_size(self, model: str) -> int:
        """Return the most rows that one request to ``model`` may have; 0 if its requests have no batch dimension.

        Raises:
            ServerError: the server restricts access to configurations, or does not answer.
        """
        return await self._run_flow(self._flows.max_batch_size(model))

    async def _run_flow(self, flow: Flow[T]) -> T:
        """Drive a request flow to completion."""
        transport = self._connected()
        try:
            calls = next(flow)
            while True:
                try:
                    results = await self._send_all(calls, transport)
                except ShoalError as error:
                    calls = flow.throw(error)
                else:
                    calls = flow.send(results)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _connected(self) -> Transport:
        """Return the transport; created on first use, and bound to that event loop."""
        if self._is_closed:
            raise InputError("This client is closed.", "Make another.")
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._transport, self._loop = (_Grpc if self.protocol == "grpc" else _Http)(self.url), loop
        if self._loop is not loop:
            raise InputError("This client belongs to another event loop.", "Make one in each loop.")
        return self._transport

    async def _send_all(self, calls: Sequence[Call], transport: Transport) -> list[Any]:
        if len(calls) == 1:
            return [await self._send(calls[0], transport)]
        tasks = [asyncio.create_task(self._send_part(call, transport)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_part(self, call: Call, transport: Transport) -> Any:
        async with self._senders:
            return await self._send(call, transport)

    async def _send(self, call: Call, transport: Transport) -> Any:
        attempts = Attempts(call, self._settings)
        while True:
            try:
                return await transport.send(call, attempts.left)
            except CallError as failure:
                pause = attempts.pause(failure)
                if pause is None:
                    raise explain(failure, call, attempts.server) from None
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close every connection."""
        self._is_closed = True
        if self._transport is not None:
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Transport(Protocol):
    """Sends one call and returns its result."""

    async def send(self, call: Call, seconds: float) -> Any:
        """Return the result within ``seconds``, or raise ``CallError``."""

    async def close(self) -> None:
        """Close every connection."""


class _Grpc:
    def __init__(self, url: str) -> None:
        import grpc  # type: ignore[import-untyped]

        self._channels = ChannelPool(url, grpc.aio.insecure_channel)

    async def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            await channel.close()
        with self._channels.channel() as channel:
            reply = await getattr(channel.stub, request.procedure)(request.message, timeout=seconds)
        return from_grpc(call, reply)

    async def close(self) -> None:
        for channel in self._channels.close():
            await channel.close()


class _Http:
    """HTTP over aiohttp, which uses no proxy unless configured to, and repeats no POST."""

    def __init__(self, url: str) -> None:
        import aiohttp

        self._url = f"http://{url}"
        self._aiohttp = aiohttp
        headers = {"Accept-Encoding": "identity"}  # compression by Triton costs more than it saves
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)

    async def send(self, call: Call, seconds: float) -> Any:
        return from_http(call, await self._exchange(call, seconds))

    async def _exchange(self, call: Call, seconds: float) -> HttpReply:
        from yarl import URL

        verb, path, headers, body = to_http(call)
        options: dict[str, Any] = {"timeout": self._aiohttp.ClientTimeout(total=seconds), "allow_redirects": False}
        try:
            url = URL(self._url + path, encoded=True)
            async with self._session.request(verb, url, data=body or None, headers=headers, **options) as answer:
                return HttpReply(answer.status, answer.headers.get(HEADER_LENGTH), await answer.read())
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while waiting") from None
        except self._aiohttp.ClientConnectorError as error:
            raise connection_failure(error.os_error) from None
        except (self._aiohttp.ClientConnectionError, self._aiohttp.ClientPayloadError):
            raise CallError(Kind.CONNECTION_LOST, "connection closed") from None
        except self._aiohttp.ClientError as error:
            raise CallError(Kind.NOT_TRITON, f"unreadable answer: {str(error)[:40]!r}") from None

    async def close(self) -> None:
        await self._session.close()
