"""A Triton server that is ready: the requests and streams in flight to it, and what its answers and errors mean."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from shoal.clients.client.grpc_transport import AsyncGrpc, channel_options
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.triton_errors import find_unhealthy, is_cut, reword
from shoal.serving.gateway.refusals import FailedError, LostError
from shoal.serving.server.launch import Server

SERVICE = "/inference.GRPCInferenceService/"
QUIET_SECONDS = 5.0  # after which an answered stream no longer counts as in flight
UNREAD_SECONDS = 2.0  # for which a stream's client may read nothing while others need its place
_VERSION = re.compile(r"-1|0|[1-9][0-9]{0,17}")
_OUR_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


class Reply(NamedTuple):
    """Triton's answer to an HTTP request."""

    headers: Mapping[str, str]
    content: bytes


class HttpConnection(Protocol):
    """Connections to Triton over HTTP, by whatever library."""

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", *, is_admin: bool = False
    ) -> Reply:
        """Send an HTTP request to Triton and return its reply, or raise ``LostError`` or ``FailedError``."""

    async def close(self) -> None:
        """Close the connections."""


class TritonStream:
    """One client's stream: how many requests were sent and answered, and when the last message passed."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self.models = caller, set[str]()
        self.num_sent = self.num_received = 0
        self.moved = time.monotonic()
        self.began = 0.0  # when the write of an answer began that has not ended, or 0
        self.unread_seconds: Callable[[], float] = lambda: 0.0  # for which the client has read nothing that was sent
        self.patience = float("inf")  # seconds that one write may take

    def end(self) -> None:
        """Stop the stream: its server or one of its models failed, is replaced or stops, or its place is needed."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Treat the client as disconnected, because it reads too slowly."""
        raise NotImplementedError

    def write(self) -> _Writing:
        """Return a context in which an answer is written."""
        self.began = time.monotonic()
        return _Writing(self)

    def end_if_unread(self) -> None:
        """Give up the stream if its client reads nothing, so that the stream may be ended for another one."""
        writing = time.monotonic() - self.began if self.began else 0.0
        if max(writing, self.unread_seconds()) > UNREAD_SECONDS:
            self.give_up()

    @property
    def is_quiet(self) -> bool:
        """Whether each request of the stream has its last answer, and no message was sent or received for 5 s."""
        return self.is_answered and time.monotonic() - self.moved > QUIET_SECONDS

    @property
    def is_answered(self) -> bool:
        """Whether each request of the stream has its last answer."""
        return self.num_received >= self.num_sent


class _Writing:
    """Context of one write; ``contextlib``'s would cost a microsecond for each answer."""

    def __init__(self, stream: TritonStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._stream.began = 0.0


class Upstream:
    """A Triton server that is ready, the connections to it, and its requests and streams in flight."""

    def __init__(self, server: Server, http: HttpConnection) -> None:
        self.server, self.http = server, http
        self.channel = grpc.aio.insecure_channel(server.grpc_url, options=channel_options(server.grpc_url))
        self.client = AsyncGrpc(server.grpc_url)  # for canary requests
        self.sent: dict[asyncio.Future[Any], str] = {}  # with the model of each
        self.streams: set[TritonStream] = set()
        self._versions = set[tuple[str, str]]()  # that it is known to have
        self._killed = set[str]()  # instances
        self.num_lost = 0  # requests lost when it died
        self.is_repeat = False  # whether one of them had already been lost by the previous server
        self.is_stopped = False  # whether the service itself ends the server

    async def ask(
        self, method: str, request: bytes, metadata: Iterable[tuple[str, str]] = (), *, is_admin: bool = False
    ) -> bytes:
        """Call a gRPC method of Triton's service and return the response.

        ``is_admin`` adds the administrator's key, without which Triton answers requests for inference alone.

        Raises:
            LostError: the server, or a process of the model, died.
            FailedError: Triton answered with an error.
        """
        if is_admin:
            metadata = (*metadata, ("triton-grpc-protocol-admin-key", self.server.admin_key))
        try:
            return bytes(await self.channel.unary_unary(SERVICE + method)(request, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise judge_status(error.code(), error.details()) from None

    async def has_version(self, model: str, version: str) -> bool:
        """Whether the server has loaded this version of a model.

        Raises:
            LostError: the server died.
            FailedError: Triton does not say it.
        """
        if (model, version) in self._versions:
            return True
        if not _VERSION.fullmatch(version):  # Triton reads other numbers, too, such as 1x as 1
            return False
        request = service_pb2.ModelMetadataRequest(name=model, version=version)
        try:
            await self.ask("ModelMetadata", request.SerializeToString(), is_admin=True)
        except FailedError as error:
            if error.status == grpc.StatusCode.NOT_FOUND:
                return False
            raise
        self._versions.add((model, version))
        return True

    def kill_unhealthy(self, message: str) -> None:
        """Kill the process that Triton gave up, as its ``message`` says.

        Triton does so if a process that has a request does not run for a second, and frees the request's memory. Once
        the process runs again, it uses that memory, and Triton ends with ``boost::interprocess::lock_exception``.
        """
        instance = find_unhealthy(message)
        if instance and instance not in self._killed:
            self._killed.add(instance)
            self.server.kill_instance(instance)

    def stop(self) -> None:
        """Cancel all requests, which ``Resending`` sends to the next server, and end all streams."""
        self.is_stopped = True
        for task in list(self.sent):
            task.cancel()
        self.end_streams()

    async def close(self) -> None:
        """Close the connections to the server. Triton would wait for them when it stops."""
        await asyncio.gather(self.http.close(), self.channel.close(), self.client.close())

    async def wait_idle(self) -> None:
        """Wait until all requests are answered, and all streams are answered and had no message for 5 s."""
        while self.sent or not all(stream.is_quiet for stream in self.streams):
            await asyncio.sleep(0.1)

    def end_streams(self, models: Iterable[str] | None = None) -> None:
        """End the streams to ``models``; if ``models`` is None, end all streams."""
        named = None if models is None else set(models)
        for stream in list(self.streams):
            if named is None or stream.models & named:
                stream.end()


def judge_status(code: Any, details: str | None) -> LostError | FailedError:
    """Return what an error status of gRPC means: the server or the model's process died, or Triton's answer."""
    if is_cut(code, details or ""):
        return LostError(details or "")
    return FailedError(code, reword(details or ""), is_fault=code in _OUR_FAULTS)
