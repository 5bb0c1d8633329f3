"""Relay of a gRPC stream between a client and Triton. It runs to the stream's end even if the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from shoal.gateway.core.dispatcher import Dispatcher
from shoal.gateway.core.refusals import RefusedError, Why, clean, is_cut, kept, log_failure
from shoal.gateway.core.stream_requests import METHOD, Streamed, Streaming
from shoal.gateway.core.upstream import Stream, Upstream
from shoal.gateway.options import STREAM_SECONDS, Hold
from shoal.gateway.v2.screening import Rules, parse, screen_grpc

_MOST_UNANSWERED = 64  # messages; further ones wait in the client (back-pressure)


class StatusError(Exception):
    """An error status from Triton, which is passed to the client."""

    def __init__(self, code: Any, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Relay:
    """Passes a client's messages to Triton, and the answers to the client.

    After the last answer to a message, the memory for the message is released, and the message no longer counts as in
    flight.
    """

    def __init__(
        self, dispatcher: Dispatcher, rules: Mapping[str, Rules], streaming: Streaming, address: str, context: Any
    ) -> None:
        self._dispatcher, self._rules, self._streaming = dispatcher, rules, streaming
        self._address, self._context = address, context
        self._unanswered: dict[str, Streamed] = {}  # by the id that the service gave, oldest first
        self._stopping: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._writing = asyncio.Lock()
        self._has_left = self._has_ended = self._is_unread = False
        self._patience: asyncio.Timeout | None = None  # of the write that goes on
        self._held: Hold
        self._stream: Stream
        self._upstream: Upstream
        self._call: Any = None
        self._feeding: asyncio.Task[None] | None = None
        context.add_done_callback(lambda _: self._leave())

    async def run(self, first: list[bytes | None]) -> None:
        """Relay the messages until Triton has answered all of them. The first is taken out of the list ``first``.

        Raises:
            RefusedError: the server is unavailable, the stream was lost because its server or model died, it was ended
                while nothing was in flight, or the client did not read it.
            StatusError: Triton has ended the stream with an error.
        """
        with (
            self._dispatcher.hold(self._address) as self._held,
            self._dispatcher.stream("", self._address) as (self._upstream, self._stream),
        ):
            self._stream.end, self._stream.leave = self._end, self._give_up
            self._call = self._upstream.channel.stream_stream(METHOD)(
                metadata=kept(self._context.invocation_metadata())
            )
            self._feeding = asyncio.create_task(self._feed(first))
            try:
                code, details = await self._read()
            finally:
                oldest = next(iter(self._unanswered.values()), None)
                self._feeding.cancel()
                for own_id in list(self._unanswered):
                    self._settle(own_id, is_done=False)
        if code == grpc.StatusCode.CANCELLED or (code != grpc.StatusCode.OK and is_cut(code, details)):
            self._dispatcher.suspected.set()
            refused = self._dispatcher.lost(oldest.model if oldest else "this stream")
            log_failure(oldest.model if oldest else "", oldest.request_id if oldest else "", refused.message)
            raise refused
        if code != grpc.StatusCode.OK:
            raise StatusError(code, clean(details))
        if self._is_unread:
            raise RefusedError(Why.SLOW, "The answers were not read in time, so the stream was ended.")
        if self._has_ended:
            raise RefusedError(Why.UNAVAILABLE, "The stream had nothing in flight and was ended.", 1.0)

    def _end(self) -> None:
        """End the stream: send Triton no more messages or, if an answer is missing, cancel the call to Triton."""
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
        """Count an answer from Triton, and return it as the client should get it.

        Return None for an end mark that the service asked for and the client did not.
        """
        self._dispatcher.answered = time.monotonic()
        message = parse("ModelStreamInferResponse", answer)
        streamed = self._unanswered.get(message.infer_response.id)
        if streamed is None:
            message.error_message = clean(message.error_message)
            return bytes(message.SerializeToString())
        is_last = self._streaming.count(streamed, message, self._stream)
        if is_last:
            self._settle(streamed.own_id, is_done=True)
        return _unmark(message, streamed, is_last=is_last)

    async def _write(self, answer: bytes) -> None:
        """Write an answer to the client, unless the client has disconnected or reads nothing for too long."""
        if self._has_left:
            return
        try:
            async with self._writing, asyncio.timeout(self._dispatcher.limits.unread_seconds) as self._patience:
                with self._stream.write(len(answer)):
                    await self._context.write(answer)
        except TimeoutError:
            self._give_up()
        except Exception:  # gRPC's unexported error for disconnected clients
            self._leave()

    def _give_up(self) -> None:
        """Treat the client as disconnected, because it reads too slowly."""
        self._is_unread = True
        self._leave()
        if self._feeding is not None and self._feeding is not asyncio.current_task():
            self._feeding.cancel()  # or the error would wait for the client's next message
        if self._stream.due and self._patience is not None:
            self._patience.reschedule(0.0)

    def _leave(self) -> None:
        """Note that the client has disconnected, and ask the models to stop its requests.

        Further answers are read and discarded.
        """
        if self._has_left:
            return
        self._has_left = True
        for own_id in self._unanswered:
            self._stop(own_id)

    def _stop(self, own_id: str) -> None:
        work = self._streaming.stop(self._upstream, self._unanswered[own_id], lambda: own_id not in self._unanswered)
        task = asyncio.ensure_future(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    # --- the client's messages -----------------------------------------------------------------------------------

    async def _feed(self, first: list[bytes | None]) -> None:
        message = first.pop()
        try:
            while message is not None and not self._has_left:
                await self._pass(message)
                message = None  # no message is kept while the stream is idle
                await self._wait(lambda: len(self._unanswered) < _MOST_UNANSWERED)
                message = await self._next()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # Triton ended the call; _read handles that
            return
        finally:
            if not self._call.done():
                await self._call.done_writing()

    async def _pass(self, message: bytes) -> None:
        request_id, size, num_held = "", len(message), 0
        try:
            most = self._dispatcher.limits.request_bytes
            await self._wait(lambda: not self._unanswered or self._held.num_bytes + size <= most)
            self._dispatcher.grow(self._held, size)
            num_held = size
            model, request_id, is_end_wanted = await screen_grpc(message, self._rules)
            self._dispatcher.check_exposed(model)
            self._dispatcher.find(model)
            self._dispatcher.enter(model, size, self._address)
        except RefusedError as refused:
            self._held.grow(-num_held)
            self._dispatcher.note_refusal(refused)
            await self._write(_make_refusal(refused, request_id or refused.request_id))
            return
        streamed = self._streaming.begin(model, request_id, num_bytes=size, is_end_wanted=is_end_wanted)
        self._unanswered[streamed.own_id] = streamed
        self._stream.models.add(model)
        self._stream.note_request()
        if self._has_left:
            self._stop(streamed.own_id)
        await self._call.write(streamed.mark(message))

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
        """Wait until ``is_so`` returns true; it is called again whenever a request has its last answer."""
        while not is_so():
            self._moved.clear()
            await self._moved.wait()

    def _settle(self, own_id: str, *, is_done: bool) -> None:
        streamed = self._unanswered.pop(own_id)
        self._dispatcher.leave(streamed.model, streamed.num_bytes, self._address, is_done=is_done)
        self._held.grow(-streamed.num_bytes)
        self._moved.set()


def _unmark(message: Any, streamed: Streamed, *, is_last: bool) -> bytes | None:
    """Put the client's request id back into an answer, and return the answer serialised.

    Return None if the answer is empty and only marks the end of a request, and the client did not ask for that mark.
    """
    answer = message.infer_response
    is_empty = not answer.outputs and not message.error_message
    if streamed.is_decoupled and is_last and is_empty and not streamed.is_end_wanted:
        return None
    message.error_message = clean(streamed.restore_id(message.error_message))
    answer.id = streamed.request_id
    return bytes(message.SerializeToString())


def _make_refusal(refused: RefusedError, request_id: str) -> bytes:
    """Build the answer that refuses one message of a stream."""
    message = service_pb2.ModelStreamInferResponse(error_message=refused.words)
    message.infer_response.id = request_id
    return bytes(message.SerializeToString())
