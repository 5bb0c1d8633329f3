"""Blocking transports over gRPC and HTTP: send one call, return its result."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from typing import Any, Protocol

from shoal.client.calls import Call
from shoal.client.channels import ChannelPool
from shoal.client.failures import CallError, Kind, connection_failure
from shoal.client.wire import HEADER_LENGTH, HttpReply, from_grpc, from_http, to_grpc, to_http


class Transport(Protocol):
    """Sends one call and returns its result."""

    def send(self, call: Call, seconds: float) -> Any:
        """Return the result within ``seconds``, or raise ``CallError``."""

    def close(self) -> None:
        """Close every connection."""


# --- gRPC --------------------------------------------------------------------------------------------------------


class Grpc:
    """One channel, which threads may share."""

    def __init__(self, url: str) -> None:
        import grpc  # type: ignore[import-untyped]

        self._channels = ChannelPool(url, grpc.insecure_channel)

    def send(self, call: Call, seconds: float) -> Any:
        request = to_grpc(call)
        for channel in self._channels.unused():
            channel.close()
        with self._channels.channel() as channel:
            reply = getattr(channel.stub, request.procedure)(request.message, timeout=seconds)
        return from_grpc(call, reply)

    def close(self) -> None:
        for channel in self._channels.close():
            channel.close()


# --- HTTP --------------------------------------------------------------------------------------------------------


class Http:
    """Pool of keep-alive connections, one per concurrent request, over the standard library.

    tritonclient's HTTP client is bound to one thread, leaks a file descriptor per thread, and cannot tell a refused
    connection from a broken one. No proxy is used.
    """

    def __init__(self, url: str) -> None:
        self._host, _, port = url.rpartition(":")
        self._port = int(port)
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, call: Call, seconds: float) -> Any:
        connection = self._take()
        try:
            connection.deadline = time.monotonic() + seconds
            reply = self._exchange(connection, call)
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return from_http(call, reply)

    def _exchange(self, connection: _Connection, call: Call) -> HttpReply:
        verb, path, headers, body = to_http(call)
        try:
            if connection.sock is None:
                connection.connect()
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while connecting") from None
        except OSError as error:
            raise connection_failure(error) from None
        try:
            connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            return HttpReply(answer.status, answer.getheader(HEADER_LENGTH), answer.read())
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while waiting") from None
        except (OSError, http.client.IncompleteRead):
            raise CallError(Kind.CONNECTION_LOST, "connection closed") from None
        except http.client.HTTPException as error:
            raise CallError(Kind.NOT_TRITON, f"unreadable answer: {str(error)[:40]!r}") from None

    def _take(self) -> _Connection:
        """Take an idle connection that the server has not closed, or a new one."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open():
                    return connection
                connection.close()
        return _Connection(self._host.strip("[]"), self._port)

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            if not self._is_closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()


class _Socket(socket.socket):
    """Socket whose reads share one deadline."""

    deadline = 0.0

    def recv_into(self, *args: Any) -> int:
        self.settimeout(left(self.deadline))
        return super().recv_into(*args)


class _Connection(http.client.HTTPConnection):
    """One connection; every step of a request ends by ``deadline``."""

    sock: _Socket | None
    _deadline = 0.0

    @property
    def deadline(self) -> float:
        """Deadline on the clock of ``time.monotonic``."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        if self.sock is not None:
            self._limit(self.sock)

    def _limit(self, sock: _Socket) -> None:
        sock.deadline = self._deadline
        sock.settimeout(left(self._deadline))

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), left(self._deadline))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = _Socket(fileno=plain.detach())
        self._limit(self.sock)

    def is_open(self) -> bool:
        """Whether the idle socket has nothing to read: anything readable then means that the server closed it."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


def left(deadline: float) -> float:
    """Return the seconds until ``deadline``; never 0, which would make the socket non-blocking."""
    return max(1e-3, deadline - time.monotonic())
