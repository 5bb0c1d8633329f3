"""Quarantine of requests that may have killed a process."""

from __future__ import annotations

import hashlib
import time

from shoal.gateway.logs import log

SECONDS = 60.0  # for which identical bytes are refused
_MOST = 1024


class Suspects:
    """Digests of quarantined requests, with expiry."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}  # by digest

    def add(self, model: str, body: bytes) -> None:
        """Refuse requests with these bytes until they expire."""
        now = time.monotonic()
        recent = [(digest, end) for digest, end in self._ends.items() if end > now]
        self._ends = {**dict(recent[-_MOST:]), _digest(model, body): now + SECONDS}
        log.error("A request of %d bytes to %s may have killed a process; its bytes are refused.", len(body), model)

    def has(self, model: str, body: bytes) -> bool:
        """Whether these bytes are refused now."""
        return bool(self._ends) and self._ends.get(_digest(model, body), 0.0) > time.monotonic()


def _digest(model: str, body: bytes) -> bytes:
    digest = hashlib.blake2b(f"{model}\0".encode(), digest_size=16)
    digest.update(body)
    return digest.digest()
