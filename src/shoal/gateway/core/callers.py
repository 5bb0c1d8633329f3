"""Clients of the service: who sends a request, and what they may do."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum


class Scope(Enum):
    """Kind of request, which a caller needs permission for."""

    HEALTH = "health"  # whether the server and its models are ready
    READ = "read"  # metadata, configuration and statistics
    INFER = "infer"


@dataclass(frozen=True)
class Caller:
    """Client of the service. Its shares of memory, streams and connections are counted under ``id``.

    Without keys, a caller is an IP address. ``models`` are the models that it may ask; None: all that are exposed.
    """

    id: str
    address: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)
    models: frozenset[str] | None = None


ANYONE = Caller("")


class Callers:
    """Finds the caller of a request, once, when the request arrives."""

    def __init__(self, trusted_proxies: Container[str]) -> None:
        self.trusted_proxies = trusted_proxies

    def find(self, peer: str, forwarded: Iterable[str] = ()) -> Caller:
        """Return the caller at the address ``peer`` or, if that is a trusted proxy, the one for whom it asks.

        ``forwarded`` are the values of ``X-Forwarded-For``. The last address in them that is not a trusted proxy is the
        caller's.
        """
        if peer in self.trusted_proxies:
            hops = [hop.strip() for line in forwarded for hop in line.split(",")]
            while peer in self.trusted_proxies and hops:
                peer = hops.pop()
        return Caller(peer, peer)
