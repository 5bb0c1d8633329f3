"""Clients of the service: who sends a request, and what they may do."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from shoal.serving.gateway.addresses import find_client, read_address
from shoal.serving.gateway.refusals import keyless

if TYPE_CHECKING:
    from shoal.serving.gateway.callers.accounts import Account, Together


class Scope(Enum):
    """Kind of request, which a caller needs permission for."""

    OPEN = "open"  # whether the service lives and is ready: for everybody
    HEALTH = "health"  # whether a model is ready
    READ = "list"  # metadata, configuration and statistics
    INFER = "infer"
    METRICS = "metrics"


@dataclass(frozen=True)
class Caller:
    """Client of the service. Its shares of memory, streams and connections are counted under ``id``.

    Without keys, a caller is an IP address, or 64 bits of one. With keys, it is a key, whose text has the SHA-256
    ``digest``; a client without a valid one is not ``is_known``, and ``fault`` says why. ``models`` are the models that
    it may ask; None: all that are exposed. ``name`` is the key's name, and ``retry_after`` the seconds for which an
    address that has sent too many wrong keys has to wait.
    """

    id: str
    address: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)
    models: frozenset[str] | None = None
    is_known: bool = True
    digest: str = field(default="", repr=False)
    name: str = ""
    fault: str = ""
    retry_after: float = 0.0
    account: Account | None = field(default=None, repr=False, compare=False)
    together: Together | None = field(default=None, repr=False, compare=False)  # the request of which it sends parts

    @property
    def limits(self) -> Account | Together | None:
        """Limits of the caller's key, which count the parts of one request as one."""
        return self.together or self.account

    @property
    def owner(self) -> tuple[str, str]:
        """Mark of the requests that a caller may stop: those of its key or, without one, of its whole address."""
        return self.id, "" if self.digest else self.address


ANYONE = Caller("")


class Keys(Protocol):
    """Keys that clients need; ``KeyRing`` has this interface."""

    def find(self, address: str, authorizations: Iterable[str]) -> Caller:
        """Return the caller with the key in the only ``Authorization`` header, or one that is not known."""

    def is_valid(self, caller: Caller) -> bool:
        """Whether a caller's key is valid, and still allows what it allowed."""


class Callers:
    """Finds the caller of a request, once, when the request arrives."""

    def __init__(self, trusted_proxies: Container[str], keys: Keys | None = None) -> None:
        self.trusted_proxies, self.keys = trusted_proxies, keys
        self._watched: dict[object, tuple[Caller, Callable[[], object]]] = {}

    def find(self, peer: str, forwarded: Iterable[str] = (), authorizations: Iterable[str] = ()) -> Caller:
        """Return the caller at the address ``peer`` or, if that is a trusted proxy, the one for whom it asks.

        ``forwarded`` are the values of ``X-Forwarded-For``. The last address in them that is not a trusted proxy is the
        caller's. ``authorizations`` are the values of ``Authorization``.
        """
        peer = read_address(peer) or peer
        if peer in self.trusted_proxies:
            hops = [hop for line in forwarded for hop in line.split(",")]
            while peer in self.trusted_proxies and hops and (hop := read_address(hops.pop())):
                peer = hop
        return Caller(find_client(peer), peer) if self.keys is None else self.keys.find(peer, authorizations)

    def is_valid(self, caller: Caller) -> bool:
        """Whether a caller may still do what it could when it was found."""
        return self.keys is None or not caller.is_known or self.keys.is_valid(caller)

    def check_valid(self, caller: Caller) -> None:
        """Raise ``RefusedError`` if the caller's key was revoked, changed or has expired since it was found."""
        if not self.is_valid(caller):
            raise keyless()

    @contextmanager
    def watch(self, caller: Caller, end: Callable[[], object]) -> Iterator[None]:
        """Call ``end`` if the caller's key is revoked, changed or expires within the context."""
        if self.keys is None or not caller.is_known:
            yield
            return
        mark = object()
        self._watched[mark] = caller, end
        try:
            yield
        finally:
            self._watched.pop(mark, None)

    def end_invalid(self) -> None:
        """End what is watched of callers whose keys are no longer valid."""
        for mark, (caller, end) in list(self._watched.items()):
            if not self.is_valid(caller):
                del self._watched[mark]
                end()
