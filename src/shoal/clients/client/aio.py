"""Asynchronous client with the interface of ``shoal.Client``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from weakref import WeakSet

from shoal.clients.client.calls import Answer, Call, Parameter, ServedModel
from shoal.clients.client.failures import CallError, explain
from shoal.clients.client.flow import Attempts, BaseClient, Flow, InferRequest, check_timeout, closed_client
from shoal.clients.client.grpc_transport import AsyncGrpc
from shoal.clients.client.http_transport import AsyncHttp
from shoal.clients.client.streams import AsyncReplies, Course
from shoal.errors import InputError, ShoalError
from shoal.kit.component.spec import ModelSpec

T = TypeVar("T")


class AsyncClient(BaseClient):
    """Client of one server, bound to one event loop::

        async with shoal.AsyncClient("127.0.0.1:8001") as client:
            answer = await client.infer("my_ensemble", TEXT=["A text."], WEIGHT=[0.7])

    The options and errors are the same as those of ``shoal.Client``.
    """

    def _open(self) -> None:
        self._senders = asyncio.Semaphore(self._options.concurrency)
        self._transport: AsyncGrpc | AsyncHttp | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: WeakSet[AsyncReplies] = WeakSet()

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
        version: int | None = None,
        **named: Any,
    ) -> Answer:
        """Send one request, as ``Client.infer`` does.

        Raises:
            InputError: an input or a requested output does not fit the model's declaration, or the model refused the
                request.
            ServerError: the server cannot be reached, answers too late, or fails.
        """
        request = InferRequest(model, inputs, named, outputs, request_id, timeout, parameters, version)
        return await self._run_flow(self._flows.infer(request))

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        between: float | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        version: int | None = None,
        **named: Any,
    ) -> AsyncReplies:
        """Send one request to a decoupled model, which streams its answers, as ``Client.stream`` does::

            async for answer in client.stream("my_model", TEXT=["A text."]):
                print(answer["WORD"])

        The request is checked and sent when the first answer is asked for. If a loop is left early, the request ends
        soon after; if an ``async with`` block is left early, the request ends at once.

        Raises:
            InputError: an input or a requested output does not fit the model's declaration, or the model refused the
                request.
            ServerError: the server cannot be reached, answers too late, or fails, possibly after some answers.
        """
        flow = self._flows.stream(InferRequest(model, inputs, named, outputs, request_id, timeout, parameters, version))
        limit = None if between is None else check_timeout(between, "between")

        async def open_course() -> Course:
            return Course(await self._run_flow(flow), self._options, limit, self._flows.note_refusal)

        replies = AsyncReplies(open_course, lambda call: self._connected().stream(call))
        self._streams.add(replies)
        return replies

    async def is_ready(self, model: str) -> bool:
        """Whether the server has ``model`` loaded."""
        return await self._run_flow(self._flows.is_ready(model))

    async def models(self) -> list[ServedModel]:
        """Return the models of the server; see ``Client.models``."""
        return await self._run_flow(self._flows.list_models())

    async def default_model(self) -> str:
        """Return the name of the server's default model.

        A server started by ``shoal serve`` names its default model. On any other server, the default is the only
        ensemble that no other ensemble calls, or the only model if there is no ensemble.

        Raises:
            InputError: several models could be the default, or the server does not list its models.
        """
        return await self._run_flow(self._flows.find_default())

    async def describe(self, model: str) -> ModelSpec:
        """Return the declaration of ``model``, as ``Client.describe`` does."""
        return await self._run_flow(self._flows.describe(model))

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

    def _connected(self) -> AsyncGrpc | AsyncHttp:
        """Return the transport; the first call creates it and binds it to the running event loop."""
        if self._is_closed:
            raise closed_client()
        loop = asyncio.get_running_loop()
        if self._transport is None:
            make = AsyncGrpc if self.protocol == "grpc" else AsyncHttp
            self._transport, self._loop = self._connect(make), loop
        if self._loop is not loop:
            raise InputError("This client belongs to another event loop.", "Make a client in each loop.")
        return self._transport

    async def _send_all(self, calls: Sequence[Call], transport: AsyncGrpc | AsyncHttp) -> list[Any]:
        if len(calls) == 1:
            return [await self._send(calls[0], transport)]
        tasks = [asyncio.create_task(self._send_part(call, transport)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_part(self, call: Call, transport: AsyncGrpc | AsyncHttp) -> Any:
        async with self._senders:
            return await self._send(call, transport)

    async def _send(self, call: Call, transport: AsyncGrpc | AsyncHttp) -> Any:
        attempts = Attempts(call, self._options)
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
        for replies in list(self._streams):
            replies._stop(closed_client())
            await replies.close()
        if self._transport is not None:
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
