"""Limits on memory, connections, streams and time per client, shared by all ports."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from resource import RLIMIT_NOFILE, getrlimit
from typing import Self

from shoal.errors import InputError

HEALTH_CONNECTIONS = 64  # kept free for the health port
_OWN_DESCRIPTORS = 256  # for Triton, its processes' files and what the service itself opens
_MOST_CONNECTIONS = 4096  # more than one event loop can serve
IDLE_SECONDS = 75.0  # that an HTTP connection may stay open without a request
STREAM_SECONDS = 300.0  # that a stream, or a gRPC connection, may stay open with nothing in flight
MOST_INFLATION = 100  # largest ratio of a body's inflated to its received bytes


@dataclass(frozen=True)
class Limits:
    """Limits for clients; the defaults are in the table of ``docs/serving.md``.

    ``max_request_mib`` bounds a request, inflated; ``memory_mib`` all requests and answers that the service holds.
    ``max_streams`` bounds open streams. One client address gets at most ``client_share`` of the memory, the streams,
    the HTTP connections and the gRPC calls. ``trusted_proxies`` are addresses whose ``X-Forwarded-For`` is believed.

    In seconds: ``head_seconds`` for a request's head, or the first message of a stream; ``body_seconds`` for a body,
    plus a second for each ``body_kib`` KiB of it; ``unread_seconds`` for an answer that the client does not read.
    """

    max_request_mib: float = 64.0
    memory_mib: float = 1024.0
    max_streams: int = 256
    client_share: float = 0.5
    trusted_proxies: tuple[str, ...] = ()
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_kib: float = 256.0
    unread_seconds: float = 30.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "trusted_proxies":
                check_option(entry.name, value, value > 0, "Give more than 0.")
        check_option("client_share", self.client_share, self.client_share <= 1, "Give at most 1, which is no limit.")
        for address in self.trusted_proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise InputError(f"--trusted-proxy {address!r} is not an IP address.", "Give one: 10.0.0.5") from None

    @property
    def request_bytes(self) -> int:
        """Largest request, inflated, in bytes."""
        return int(self.max_request_mib * 2**20)

    @property
    def connections(self) -> int:
        """Connections per port. An HTTP request needs a second descriptor, for the connection to Triton."""
        descriptors, _ = getrlimit(RLIMIT_NOFILE)
        most = max(16, (descriptors - _OWN_DESCRIPTORS - HEALTH_CONNECTIONS) // 3)
        return min(_MOST_CONNECTIONS, most)

    def find_address(self, peer: str, forwarded: Iterable[str]) -> str:
        """Return the client's address: ``peer``, or the last untrusted hop that trusted proxies forward."""
        hops = [hop.strip() for line in forwarded for hop in line.split(",")]
        while peer in self.trusted_proxies and hops:
            peer = hops.pop()
        return peer


def check_option(name: str, value: float, is_right: bool, fix: str) -> None:
    """Raise ``InputError`` if the value of an option is out of range."""
    if not is_right:
        raise InputError(f"--{name.replace('_', '-')} {value:g} is out of range.", fix)


class Pool:
    """A quantity shared by all clients, of which one address gets at most its share."""

    def __init__(self, most: int, share: float) -> None:
        self.most, self._share = most, max(1, int(most * share))
        self.taken = 0
        self._of: Counter[str] = Counter()

    def has(self, address: str, number: int = 1) -> bool:
        """Whether ``number`` more are available to this address."""
        return self.taken + number <= self.most and self._of[address] + number <= self._share

    def take(self, address: str, number: int = 1) -> None:
        """Take ``number`` for an address, even beyond the limit."""
        self.taken += number
        self._of[address] += number

    def give_back(self, address: str, number: int = 1) -> None:
        """Return ``number`` to the pool."""
        self.taken -= number
        self._of[address] -= number
        if not self._of[address]:  # or entries of former clients would pile up
            del self._of[address]


class Hold:
    """Memory reservation of one request; it grows as bytes arrive, and is released as a whole."""

    def __init__(self, pool: Pool, address: str) -> None:
        self._pool, self._address, self.num_bytes = pool, address, 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether it may grow by ``num_bytes``."""
        return self._pool.has(self._address, num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Grow, or shrink by a negative number, even beyond the limit: an answer is held in any case."""
        self._pool.take(self._address, num_bytes)
        self.num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the whole reservation."""
        self._pool.give_back(self._address, self.num_bytes)
        self.num_bytes = 0
