"""One gRPC channel at a time, replaced as soon as its connection broke.

gRPC finds another connection by itself, but not at once: a request that follows at the heels of one that broke is still
put into the dead connection, and fails as if it had run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.client.failures import Kind, grpc_failure


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


class Channel:
    """A channel of gRPC's, ``raw``, and how many requests are under way on it."""

    def __init__(self, channel: Any) -> None:
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        self.raw = channel
        self.stub = GRPCInferenceServiceStub(channel)
        self.users = 0


class ChannelPool:
    """Hands out the channel that requests go by; threads may share it.

    Its owner closes channels, which some do in an event loop.
    """

    def __init__(self, url: str, open_channel: Callable[..., Any]) -> None:
        self._url, self._open_channel = url, open_channel
        self._lock = threading.Lock()
        self._current = self._open()
        self._replaced: set[Channel] = set()
        self._is_closed = False

    def _open(self) -> Channel:
        return Channel(self._open_channel(self._url, channel_options(self._url)))

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        """The channel for one request.

        Raises:
            CallError: what gRPC's error within means; where the connection broke, the next request gets another.
        """
        import grpc  # type: ignore[import-untyped]

        with self._lock:
            channel = self._current
            channel.users += 1
        is_broken = False
        try:
            yield channel
        except grpc.RpcError as error:
            failure = grpc_failure(error.code().name, error.details() or "")
            is_broken = failure.kind is Kind.CONNECTION_LOST
            raise failure from None
        finally:
            with self._lock:
                channel.users -= 1
                if is_broken and channel is self._current and not self._is_closed:
                    self._replaced.add(channel)
                    self._current = self._open()

    def unused(self) -> list[Any]:
        """gRPC's channels that were replaced and no request is on any more, each given once: to be closed."""
        if not self._replaced:
            return []
        with self._lock:
            unused = {channel for channel in self._replaced if not channel.users}
            self._replaced -= unused
            return [channel.raw for channel in unused]

    def close(self) -> list[Any]:
        """Open no more; every channel that is left, to be closed."""
        with self._lock:
            self._is_closed = True
            return [channel.raw for channel in (self._current, *self._replaced)]
