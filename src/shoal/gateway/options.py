"""Options of a service, shares of memory and connections per client, and admission of requests to a model.

Sections: options; shares of clients; admission.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from resource import RLIMIT_NOFILE, getrlimit
from typing import Self

from shoal.errors import InputError

HEALTH_CONNECTIONS = 64  # kept free for the health port
_OWN_DESCRIPTORS = 256  # for Triton, its processes' files and what the service itself opens
_MOST_CONNECTIONS = 4096  # more than one event loop can serve
IDLE_SECONDS = 75.0  # that an HTTP connection may stay open without a request
STREAM_SECONDS = 300.0  # that a stream, or a gRPC connection, may stay open with nothing in flight
MOST_INFLATION = 100  # largest ratio of a body's inflated to its received bytes
RESTARTS_SECONDS = 600.0  # in which ``max_restarts`` are made without a pause
FEW = 16  # concurrent requests that are never refused: so few are not an overload
MANY = 1024  # concurrent requests; each holds its tensors in memory
PER_SLOT = 4  # streams in flight for each one that an engine runs at once
MOST_SECONDS = 30.0  # longest retry-after of a refused request
A_REQUEST = 256  # bytes of work that each request costs besides its size
_MEMORY = 10.0  # seconds of work over which the rate is averaged, recent ones weighing more
_ENOUGH = 0.5  # seconds of work before the rate is used


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Limits for clients; the defaults are in the table of ``docs/serving.md``.

    ``max_request_mib`` limits the size of a request after decompression, ``memory_mib`` the total size of the requests
    and answers that the service holds, ``max_streams`` the number of open streams. One client address gets at most the
    share ``client_share`` of the memory, the streams, the HTTP connections and the gRPC calls. ``trusted_proxies`` are
    addresses whose ``X-Forwarded-For`` is believed.

    The other limits are times. The head of a request, or the first message of a stream, must arrive within
    ``head_seconds``. A body must arrive within ``body_seconds``, plus one second for each ``body_kib`` KiB of it. A
    client that reads nothing of its answer for ``unread_seconds`` counts as disconnected.
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
                _check_option(entry.name, value, value > 0, "Give more than 0.")
        _check_option("client_share", self.client_share, self.client_share <= 1, "Give at most 1, which is no limit.")
        for address in self.trusted_proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise InputError(f"--trusted-proxy {address!r} is not an IP address.", "Give one: 10.0.0.5") from None

    @property
    def request_bytes(self) -> int:
        """Largest size of a request after decompression, in bytes."""
        return int(self.max_request_mib * 2**20)

    @property
    def connections(self) -> int:
        """Largest number of connections per port.

        Each HTTP request takes two file descriptors: the client's connection and a connection to Triton.
        """
        descriptors, _ = getrlimit(RLIMIT_NOFILE)
        most = max(16, (descriptors - _OWN_DESCRIPTORS - HEALTH_CONNECTIONS) // 3)
        return min(_MOST_CONNECTIONS, most)

    def find_address(self, peer: str, forwarded: Iterable[str]) -> str:
        """Return the client's address: ``peer`` or, if ``peer`` is a trusted proxy, an address from ``forwarded``.

        ``forwarded`` are the values of ``X-Forwarded-For``. The last address in them that is not a trusted proxy is
        returned.
        """
        hops = [hop.strip() for line in forwarded for hop in line.split(",")]
        while peer in self.trusted_proxies and hops:
            peer = hops.pop()
        return peer


@dataclass(frozen=True)
class Options:
    """Options of ``shoal serve``.

    A port of 0 stands for any free port. A ``host`` that is not a loopback address requires ``is_open``. ``exposed``
    names further models that clients may call, besides ensembles and models with the parameter ``public``. When the
    service stops, requests in flight have ``grace`` seconds to finish. A request that would wait longer than
    ``max_wait`` seconds is refused. ``limits`` are the limits for clients. ``model_memory_mib`` is the largest memory
    of each process of a model; 0 means no limit. All models together may take ``load_seconds`` to load. After more than
    ``max_restarts`` faults within ten minutes, the service pauses before it starts another server. If ``resends`` is
    true, a request that was in flight when its model died is resent once; it may then run twice.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    grace: float = 30.0
    max_wait: float = 10.0
    model_memory_mib: float = 0.0
    max_restarts: int = 10
    load_seconds: float = 600.0
    resends: bool = True
    is_open: bool = False
    exposed: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("grace", "max_wait", "load_seconds"):
            _check_option(name, getattr(self, name), getattr(self, name) > 0, "Give more than 0.")
        for name in ("model_memory_mib", "max_restarts"):
            _check_option(name, getattr(self, name), getattr(self, name) >= 0, "Give 0 or more.")
        if not (self.is_open or is_loopback(self.host)):
            raise InputError(
                f"--host {self.host} serves every client that reaches this machine: there is no authentication yet.",
                "Give --open as well if a proxy or a firewall decides which clients reach it.",
            )


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_option(name: str, value: float, is_right: bool, fix: str) -> None:
    """Raise ``InputError`` if the value of an option is out of range."""
    if not is_right:
        raise InputError(f"--{name.replace('_', '-')} {value:g} is out of range.", fix)


# --- shares of clients -----------------------------------------------------------------------------------------------


class Pool:
    """Quantity that all clients share, such as memory. One client address gets at most the part ``share``, up to 1."""

    def __init__(self, most: int, share: float) -> None:
        self.most, self._share = most, max(1, int(most * share))
        self.taken = 0
        self._of: Counter[str] = Counter()

    def has(self, address: str, number: int = 1) -> bool:
        """Whether ``number`` more units are available to this address."""
        return self.taken + number <= self.most and self._of[address] + number <= self._share

    def take(self, address: str, number: int = 1) -> None:
        """Take ``number`` units for an address, even beyond the limit."""
        self.taken += number
        self._of[address] += number

    def give_back(self, address: str, number: int = 1) -> None:
        """Return ``number`` units from an address to the pool."""
        self.taken -= number
        self._of[address] -= number
        if not self._of[address]:  # or entries of former clients would pile up
            del self._of[address]


class Hold:
    """Memory reservation of one request; it grows as bytes arrive, and is released as a whole."""

    def __init__(self, pool: Pool, address: str) -> None:
        self._pool, self._address, self.num_bytes = pool, address, 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether the reservation may grow by ``num_bytes``."""
        return self._pool.has(self._address, num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Grow the reservation by ``num_bytes``, or shrink it if that is negative.

        This works beyond the limit too, because an answer is held in any case.
        """
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


# --- admission -------------------------------------------------------------------------------------------------------


class Admission:
    """Counts a model's requests and work in flight, estimates its throughput, and decides whether to admit a request.

    Work is measured in bytes, which grow with the number of rows and the length of texts. ``slots`` is the number of
    requests that the model computes at once, or 0 if it is not known. With ``slots``, a request is refused if four
    times as many are in flight. Without ``slots``, it is refused if it would wait longer than ``max_wait`` seconds at
    the recent throughput. Even then, it is always admitted if fewer than 16 requests are in flight, and never if 1024
    are.

    With ``slots``, one client address may use all places as long as no other needs one. Once another address that has
    less than the part ``share`` was refused, the former gets no more than ``share`` for some seconds.
    """

    def __init__(
        self, max_wait: float, *, slots: int = 0, share: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_requests = 0
        self._most, self._share = PER_SLOT * slots, max(1, int(PER_SLOT * slots * share))
        self._of: Counter[str] = Counter()  # requests in flight, by address
        self._refused, self._refused_at = "", -_MEMORY  # the last address that was refused with less than its share
        self._max_wait, self._clock = max_wait, clock
        self._work = 0.0  # in flight
        self._done = self._spent = 0.0  # decayed sums: work done, and the seconds with any in flight
        self._last = clock()

    def refuse(self, num_bytes: int, address: str = "") -> float | None:
        """Return ``None`` if a request of ``num_bytes`` is admitted now, else the seconds after which to retry it."""
        self._advance()
        if self._most:
            is_below = self._of[address] < self._share
            is_wanted = self._refused != address and self._last - self._refused_at < _MEMORY
            if self.num_requests < self._most and (is_below or not is_wanted):
                return None
            if is_below:
                self._refused, self._refused_at = address, self._last
            return self._next_end()
        if self.num_requests < FEW:
            return None
        if self.num_requests >= MANY:
            return 1.0
        wait = self._wait(num_bytes)
        return min(wait - self._max_wait, MOST_SECONDS) if wait > self._max_wait else None

    def enter(self, num_bytes: int, address: str = "") -> None:
        """Count a request of ``num_bytes`` as in flight."""
        self._advance()
        self.num_requests += 1
        self._of[address] += 1
        self._work += num_bytes + A_REQUEST

    def leave(self, num_bytes: int, address: str = "", *, is_done: bool) -> None:
        """Record that a request ended. If it was lost or got an error (not ``is_done``), its work was not done."""
        self._advance()
        self.num_requests -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]
        self._work -= num_bytes + A_REQUEST
        if is_done:
            self._done += num_bytes + A_REQUEST

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for one of the model's ``slots``; False if these are not known."""
        return bool(self._most) and self.num_requests > self._most // PER_SLOT

    @property
    def is_full(self) -> bool:
        """Whether the model has at least ``slots`` requests in flight; False if its ``slots`` are not known."""
        return bool(self._most) and self.num_requests >= self._most // PER_SLOT

    def _next_end(self) -> float:
        """Estimate after how many seconds the next of the requests in flight ends."""
        return min(max(1.0, self._wait(0) / self.num_requests), MOST_SECONDS)

    def _wait(self, num_bytes: int) -> float:
        if self._spent < _ENOUGH:
            return 0.0
        return (self._work + num_bytes + A_REQUEST) * self._spent / max(self._done, 1.0)

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._last = now - self._last, now
        if self.num_requests and seconds > 0:
            weight = max(0.0, 1 - seconds / _MEMORY)
            self._done *= weight
            self._spent = self._spent * weight + seconds
