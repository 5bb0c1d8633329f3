"""One gRPC channel at a time, replaced as soon as its connection broke.

gRPC finds another connection by itself, but not at once: a request that follows at the heels of one that broke is still
put into the dead connection, and fails as if it had run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def channel_options(url: str) -> list[tuple[str, int]]:
    """No limit to messages, no proxy between this machine and itself, and a server that comes back is soon found."""
    is_here = url.startswith(("127.", "localhost", "[::1]"))
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # or another client's failed tries would delay ours
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    return [*options, ("grpc.enable_http_proxy", 0)] if is_here else options


class Line:
    """A channel, and how many requests are under way on it."""

    def __init__(self, channel: Any) -> None:
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        self.channel = channel
        self.stub = GRPCInferenceServiceStub(channel)
        self.users = 0


class Lines:
    """Hands out the line that requests go by; threads may share it."""

    def __init__(self, url: str, open_channel: Callable[..., Any]) -> None:
        self._url, self._open_channel = url, open_channel
        self._lock = threading.Lock()
        self._current = self._open()
        self._replaced: set[Line] = set()
        self._is_closed = False

    def _open(self) -> Line:
        return Line(self._open_channel(self._url, channel_options(self._url)))

    def take(self) -> Line:
        """The line for one request, which gives it back."""
        with self._lock:
            self._current.users += 1
            return self._current

    def give_back(self, line: Line, *, is_broken: bool) -> Line | None:
        """Returns the line if it is broken and nobody's any more: the caller closes its channel."""
        with self._lock:
            line.users -= 1
            if is_broken and line is self._current and not self._is_closed:
                self._current = self._open()
                self._replaced.add(line)
            if line.users or line not in self._replaced:
                return None
            self._replaced.remove(line)
            return line

    def close(self) -> list[Line]:
        """Open no more; returns the lines whose channels the caller closes."""
        with self._lock:
            self._is_closed = True
            return [self._current, *self._replaced]
