"""One gRPC channel at a time, replaced as soon as its connection breaks.

gRPC reconnects by itself, but not at once: a request sent immediately after a break still goes into the dead
connection, and fails as if it had run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.client.failures import Kind, grpc_failure


def channel_options(url: str) -> list[tuple[str, int]]:
    """Return channel options: unlimited message sizes, no proxy on loopback, short reconnect back-off."""
    is_here = url.startswith(("127.", "localhost", "[::1]"))
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),  # or the back-off of another client would delay this one
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    return [*options, ("grpc.enable_http_proxy", 0)] if is_here else options


class Channel:
    """A gRPC channel, ``raw``, and the number of requests in flight on it."""

    def __init__(self, channel: Any) -> None:
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        self.raw = channel
        self.stub = GRPCInferenceServiceStub(channel)
        self.users = 0


class ChannelPool:
    """Hands out the current channel; threads may share the pool.

    The owner closes channels, since an asynchronous one has to be awaited.
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
        """Yield the channel for one request.

        Raises:
            CallError: translated from gRPC's error; after a broken connection the next request gets a new channel.
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
        """Return replaced gRPC channels without requests, each exactly once, for the owner to close."""
        if not self._replaced:
            return []
        with self._lock:
            unused = {channel for channel in self._replaced if not channel.users}
            self._replaced -= unused
            return [channel.raw for channel in unused]

    def close(self) -> list[Any]:
        """Stop opening channels and return all that remain, for the owner to close."""
        with self._lock:
            self._is_closed = True
            return [channel.raw for channel in (self._current, *self._replaced)]
