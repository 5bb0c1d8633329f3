"""Relay of one gRPC stream of requests and answers; it runs to its end even if the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]

from shoal.gateway.dispatcher import Dispatcher
from shoal.gateway.fronts import absent, clean, note, tell_failure
from shoal.gateway.grpc_messages import (
    StatusError,
    clean_answer,
    is_cut,
    kept,
    mark,
    parse,
    refusal,
    screen,
    unmark,
)
from shoal.gateway.limits import STREAM_SECONDS, Hold
from shoal.gateway.refusals import RefusedError, Why, lost
from shoal.gateway.stops import METHOD, Stops
from shoal.gateway.tokens import Meter
from shoal.gateway.upstream import Stream

_MOST_UNANSWERED = 64  # messages; further ones wait in the client (back-pressure)
_SILENT_SECONDS = 30.0  # after which an unanswered message is taken to have no answer


@dataclass
class _Message:
    """A client's message that was sent to Triton and has no last answer yet.

    ``is_marked``: its model is decoupled, so it was sent with our id and with the request to mark the last answer.
    """

    model: str
    num_bytes: int
    request_id: str
    meter: Meter | None = None
    is_marked: bool = False
    is_end_wanted: bool = False
    is_begun: bool = False  # it has had an answer
    sent: float = field(default_factory=time.monotonic)


class Relay:
    """Passes messages to Triton and answers to the client.

    Messages to decoupled models get ids of ours, and a mark on their last answer. Any other model gives one answer to
    each: it counts as that to the oldest unanswered message. The last answer releases the message's memory and its
    share of the model's capacity.
    """

    def __init__(
        self, dispatcher: Dispatcher, stops: Stops, channel: Callable[[Any], Any], address: str, context: Any
    ) -> None:
        self._dispatcher, self._stops, self._channel = dispatcher, stops, channel
        self._address, self._context = address, context
        self._unanswered: dict[str, _Message] = {}  # by our id, oldest first
        self._stopping: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._writing = asyncio.Lock()
        self._has_left = self._has_ended = False
        self._held: Hold
        self._stream: Stream
        self._server: Any = None
        self._call: Any = None
        self._feeding: asyncio.Task[None] | None = None
        context.add_done_callback(lambda _: self._leave())

    async def run(self, first: bytes) -> None:
        """Relay until Triton has answered all messages.

        Raises:
            RefusedError: the first message was refused, or the stream was lost.
            StatusError: Triton has ended it with an error.
        """
        model, first_id = await self._judge(first)
        with self._dispatcher.hold(self._address, model) as self._held:
            async with self._dispatcher.stream(model, self._address, self._end) as (self._server, self._stream):
                self._call = self._channel(self._server).stream_stream(METHOD)(
                    metadata=kept(self._context.invocation_metadata())
                )
                self._feeding = asyncio.create_task(self._feed(first))
                try:
                    code, details = await self._read()
                finally:
                    self._feeding.cancel()
                    for own_id in list(self._unanswered):
                        self._settle(own_id, is_done=False)
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
                passed_on = self._receive(answer)
                if passed_on is not None:
                    await self._write(passed_on)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
            return grpc.StatusCode.CANCELLED, ""
        return await self._call.code(), await self._call.details() or ""

    def _receive(self, answer: bytes) -> bytes | None:
        """Count an answer; return what the client gets of it."""
        self._dispatcher.answered = time.monotonic()
        if any(message.is_marked for message in self._unanswered.values()):
            parsed = parse("ModelStreamInferResponse", answer)
            own_id = str(parsed.infer_response.id)
            message = self._unanswered.get(own_id)
            if message is not None and message.is_marked:
                if message.meter is not None:
                    message.meter.read(parsed.infer_response)
                passed_on, is_last = unmark(parsed, message.request_id, is_end_wanted=message.is_end_wanted)
                if not message.is_begun:
                    message.is_begun = True
                    self._dispatcher.note_first(message.model, time.monotonic() - message.sent)
                self._stream.note_answer(is_last=is_last)
                if is_last:
                    self._settle(own_id, is_done=True)
                return passed_on
        self._stream.note_answer(is_last=True)
        if oldest := self._find_oldest():
            self._settle(oldest, is_done=True)
        return clean_answer(answer)

    async def _write(self, answer: bytes) -> None:
        """Write an answer to the client, unless it has disconnected or read nothing for too long."""
        if self._has_left:
            return
        try:
            async with self._writing, asyncio.timeout(self._dispatcher.limits.unread_seconds):
                await self._context.write(answer)
        except Exception:  # TimeoutError, or gRPC's unexported error for disconnected clients
            self._leave()

    def _leave(self) -> None:
        """Tell the engines of what is under way that the client has left; its answers are read and discarded."""
        if self._has_left:
            return
        self._has_left = True
        for own_id in self._unanswered:
            self._stop(own_id)

    def _stop(self, own_id: str) -> None:
        message = self._unanswered[own_id]
        if not message.is_marked:
            return
        work = self._stops.leave(self._server, message.model, own_id, lambda: own_id not in self._unanswered)
        task = asyncio.ensure_future(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

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
        size = len(message)
        try:
            model, request_id = await self._judge(message)
            self._dispatcher.find(model)
            most = self._dispatcher.limits.request_bytes
            await self._wait(lambda: not self._unanswered or self._held.num_bytes + size <= most)
            self._dispatcher.grow(self._held, size)
            try:
                self._dispatcher.enter(model, size)
            except RefusedError:
                self._held.grow(-size)
                raise
        except RefusedError as refused:
            note(self._dispatcher, refused)
            await self._write(refusal(refused, request_id))
            return
        own_id, given = self._stops.next_id(), _Message(model, size, request_id)
        if self._stops.is_decoupled(model):
            message, given.is_end_wanted = mark(message, own_id)
            given.is_marked, given.meter = True, self._dispatcher.tokens.meter(model)
        self._unanswered[own_id] = given
        self._stream.note_request()
        if self._has_left:
            self._stop(own_id)
        await self._call.write(message)

    async def _judge(self, message: bytes) -> tuple[str, str]:
        model, request_id = await screen(message)
        if not self._dispatcher.is_exposed(model):
            raise absent(model, self._dispatcher)
        return model, request_id

    async def _next(self) -> bytes | None:
        reading = asyncio.ensure_future(self._context.read())
        try:
            while not (await asyncio.wait({reading}, timeout=STREAM_SECONDS))[0]:
                if self._stream.is_answered and time.monotonic() - self._stream.moved >= STREAM_SECONDS:
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), _SILENT_SECONDS)
                continue
            if oldest := self._find_oldest():
                self._settle(oldest, is_done=False)

    def _find_oldest(self) -> str:
        """Return our id of the oldest message to a model that is not decoupled; empty if there is none."""
        return next((own_id for own_id, message in self._unanswered.items() if not message.is_marked), "")

    def _settle(self, own_id: str, *, is_done: bool) -> None:
        message = self._unanswered.pop(own_id)
        self._dispatcher.leave(message.model, message.num_bytes, is_done=is_done)
        self._held.grow(-message.num_bytes)
        self._moved.set()
