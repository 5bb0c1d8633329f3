"""gRPC streams of clients: messages that arrive are checked and sent to Triton, answers are written to the client."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from shoal.clients.client.calls import IS_FINAL
from shoal.serving.gateway.callers.access_log import current_entry
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.relay import Relay, RelayedAnswer
from shoal.serving.gateway.core.triton_errors import forwarded_metadata
from shoal.serving.gateway.options import STREAM_SECONDS
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from shoal.serving.gateway.v2.rules import Rules
from shoal.serving.gateway.v2.screening import screen_grpc

_MOST_UNANSWERED = 64  # messages; further ones wait in the client (back-pressure)


def _leave(found: weakref.ref[Relay], _: Any) -> None:
    """Note that the client of a stream has disconnected. What the stream keeps keeps this callback, too: so, weakly."""
    if (relay := found()) is not None:
        relay.leave()


class GrpcStream:
    """Passes the messages of a client's gRPC stream to Triton, and the answers to the client.

    It runs to the end of the stream even if the client disconnects.
    """

    def __init__(self, gate: Gate, rules: Mapping[str, Rules], caller: Caller, context: Any) -> None:
        self._gate, self._rules, self._caller, self._context = gate, rules, caller, context
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[Any] | None = None  # the task that writes
        self._entry = current_entry()  # of the stream; each message has one of its own
        self._relay: Relay
        self._feeding: asyncio.Task[None]

    async def run(self, first: list[bytes | None]) -> None:
        """Relay the messages until Triton has answered all of them. The first is taken out of the list ``first``.

        Raises:
            RefusedError: the server is unavailable, the stream was lost because its server or model died, it was ended
                while nothing was in flight, or the client did not read it.
            FailedError: Triton has ended the stream with an error.
        """
        metadata = forwarded_metadata(self._context.invocation_metadata())
        with self._gate.open_stream(self._caller, metadata=metadata) as self._relay:
            self._feeding = asyncio.create_task(self._feed(first))
            self._relay.stop_sending, self._relay.drop = self._feeding.cancel, self._drop
            self._relay.deliver = self._deliver
            self._relay.patience = self._gate.limits.unread_seconds
            self._context.add_done_callback(partial(_leave, weakref.ref(self._relay)))
            try:
                async for answer in self._relay:
                    await self._deliver(answer)
            finally:
                for request in (*self._relay.unanswered.values(), *self._relay.dropped):
                    request.entry.end("UNAVAILABLE", is_answered=False)
                self._feeding.cancel()
        if self._relay.is_unread:
            raise RefusedError(RefusalReason.SLOW, "The answers were not read in time, so the stream was ended.")
        if self._relay.has_ended:
            raise RefusedError(RefusalReason.UNAVAILABLE, "The stream had nothing in flight and was ended.", 1.0)

    async def _deliver(self, answer: RelayedAnswer) -> None:
        if (content := _serialize(answer)) is not None:
            await self._write(content)
        _note(answer, len(content or b""))

    async def _write(self, answer: bytes) -> None:
        """Write an answer to the client, unless the client has disconnected or reads too slowly."""
        try:
            async with self._writing:
                self._writer = asyncio.current_task()
                if self._relay.has_left:
                    return
                with self._relay.write():
                    await self._context.write(answer)
        except asyncio.CancelledError:  # by ``_drop``, or from outside
            task = asyncio.current_task()
            if not self._relay.is_unread or task is None or task is not self._writer or task.uncancel():
                raise
        except Exception:  # gRPC's unexported error for disconnected clients
            self._relay.leave()

    def _drop(self) -> None:
        """Stop reading from, and writing to, a client that reads too slowly."""
        if self._feeding is not asyncio.current_task():
            self._feeding.cancel()  # or the error would wait for the client's next message
        if self._relay.began and self._writer is not None:
            self._writer.cancel()

    # --- the client's messages -----------------------------------------------------------------------------------

    async def _feed(self, first: list[bytes | None]) -> None:
        message = first.pop()
        try:
            while message is not None and not self._relay.has_left:
                await self._pass(message)
                message = None  # no message is kept while the stream is idle
                await self._wait(lambda: len(self._relay.unanswered) < _MOST_UNANSWERED)
                message = await self._next()
        except Exception as error:  # a fault of the service's own ends the stream, as no message may be lost in silence
            self._relay.fail(error)
        finally:
            await self._relay.finish()

    async def _pass(self, message: bytes) -> None:
        relay, size, request_id = self._relay, len(message), ""
        entry = self._entry.begin_message(size)
        most = self._gate.limits.request_bytes
        try:
            await self._wait(lambda: not relay.unanswered or relay.num_bytes + size <= most)
            if relay.has_left:
                entry.end("CANCELLED", is_answered=False)
                return
            held = self._gate.reserve_memory(self._caller)
            try:
                self._gate.traffic.grow(held, size)
                model, version, request_id, is_end_wanted = await screen_grpc(message, self._rules)
                self._gate.exposure.check_exposed(model, self._caller)
                is_sent = await relay.send(
                    model, request_id, message, version=version, num_bytes=size, is_end_wanted=is_end_wanted, held=held
                )
            except BaseException:
                held.release()
                raise
            if not is_sent:
                held.release()
                entry.end("OK", is_answered=True)
                if is_end_wanted or not self._gate.requests.is_decoupled(model):
                    await self._write(_make_end(model, request_id))
        except asyncio.CancelledError:
            entry.end("CANCELLED", is_answered=False)
            raise
        except RefusedError as refused:
            self._gate.note_refusal(refused)
            entry.refuse(refused)
            entry.end(refused.reason.name, is_answered=False)
            await self._write(_make_refusal(refused, request_id or refused.request_id))

    async def _next(self) -> bytes | None:
        reading = asyncio.ensure_future(self._context.read())
        try:
            while not (await asyncio.wait({reading}, timeout=STREAM_SECONDS))[0]:
                if self._relay.is_answered and time.monotonic() - self._relay.moved >= STREAM_SECONDS:
                    self._relay.has_ended = True
                    return None
            return None if reading.result() is grpc.aio.EOF else reading.result()
        except Exception:  # the client has disconnected, for which gRPC has no public error
            return None
        finally:
            reading.cancel()

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so`` returns true; it is called again whenever a request has its last answer."""
        while not is_so():
            self._relay.settled.clear()
            await self._relay.settled.wait()


def _note(answer: RelayedAnswer, num_bytes: int) -> None:
    """Note the bytes of an answer and, if it is the last one to its request, the request's end."""
    if answer.request is not None:
        entry, is_error = answer.request.entry, bool(answer.message.error_message)
        entry.sent += num_bytes
        if answer.is_last:
            entry.end("UNKNOWN" if is_error else "OK", is_answered=not is_error)


def _serialize(answer: RelayedAnswer) -> bytes | None:
    """Put the client's request id back into an answer, and return the answer serialised.

    Return None if the answer is empty and only marks the end of a request, and the client did not ask for that mark.
    """
    request, message = answer.request, answer.message
    if request is not None:
        if request.is_decoupled and answer.is_last and answer.is_empty and not request.is_end_wanted:
            return None
        message.infer_response.id = request.request_id
    return bytes(message.SerializeToString())


def _make_end(model: str, request_id: str) -> bytes:
    """Build the empty answer that marks the end of a request that had no other."""
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.model_name, message.infer_response.id = model, request_id
    message.infer_response.parameters[IS_FINAL].bool_param = True
    return bytes(message.SerializeToString())


def _make_refusal(refused: RefusedError, request_id: str) -> bytes:
    """Build the answer that refuses one message of a stream."""
    message = service_pb2.ModelStreamInferResponse(error_message=refused.client_message)
    message.infer_response.id = request_id
    return bytes(message.SerializeToString())
