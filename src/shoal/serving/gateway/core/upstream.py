"""A Triton server that is ready: the requests and streams in flight to it, and what its answers and errors mean."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NamedTuple

import aiohttp
import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2
from yarl import URL

from shoal.clients.client.grpc_transport import AsyncGrpc, channel_options
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.core.refusals import FailedError, LostError, find_unhealthy, is_cut, is_dead, strip_traceback
from shoal.serving.server.launch import Server

SERVICE = "/inference.GRPCInferenceService/"
CHUNK = 2**18  # bytes that one call passes to a transport, which copies what it cannot send at once: 1 or 2 ms
QUIET_SECONDS = 5.0  # after which an answered stream no longer counts as in flight
UNREAD_SECONDS = 2.0  # for which a stream's client may read nothing while others need its place
_ADDED_HEADERS = "Accept", "Accept-Encoding", "Content-Type", "User-Agent"  # which aiohttp would add
_LARGE = 2**20  # bytes of an answer whose parts are joined outside the event loop
_VERSION = re.compile(r"-1|0|[1-9][0-9]{0,17}")
_OUR_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
# Errors that Triton reports as its own faults although the request's JSON is at fault.
_UNREADABLE = re.compile(r"Unable to (parse|set) |failed to parse ")


class Reply(NamedTuple):
    """Triton's answer to an HTTP request."""

    headers: Mapping[str, str]
    content: bytes


class TritonStream:
    """One client's stream: how many requests were sent and answered, and when the last message passed."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self.models = caller, set[str]()
        self.num_sent = self.num_received = 0
        self.moved = time.monotonic()
        self.began = 0.0  # when the write of an answer began that has not ended, or 0
        self.unread_seconds: Callable[[], float] = lambda: 0.0  # for which the client has read nothing that was sent
        self.patience = float("inf")  # seconds that one write may take
        self._writing = _Writing(self)

    def end(self) -> None:
        """Stop the stream: its server or one of its models failed, is replaced or stops, or its place is needed."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Treat the client as disconnected, because it reads too slowly."""
        raise NotImplementedError

    def write(self) -> _Writing:
        """Return a context in which an answer is written."""
        self.began = time.monotonic()
        return self._writing

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

    def __init__(self, server: Server) -> None:
        self.server = server
        self.channel = grpc.aio.insecure_channel(server.grpc_url, options=channel_options(server.grpc_url))
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            skip_auto_headers=_ADDED_HEADERS,
        )
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

    async def ask_http(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", *, is_admin: bool = False
    ) -> Reply:
        """Send an HTTP request to Triton and return its reply.

        Raises:
            LostError: the server, or a process of the model, died.
            FailedError: Triton answered with an error.
        """
        url = URL(f"http://{self.server.http_url}{path}", encoded=True)
        data: Any = body or None
        if is_admin:
            headers = {**headers, "admin-key": self.server.admin_key}
        if len(body) > CHUNK:
            data, headers = cut(body), {**headers, "Content-Length": str(len(body))}
        try:
            async with self.session.request(method, url, data=data, headers=headers, allow_redirects=False) as reply:
                if (reply.content_length or _LARGE) < _LARGE:
                    content = await reply.read()
                else:
                    content = await join([part async for part in reply.content.iter_any()])
        except (aiohttp.ClientError, ConnectionError) as error:
            raise LostError(str(error)) from None
        if reply.status >= 400:
            raise _judge_reply(reply.status, content)
        return Reply(reply.headers, content)

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
        await asyncio.gather(self.session.close(), self.channel.close(), self.client.close())

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
    return FailedError(code, strip_traceback(details or ""), is_fault=code in _OUR_FAULTS)


def _judge_reply(status: int, content: bytes) -> LostError | FailedError:
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):  # an error that is not Triton's JSON
        message = f"The server answered with status {status} and gave no reason."
    if is_dead(message):
        return LostError(message)
    status = 400 if _UNREADABLE.match(message) else status
    return FailedError(status, strip_traceback(message), is_fault=status >= 500)


async def cut(content: bytes) -> AsyncIterator[bytes]:
    """Cut bytes into pieces: a transport copies what it cannot send at once, and that would stop the event loop."""
    for at in range(0, len(content), CHUNK):
        yield content[at : at + CHUNK] if len(content) > CHUNK else content


async def join(parts: list[bytes]) -> bytes:
    """Join parts of a body, outside the event loop if they are large."""
    return await asyncio.to_thread(b"".join, parts) if sum(map(len, parts)) > _LARGE else b"".join(parts)
