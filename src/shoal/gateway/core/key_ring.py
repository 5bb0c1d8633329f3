"""The keys of a running service, which follow their file."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from shoal.gateway.core.callers import Caller, Scope
from shoal.gateway.core.following import Followed
from shoal.gateway.key_file import Key, KeyFile
from shoal.gateway.logs import log
from shoal.keys import hash_key, read_id

_BEARER = re.compile(r"(?i:Bearer) ([!-~]{1,200})", re.ASCII)
_OPEN = frozenset({Scope.OPEN})


class KeyRing(Followed):
    """Keys of the file ``path`` for a repository with ``models``. ``clock`` is the time in seconds since 1970.

    Raises:
        InputError: there is no such file, or other users can read it.
        ArtifactError: the file is damaged.
    """

    stays = "The keys stay as they were"

    def __init__(self, path: Path, models: Collection[str], clock: Callable[[], float] = time.time) -> None:
        self._file, self._models = KeyFile(path), models
        self._keys: dict[str, tuple[Key, frozenset[Scope], frozenset[str] | None]] = {}
        super().__init__([path], clock)

    def read(self) -> list[Key]:
        """Read the file of keys."""
        return self._file.read()

    def take(self, keys: Iterable[Key]) -> None:
        """Put keys into effect, in place of all earlier ones."""
        found = {}
        for key in keys:
            for pattern in key.models:
                if not any(fnmatchcase(name, pattern) for name in self._models):
                    log.warning("The key %s may use %s, and no model has such a name.", key.name, pattern)
            scopes = _OPEN | {Scope.HEALTH} | {Scope(act) for act in key.may}
            models = {name for name in self._models for pattern in key.models if fnmatchcase(name, pattern)}
            found[key.id] = key, scopes, None if "*" in key.models else frozenset(models)
        self._keys = found

    def find(self, address: str, authorizations: Iterable[str]) -> Caller:
        """Return the caller with the key in the only ``Authorization`` header, or one that is not known."""
        given = [*authorizations]
        found = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        public = read_id(found[1]) if found else ""
        unknown = Caller(address, address, _OPEN, frozenset(), is_known=False)  # also for what is open to all
        return (found and public and self._make(public, address, hash_key(found[1]))) or unknown

    def is_valid(self, caller: Caller) -> bool:
        """Whether a caller's key is valid, and still allows what it allowed."""
        return self._make(caller.id, caller.address, caller.digest) == caller

    def _make(self, public: str, address: str, digest: str) -> Caller | None:
        if public not in self._keys:
            return None
        (key, scopes, models), now = self._keys[public], datetime.fromtimestamp(self._clock(), UTC)
        right = [hmac.compare_digest(secret.sha256, digest) and secret.is_valid(now) for secret in key.secrets]
        return Caller(public, address, scopes, models, digest=digest) if any(right) else None
