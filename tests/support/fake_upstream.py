"""Stand-in for a Triton server and the connections to it: answers are scripted, messages are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from shoal.clients.client.calls import IS_FINAL, Call
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.upstream import TritonStream, Upstream

OK = grpc.StatusCode.OK


class FakeServer:
    """A server that never runs. ``stopped`` are the graces that it got, ``ready`` is called when it is waited for."""

    http_url = grpc_url = metrics_url = "127.0.0.1:1"
    admin_key = "key"
    beacons = Path("/nonexistent")

    def __init__(self, pid: int = 100, ready: Callable[[float], None] = lambda seconds: None) -> None:
        self.pid, self.log, self.wait_ready = pid, Path("/nonexistent/triton.log"), ready
        self.stopped: list[float] = []
        self.killed: list[str] = []

    def kill_instance(self, name: str) -> None:
        """Note that a process was killed."""
        self.killed.append(name)

    def stop(self, seconds: float) -> None:
        """Note that the server was stopped."""
        self.stopped.append(seconds)


class FakeCall:
    """A streamed call of ``grpc.aio``: yields what ``say`` and ``finish`` put into it, and keeps what is written."""

    def __init__(self, requests: Iterable[bytes] = (), metadata: Any = ()) -> None:
        self.written, self.metadata, self.is_done_writing = [*requests], metadata, False
        self._status, self._was_cancelled = (OK, ""), False
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._reading: asyncio.Future[Any] | None = None

    def say(self, own_id: str, *, is_final: bool | None = None, error: str = "", outputs: int = 1) -> None:
        """Let the server answer the request with an id."""
        message = service_pb2.ModelStreamInferResponse(error_message=error)
        message.infer_response.id = own_id
        for number in range(0 if error else outputs):
            message.infer_response.outputs.add(name=f"Y{number}")
        if is_final is not None:
            message.infer_response.parameters[IS_FINAL].bool_param = is_final
        self._incoming.put_nowait(message.SerializeToString())

    def finish(self, code: Any = OK, details: str = "", *, is_raised: bool = False) -> None:
        """End the call with a status, as the result of ``read`` or as an error that it raises."""
        self._status = code, details
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        self._incoming.put_nowait(error if is_raised else grpc.aio.EOF)

    async def read(self) -> Any:
        """Return the next message, or EOF."""
        if self._was_cancelled:
            raise asyncio.CancelledError
        self._reading = asyncio.ensure_future(self._incoming.get())
        found = await self._reading
        if isinstance(found, Exception):
            raise found
        return found

    async def write(self, message: bytes) -> None:
        """Record a message."""
        self.written.append(message)

    async def done_writing(self) -> None:
        """Note that no more messages come. An ended call refuses that."""
        self.is_done_writing = True
        if self._incoming.qsize():
            raise asyncio.InvalidStateError

    async def code(self) -> Any:
        """Return the status code."""
        return self._status[0]

    async def details(self) -> str:
        """Return the status message."""
        return self._status[1]

    def done(self) -> bool:
        """Whether the call was cancelled."""
        return self._was_cancelled

    cancelled = done

    def cancel(self) -> None:
        """Cancel the call and the read in progress."""
        self._was_cancelled = True
        if self._reading is not None:
            self._reading.cancel()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for error in self.errors:
            raise error
        yield b""

    errors: tuple[Exception, ...] = ()


class FakeChannel:
    """Channel whose streamed calls are kept in ``calls``."""

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []

    def stream_stream(self, _: str) -> Callable[..., FakeCall]:
        """Return what opens a call."""

        def begin(requests: Iterable[bytes] = (), metadata: Any = ()) -> FakeCall:
            self.calls.append(FakeCall(requests, metadata))
            return self.calls[-1]

        return begin


class FakeUpstream(Upstream):
    """A server with no connections. ``client`` answers canaries; ``is_closed`` says that ``close`` was called."""

    def __init__(self, server: Any = None, client: Any = None) -> None:
        self.server, self.client = server or FakeServer(), client  # type: ignore[assignment]
        self.channel = self.fake = FakeChannel()
        self.sent, self.streams, self._versions, self._killed = {}, set(), set(), set()
        self.num_lost, self.is_repeat, self.is_stopped, self.is_closed = 0, False, False, False

    async def close(self) -> None:
        """Note that the connections were closed."""
        self.is_closed = True


class FakeStream(TritonStream):
    """A client's stream that notes how it was ended."""

    def __init__(self, caller: Caller, models: Iterable[str] = (), moved: float | None = None) -> None:
        super().__init__(caller)
        self.models |= {*models}
        self.moved = self.moved if moved is None else moved
        self.ends: list[str] = []

    def end(self) -> None:
        """Note that the stream was ended."""
        self.ends.append("ended")

    def give_up(self) -> None:
        """Note that the client was given up."""
        self.ends.append("given up")


class FakeClient:
    """Client for canary requests. ``answer`` returns the outputs of a call, a list of them, or raises."""

    def __init__(self, answer: Callable[[Call], Any]) -> None:
        self.answer, self.calls = answer, list[Call]()

    async def send(self, call: Call, _: float) -> Any:
        """Return the outputs of a call."""
        self.calls.append(call)
        await asyncio.sleep(0.001)
        return self.answer(call)

    def stream(self, call: Call) -> Any:
        """Return the answers to a streamed call."""
        self.calls.append(call)
        return _Answers(self.answer(call))


class _Answers:
    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    async def read(self, _: float) -> Any:
        return next(self._answers, None)
