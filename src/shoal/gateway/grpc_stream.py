"""Relay of one gRPC stream of requests and answers; it runs to its end even if the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]

from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.fronts import absent, clean, note, tell_failure
from shoal.gateway.grpc_messages import (
    StatusError,
    clean_answer,
    is_cut,
    kept,
    refusal,
    screen,
)
from shoal.gateway.limits import Hold
from shoal.gateway.refusals import RefusedError, Why, lost
from shoal.gateway.upstream import Stream

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_MOST_UNANSWERED = 64  # messages; further ones wait in the client (back-pressure)
_SILENT_SECONDS = 30.0  # after which an unanswered message is taken to have no answer


class Relay:
    """Passes messages to Triton and answers to the client.

    Only the model knows how many answers a message has: each answer counts as that to the oldest unanswered message,
    which then releases its memory and its share of the model's capacity.
    """

    def __init__(self, dispatcher: Dispatcher, channel: Callable[[Any], Any], address: str, context: Any) -> None:
        self._dispatcher, self._channel, self._address, self._context = dispatcher, channel, address, context
        self._unanswered: deque[tuple[str, int]] = deque()  # models, and bytes
        self._moved = asyncio.Event()
        self._writing = asyncio.Lock()
        self._has_left = self._has_ended = False
        self._held: Hold
        self._stream: Stream
        self._call: Any = None
        self._feeding: asyncio.Task[None] | None = None

    async def run(self, first: bytes) -> None:
        """Relay until Triton has answered all messages.

        Raises:
            RefusedError: the first message was refused, or the stream was lost.
            StatusError: Triton has ended it with an error.
        """
        model, first_id = await self._judge(first)
        with self._dispatcher.hold(self._address, model) as self._held:
            async with self._dispatcher.stream(model, self._address, self._end) as (server, self._stream):
                self._call = self._channel(server).stream_stream(_METHOD)(
                    metadata=kept(self._context.invocation_metadata())
                )
                self._feeding = asyncio.create_task(self._feed(first))
                try:
                    code, details = await self._read()
                finally:
                    self._feeding.cancel()
                    while self._unanswered:
                        self._settle(is_done=False)
        if code == grpc.StatusCode.CANCELLED or (code != grpc.StatusCode.OK and is_cut(code, details)):
            self._dispatcher.suspected.set()
            tell_failure(model, first_id, lost(model).message)
            raise lost(model)
        if code != grpc.StatusCode.OK:
            raise StatusError(code, clean(details))
        if self._has_ended:
            raise RefusedError(Why.UNAVAILABLE, "The stream had nothing in flight and was ended.", 1.0)

    def _end(self) -> None:
        """End the stream from the server's side; gracefully if everything is answered."""
        self._has_ended = True
        if not self._stream.is_answered:
            self._call.cancel()
        elif self._feeding is not None:
            self._feeding.cancel()

    async def _read(self) -> tuple[Any, str]:
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                self._stream.note(is_answer=True)
                if self._unanswered:
                    self._settle(is_done=True)
                await self._write(clean_answer(answer))
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
            return grpc.StatusCode.CANCELLED, ""
        return await self._call.code(), await self._call.details() or ""

    async def _write(self, answer: bytes) -> None:
        """Write an answer to the client, unless it has disconnected or read nothing for too long."""
        if self._has_left or self._context.done():
            self._has_left = True
            return
        try:
            async with self._writing, asyncio.timeout(self._dispatcher.limits.unread_seconds):
                await self._context.write(answer)
        except Exception:  # TimeoutError, or gRPC's unexported error for disconnected clients
            self._has_left = True

    # --- the client's messages -----------------------------------------------------------------------------------

    async def _feed(self, first: bytes) -> None:
        message: bytes | None = first
        try:
            while message is not None and not self._has_left:
                await self._pass(message)
                await self._wait(lambda: len(self._unanswered) < _MOST_UNANSWERED)
                message = await self._next()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # Triton ended it; the reader handles that
            return
        finally:
            if not self._call.done():
                await self._call.done_writing()

    async def _pass(self, message: bytes) -> None:
        request_id = ""
        try:
            model, request_id = await self._judge(message)
            self._dispatcher.find(model)
            most = self._dispatcher.limits.request_bytes
            await self._wait(lambda: not self._unanswered or self._held.num_bytes + len(message) <= most)
            self._dispatcher.grow(self._held, len(message))
            try:
                self._dispatcher.enter(model, len(message))
            except RefusedError:
                self._held.grow(-len(message))
                raise
        except RefusedError as refused:
            note(self._dispatcher, refused)
            await self._write(refusal(refused, request_id))
            return
        self._unanswered.append((model, len(message)))
        self._stream.note(is_answer=False)
        await self._call.write(message)

    async def _judge(self, message: bytes) -> tuple[str, str]:
        model, request_id = await screen(message)
        if not self._dispatcher.is_exposed(model):
            raise absent(model, self._dispatcher)
        return model, request_id

    async def _next(self) -> bytes | None:
        reading = asyncio.ensure_future(self._context.read())
        seconds = self._dispatcher.limits.stream_seconds
        try:
            while not (await asyncio.wait({reading}, timeout=seconds))[0]:
                if self._stream.is_answered and time.monotonic() - self._stream.moved >= seconds:
                    self._has_ended = True
                    return None
            return None if reading.result() is grpc.aio.EOF else reading.result()
        except Exception:  # the client has disconnected, for which gRPC has no public error
            return None
        finally:
            reading.cancel()

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until answers make ``is_so`` true; a message that gets no answer is settled after a time-out."""
        while not is_so():
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), _SILENT_SECONDS)
            except TimeoutError:
                self._settle(is_done=False)

    def _settle(self, *, is_done: bool) -> None:
        model, num_bytes = self._unanswered.popleft()
        self._dispatcher.leave(model, num_bytes, is_done=is_done)
        self._held.grow(-num_bytes)
        self._moved.set()
