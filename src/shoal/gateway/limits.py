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
A_REQUEST = 256  # bytes, the fixed cost of a request
_MEMORY = 10.0  # seconds of work over which the rate is averaged, recent ones weighing more
_ENOUGH = 0.5  # seconds of work before the rate is used


# --- options ---------------------------------------------------------------------------------------------------------


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
                _check_option(entry.name, value, value > 0, "Give more than 0.")
        _check_option("client_share", self.client_share, self.client_share <= 1, "Give at most 1, which is no limit.")
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


@dataclass(frozen=True)
class Options:
    """Options of a service. Ports of 0 are any free ones; a ``host`` other than loopback needs ``is_open``.

    ``exposed`` are models open to clients beside ensembles and public models. ``grace`` is how many seconds requests in
    flight have to finish once the service is stopped. Requests that would wait longer than ``max_wait`` seconds are
    refused. ``limits`` bound what clients may hold. ``model_memory_mib`` bounds each process of a model; 0 is no limit.
    ``load_seconds`` is how long all models may take to load, ``max_restarts`` how many faults within ten minutes are
    followed by another server without a pause. ``resends`` says whether a request in flight when its model died is
    resent, once; it may run twice.
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
        if not (self.is_open or _is_loopback(self.host)):
            raise InputError(
                f"--host {self.host} would serve every client that reaches this machine: there are no keys yet.",
                "Give --open as well if a proxy or a firewall decides who that is.",
            )


def _is_loopback(host: str) -> bool:
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


# --- admission -------------------------------------------------------------------------------------------------------


class Admission:
    """Counts a model's requests and work in flight, and estimates its throughput.

    Work is measured in bytes, which grow with rows and with the length of texts. A request is refused if, at the recent
    throughput, it would wait longer than ``max_wait`` seconds; or, with ``slots``, if four times as many are in flight.
    """

    def __init__(self, max_wait: float, *, slots: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self._most = PER_SLOT * slots
        self._max_wait, self._clock = max_wait, clock
        self._work = 0.0  # in flight
        self._done = self._spent = 0.0  # decayed sums: work done, and the seconds with any in flight
        self._last = clock()

    def refuse(self, num_bytes: int) -> float | None:
        """Return the seconds after which to retry a request of this size; ``None`` if it is admitted now."""
        self._advance()
        if self._most:
            return None if self.num_requests < self._most else self._next_end()
        if self.num_requests < FEW:
            return None
        if self.num_requests >= MANY:
            return 1.0
        wait = self._wait(num_bytes)
        return min(wait - self._max_wait, MOST_SECONDS) if wait > self._max_wait else None

    def enter(self, num_bytes: int) -> None:
        """Record that a request was sent."""
        self._advance()
        self.num_requests += 1
        self._work += num_bytes + A_REQUEST

    def leave(self, num_bytes: int, *, is_done: bool) -> None:
        """Record that a request ended; work that the server refused or lost does not count as done."""
        self._advance()
        self.num_requests -= 1
        self._work -= num_bytes + A_REQUEST
        if is_done:
            self._done += num_bytes + A_REQUEST

    @property
    def is_full(self) -> bool:
        """Whether all slots of the engine are taken."""
        return bool(self._most) and self.num_requests >= self._most // PER_SLOT

    def _next_end(self) -> float:
        """Estimate the seconds until one of the requests in flight has ended."""
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
