"""Options of a service: name, type, default and help of each, which ``shoal serve`` reads."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any, NamedTuple

from shoal.authoring.repository.launch_flags import CACHE_MIB
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


def option(default: Any, says: str, *names: str, metavar: str | None = None) -> Any:
    """Return a field that is an option of ``shoal serve``, called like the field unless ``names`` are given.

    An option with several values is a tuple, or a mapping whose values are given as ``NAME=VALUE``. ``default`` may be
    the type of an empty container.
    """
    made = {"default_factory" if isinstance(default, type) else "default": default}
    return field(**made, metadata={"help": says, "names": names, "metavar": metavar})


@dataclass(frozen=True)
class Limits:
    """Limits for clients; the defaults are in the table of ``docs/serving.md``.

    ``max_request_mib`` is the size after decompression. One client address gets at most the share ``client_share`` of
    the memory, the streams, the HTTP connections and the gRPC calls. A client that reads nothing of its answer for
    ``unread_seconds`` counts as disconnected.
    """

    max_request_mib: float = option(64.0, "The largest request, in MiB.")
    memory_mib: float = option(1024.0, "Memory for requests and answers, in MiB.")
    max_streams: int = option(256, "Open streams.")
    client_share: float = option(0.5, "Share of memory, connections and streams for one address.")
    trusted_proxies: tuple[str, ...] = option(
        (), "An address whose X-Forwarded-For is trusted; may be repeated.", "--trusted-proxy"
    )
    head_seconds: float = option(10.0, "Seconds for a request's head, or a stream's first message.")
    body_seconds: float = option(30.0, "Seconds for a body, plus one per --body-kib KiB.")
    body_kib: float = option(256.0, "KiB per second that a large body must reach.")
    unread_seconds: float = option(30.0, "Seconds for an answer that its client does not read.")

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
    """Options of ``shoal serve``, each with its help.

    A ``host`` that is not a loopback address requires ``keys`` or ``is_open``. Without these, HTTP requests must be for
    a loopback name, or one of ``allowed_hosts``. ``aliases`` gives models further names in OpenAI's API, by name. After
    more than ``max_restarts`` faults within ten minutes, the service pauses before it starts another server. A request
    that is resent may run twice.
    """

    http_port: int = option(8000, "Port for HTTP; 0: any free port.")
    grpc_port: int = option(8001, "Port for gRPC; 0: any free port.")
    metrics_port: int = option(8002, "Port for metrics; 0: any free port.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all addresses of this machine.")
    grace: float = option(30.0, "Seconds for requests in flight to finish when stopping.")
    max_wait: float = option(10.0, "Refuse requests that would wait longer, in seconds.")
    is_open: bool = option(False, "Accept clients and web pages of other machines, without keys.", "--open")
    keys: Path | None = option(
        None, "Answer only clients with a key of this file (`shoal keys`), which is followed.", metavar="FILE"
    )
    tls_cert: Path | None = option(
        None, "Certificate with its chain, in PEM: TLS on all ports. It is followed.", metavar="FILE"
    )
    tls_key: Path | None = option(None, "Key of the certificate, in PEM.", metavar="FILE")
    client_ca: Path | None = option(
        None, "Answer only clients with a certificate of these authorities, in PEM.", metavar="FILE"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Without keys: another host that requests may be for; may be repeated.", "--allow-host", metavar="NAME"
    )
    exposed: tuple[str, ...] = option(
        (), "Another model that clients may ask, beside ensembles and public models; may be repeated.", "--expose"
    )
    aliases: Mapping[str, str] = option(
        dict, "Another name of a model, for OpenAI's clients; may be repeated.", "--alias", metavar="NAME=MODEL"
    )
    model_memory_mib: float = option(0.0, "Memory of each model's process, in MiB; 0: no limit.")
    cache_mib: float = option(CACHE_MIB, "Memory of the cache of models with response_cache, in MiB.")
    max_restarts: int = option(10, "Restarts within ten minutes before further ones are delayed.")
    load_seconds: float | None = option(
        None, "Seconds that all models may take to load. Default: 600, or more if a model declares more."
    )
    resends: bool = option(True, "Resend a request once if its model died.", "--resend/--no-resend")
    is_lenient: bool = option(False, "Pass members of generate that are no inputs on, as Triton does.", "--lenient")
    audit: Path | None = option(None, "Write a JSON line for each request, without texts and keys.", metavar="FILE")
    cors: str = option("", "Let web pages of this origin read answers: https://app.example.com", metavar="ORIGIN")
    limits: Limits = field(default_factory=Limits, metadata={"panel": "Limits for clients"})

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
