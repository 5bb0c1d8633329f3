"""Options of a service."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import NamedTuple

from shoal.authoring.repository.sizes import CACHE_MIB
from shoal.errors import InputError
from shoal.serving.gateway.addresses import read_address

HEALTH_CONNECTIONS = 64  # kept free for the health port
_OWN_DESCRIPTORS = 256  # for Triton, its processes' files and what the service itself opens
_MOST_CONNECTIONS = 4096  # more than one event loop can serve
CLOSING_SECONDS = 0.5  # for idle connections to close when the service stops
IDLE_SECONDS = 75.0  # that an HTTP connection may stay open without a request
STREAM_SECONDS = 300.0  # that a stream, or a gRPC connection, may stay open with nothing in flight
MOST_INFLATION = 100  # largest ratio of a body's inflated to its received bytes
RESTARTS_SECONDS = 600.0  # in which ``max_restarts`` are made without a pause


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
        object.__setattr__(self, "trusted_proxies", tuple(map(read_address, self.trusted_proxies)))

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


@dataclass(frozen=True)
class Options:
    """Options of ``shoal serve``.

    A port of 0 stands for any free port. With the file ``keys`` (see ``shoal keys``), clients need a key. The file
    ``audit`` gets a line for each request. Web pages of the origin ``cors`` may read answers. A ``host`` that is not a
    loopback address requires ``keys`` or ``is_open``. Without these, HTTP requests must be for a loopback name, or one
    of ``allowed_hosts``. With ``tls_cert`` and ``tls_key``, all ports speak TLS, and with ``client_ca``, clients need a
    certificate of these authorities. ``exposed`` names further models that clients may call, besides ensembles and
    models with the parameter ``public``. ``aliases`` gives models further names in OpenAI's API, by name. When the
    service stops, requests in flight have ``grace`` seconds to finish. A request that would wait longer than
    ``max_wait`` seconds is refused. ``limits`` are the limits for clients. ``model_memory_mib`` is the largest memory
    of each process of a model; 0 means no limit. ``cache_mib`` is the size of the cache that models with
    ``response_cache`` share. All models together may take ``load_seconds`` to load; None stands for 600, or the highest
    parameter ``load_seconds`` of a model. After more than ``max_restarts`` faults within ten minutes, the service
    pauses before it starts another server. If ``resends`` is true, a request that was in flight when its model died is
    resent once; it may then run twice. ``is_lenient`` passes members of ``generate`` requests that are no inputs of the
    model on as parameters, as Triton itself does.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    grace: float = 30.0
    max_wait: float = 10.0
    model_memory_mib: float = 0.0
    cache_mib: float = CACHE_MIB
    max_restarts: int = 10
    load_seconds: float | None = None
    resends: bool = True
    is_open: bool = False
    is_lenient: bool = False
    keys: Path | None = None
    audit: Path | None = None
    cors: str = ""
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    exposed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("grace", "max_wait", "load_seconds", "cache_mib"):
            if (value := getattr(self, name)) is not None:
                _check_option(name, value, value > 0, "Give more than 0.")
        for name in ("model_memory_mib", "max_restarts"):
            _check_option(name, getattr(self, name), getattr(self, name) >= 0, "Give 0 or more.")
        if self.is_open and self.keys:
            raise InputError("--open has no effect with --keys: clients of all machines need a key.", "Leave one out.")
        if not (self.is_open or self.keys or is_loopback(self.host)):
            raise InputError(
                f"--host {self.host} serves every client that reaches this machine, without a key.",
                "Give --keys FILE (made by: shoal keys new NAME); or --open, if a proxy or a firewall decides.",
            )
        if None in (tls := (self.tls_cert, self.tls_key)) and any((*tls, self.client_ca)):
            raise InputError("TLS needs a certificate and its key.", "Give both: --tls-cert FILE --tls-key FILE")
        for name in self.allowed_hosts:
            if self.takes_pages:
                raise InputError(f"--allow-host {name} has no effect: all hosts are allowed.", "Leave it out.")
            if not re.fullmatch(r"[0-9A-Za-z.-]+", name, re.ASCII):
                raise InputError(f"--allow-host {name!r:.80} is not a host.", "Give a name: --allow-host gpu-1.example")

        if self.cors and not re.fullmatch(r"https?://[^\s/?#@*]+", self.cors):
            raise InputError(f"--cors {self.cors!r:.80} is not an origin.", "Give one: https://app.example.com")
        if self.cors and not self.takes_pages:
            raise InputError(
                "--cors has no effect without --keys: the service refuses web pages of other machines.",
                "Give --keys FILE, so that the page needs a key; or --open.",
            )

    @property
    def takes_pages(self) -> bool:
        """Whether requests of other machines' web pages are answered: with ``is_open``, or with a key."""
        return self.is_open or self.keys is not None


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


class Addresses(NamedTuple):
    """Addresses of the service's three ports, each ``host:port``."""

    http: str
    grpc: str
    metrics: str
