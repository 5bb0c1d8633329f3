"""Streams to Triton: one stream of a client, with the requests in flight on it, and the answers to them.

Triton 24.10 can crash when a stream is abandoned. So a stream is read to its end even if its client has disconnected.

Triton, in 26.08 too, aborts when it writes two answers to a stream at once. An answer of a decoupled model waits while
another one is being written (``ongoing_write_``); one of another model waits for its turn among those alone
(``WriteResponseIfReady``). So the decoupled models of a client's stream get a call, and the others get another one.
Triton takes a version that a model does not have for a model that is not decoupled, so such requests are not sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.fair_queue import Turn
from shoal.serving.gateway.core.stream_requests import METHOD, StreamRequest, StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.core.triton_errors import is_dead, reword
from shoal.serving.gateway.core.upstream import TritonStream, Upstream, judge_status
from shoal.serving.gateway.refusals import FailedError, LostError, RefusalReason, RefusedError, log_failure


class RelayedAnswer(NamedTuple):
    """Answer on a stream: a ``ModelStreamInferResponse``, in which the service's id of the request still stands.

    ``request`` is None if the answer belongs to no request in flight. ``lost`` is set if the answer is the error that
    the model's process has died.
    """

    request: StreamRequest | None
    message: Any
    is_last: bool
    lost: RefusedError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the answer has no outputs and no error: it only marks the end of a request."""
        return not self.message.infer_response.outputs and not self.message.error_message


def _ignore(*_: Any) -> None:
    pass


class Relay(TritonStream):
    """A client's stream to Triton: sends requests, and iterates over the answers to them.

    A request waits here until its caller's turn. After its last answer, its memory is released, and it no longer counts
    as in flight, whatever fails before. The iteration ends
    when ``finish`` was called and Triton has answered all requests. ``drop`` is called when the client reads too
    slowly, and ``stop_sending`` when the stream is ended with nothing in flight. If the stream has models that are
    decoupled and others, the iteration has the answers of the kind that came first; ``deliver`` is called with those of
    the other kind.

    Iterating raises:
        RefusedError: the stream was lost, because its server or model died or the service stops.
        FailedError: Triton has ended the stream with an error.
    """

    def __init__(
        self,
        caller: Caller,
        upstream: Upstream,
        active: ActiveServer,
        traffic: Traffic,
        requests: StreamRequests,
        metadata: Iterable[tuple[str, str]],
    ) -> None:
        super().__init__(caller)
        self.has_left = self.has_ended = self.is_unread = False
        self.drop: Callable[[], Any] = _ignore
        self.stop_sending: Callable[[], Any] = _ignore
        self.deliver: Callable[[RelayedAnswer], Any]
        self.settled = asyncio.Event()  # set whenever a request has its last answer
        self.unanswered: dict[str, StreamRequest] = {}  # by the id that the service gave, oldest first
        self.dropped: list[StreamRequest] = []  # that waited for their turn when the client left
        self._upstream, self._active, self._traffic, self._requests = upstream, active, traffic, requests
        self._metadata = metadata
        self._begun = asyncio.Event()
        self._calls: dict[bool, Any] = {}  # by whether its models are decoupled
        self._second: asyncio.Task[None] | None = None  # reads the call that began last, if there are two
        self._failure: Exception | None = None  # of that call
        self._waiting: dict[str, tuple[Turn, asyncio.Task[None]]] = {}  # tasks that send a request in its turn
        self._sending = asyncio.Lock()  # a call takes one message at a time
        self._finishing: asyncio.Task[None] | None = None
        self._is_finished = self._is_over = False

    def __enter__(self) -> Self:
        self._upstream.streams.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._upstream.streams.discard(self)
        for own_id in list(self.unanswered):
            self._settle(own_id, is_done=False)
        self._is_over = True
        self.drop = self.stop_sending = self.deliver = _ignore  # which hold what holds this: memory, until a collection
        for _turn, task in self._waiting.values():
            task.cancel()
        self._cancel()
        if self._second is not None:
            self._second.cancel()

    @property
    def num_bytes(self) -> int:
        """Size of the requests in flight."""
        return sum(request.num_bytes for request in self.unanswered.values())

    async def send(
        self,
        model: str,
        request_id: str,
        message: bytes,
        *,
        num_bytes: int,
        version: str = "",
        is_end_wanted: bool = False,
        held: Reservation | None = None,
    ) -> bool:
        """Send a serialised ``ModelInferRequest``, of ``num_bytes`` when the client sent it, in its caller's turn.

        A stop request is not sent, and the result is False: the caller's requests of its id, within any stream or
        none, are stopped. ``held`` is released with the last answer.

        Raises:
            RefusedError: the model is unavailable or has no such version, too many requests to it are in flight, there
                is nothing to stop, or the request's tokens would escape a limit.
        """
        self._traffic.find(model)
        if self._requests.is_stop(model, message):
            self._requests.stop_own(self.caller, model, request_id)
            return False
        self._requests.check(self.caller, model, message)
        if version:
            await self._check_version(model, version)
            self._traffic.find(model)  # which may have failed meanwhile
        with ExitStack() as ends:
            if held is not None:
                ends.enter_context(held)
            admitted = ends.enter_context(self._traffic.admit(model, num_bytes, self.caller))
            turn = ends.enter_context(self._traffic.stream_queue(model).enter(self.caller))
            request = ends.enter_context(
                self._requests.begin(
                    model, request_id, message, num_bytes=num_bytes, is_end_wanted=is_end_wanted, caller=self.caller
                )
            )
            request.admitted, request.ends = admitted, ends.pop_all()
            self.unanswered[request.own_id] = request
        self.models.add(model)
        self.num_sent += 1
        self.moved = time.monotonic()
        if turn.has_place and not self._waiting:
            await self._write(request, message)
        else:  # also behind another one, whose turn may have come just now
            sending = self._write_in_turn(turn, request, message)
            self._waiting[request.own_id] = turn, asyncio.create_task(sending)
        if self.has_left:
            self._drop_waiting()
            self._requests.stop(request)
        return True

    async def _write_in_turn(self, turn: Turn, request: StreamRequest, message: bytes) -> None:
        try:
            await turn.begun
            await self._write(request, message)
        except Exception as error:
            self.fail(error)
        finally:
            self._waiting.pop(request.own_id, None)
            if self._is_finished:
                await self.finish()

    async def _write(self, request: StreamRequest, message: bytes) -> None:
        request.upstream = self._upstream
        try:
            async with self._sending:
                call = self._calls.get(request.is_decoupled) or self._begin(is_decoupled=request.is_decoupled)
                await call.write(request.mark(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the call has ended, and reading it says why
        except grpc.aio.UsageError:  # the connection was closed, with the server
            raise self._note_lost(request, "") from None

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which iterating raises."""
        self._failure = self._failure or error
        self._begun.set()
        self._cancel()

    def _drop_waiting(self) -> None:
        """Forget the requests that wait for their turn, because the client has left."""
        for own_id, (turn, task) in [*self._waiting.items()]:
            if turn.has_place:  # it is being sent, and to cancel that would end the whole call
                continue
            del self._waiting[own_id]
            task.cancel()
            self.dropped.append(self.unanswered[own_id])
            self.num_sent -= 1
            self._settle(own_id, is_done=False)

    async def _check_version(self, model: str, version: str) -> None:
        try:
            if await self._upstream.has_version(model, version):
                return
        except LostError as error:
            raise self._note_lost(None, str(error)) from None
        except FailedError as error:
            raise RefusedError(RefusalReason.UNAVAILABLE, error.message, 1.0) from None
        raise RefusedError(
            RefusalReason.ABSENT, f"{model} has no version {version!r:.60}. Leave it out for the latest one."
        )

    def _begin(self, *, is_decoupled: bool) -> Any:
        call = self._upstream.channel.stream_stream(METHOD)(metadata=self._metadata)
        if self._calls:
            self._second = asyncio.create_task(self._read_second(call, *self._calls.values()))
        self._calls[is_decoupled] = call
        self._begun.set()
        return call

    async def _read_second(self, call: Any, first: Any) -> None:
        try:
            while (answer := await self._read(call)) is not None:
                await self.deliver(answer)
        except Exception as error:
            self._failure = error
            first.cancel()

    async def finish(self) -> None:
        """Send no more requests than those that wait for their turn."""
        self._is_finished = True
        if self._waiting:
            return
        self._begun.set()
        for call in self._calls.values():
            with suppress(asyncio.InvalidStateError):  # the call ended meanwhile
                if not call.done():
                    await call.done_writing()

    def _cancel(self) -> None:
        for call in self._calls.values():
            if not call.done():
                call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RelayedAnswer:
        await self._begun.wait()
        if not self._calls:  # nothing was sent
            raise self._failure or StopAsyncIteration
        if (answer := await self._read(next(iter(self._calls.values())))) is not None:
            return answer
        if self._second is not None:
            await self._second
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def _read(self, call: Any) -> RelayedAnswer | None:
        """Return the next answer of a call, or None at its end."""
        try:
            content = await call.read()
            if content is not grpc.aio.EOF:
                return self._receive(content)
            code, details = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.CancelledError:
            if self._is_over or not call.cancelled():
                raise
            code, details = grpc.StatusCode.CANCELLED, ""  # by ``end``, or because the other call failed
        if self._failure is not None:
            raise self._failure
        if code == grpc.StatusCode.OK:
            return None
        judged = LostError() if code == grpc.StatusCode.CANCELLED else judge_status(code, details)
        if isinstance(judged, LostError):
            raise self._note_lost(next(iter(self.unanswered.values()), None), str(judged))
        raise judged

    def _receive(self, content: bytes) -> RelayedAnswer:
        self._active.answered = self.moved = time.monotonic()
        message = service_pb2.ModelStreamInferResponse.FromString(content)
        request = self.unanswered.get(message.infer_response.id)
        lost = self._note_lost(request, message.error_message) if is_dead(message.error_message) else None
        if request is None:
            message.error_message = reword(message.error_message)
            return RelayedAnswer(None, message, is_last=False, lost=lost)
        is_last = self._requests.count(request, message)
        if is_last:
            self.num_received += 1
            self._settle(request.own_id, is_done=True)
        if message.error_message:
            message.error_message = lost.client_message if lost else reword(request.restore_id(message.error_message))
        return RelayedAnswer(request, message, is_last, lost)

    def _note_lost(self, request: StreamRequest | None, message: str) -> RefusedError:
        self._upstream.kill_unhealthy(message)
        if not self._upstream.is_stopped:
            self._active.suspect()
        refused = self._active.lost(request.model if request else "this stream")
        log_failure(request.model if request else "", request.request_id if request else "", refused.message)
        return refused

    def end(self) -> None:
        """End the stream: send Triton no more requests or, if an answer is missing, cancel the call to Triton."""
        self.has_ended = True
        if not self.is_answered:
            if not self._calls:
                self.fail(self._note_lost(next(iter(self.unanswered.values())), ""))
            self._cancel()
        else:
            self.stop_sending()

    def give_up(self) -> None:
        """Treat the client as disconnected, because it reads too slowly."""
        self.is_unread = True
        self.leave()
        self.drop()

    def leave(self) -> None:
        """Note that the client has disconnected, and ask the models to stop its requests."""
        if self.has_left:
            return
        self.has_left = True
        self._drop_waiting()
        if self._is_finished or not self._calls:  # nothing may be left to read
            self._finishing = asyncio.ensure_future(self.finish())
        for request in self.unanswered.values():
            self._requests.stop(request)

    def _settle(self, own_id: str, *, is_done: bool) -> None:
        request = self.unanswered.pop(own_id)
        request.admitted.is_done = is_done
        request.ends.close()
        self.settled.set()
