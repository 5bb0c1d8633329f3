"""The keys of a running service, which follow their file."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from shoal.clients.keys import hash_key, read_id
from shoal.serving.gateway.addresses import find_client
from shoal.serving.gateway.callers.accounts import Account, Failures
from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.file_watcher import WatchedFiles
from shoal.serving.gateway.callers.key_file import Key, KeyFile
from shoal.serving.gateway.logs import log

_BEARER = re.compile(r"(?i:Bearer) ([!-~]{1,200})", re.ASCII)
_OPEN = frozenset({Scope.OPEN})


class KeyRing(WatchedFiles):
    """Keys of the file ``path`` for a repository with ``models``.

    ``clock`` is the time in seconds since 1970; limits count by ``monotonic``.

    Raises:
        InputError: there is no such file, or other users can read it.
        ArtifactError: the file is damaged.
    """

    stays = "The keys stay as they were"

    def __init__(
        self,
        path: Path,
        models: Collection[str],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self._file, self._models = KeyFile(path), models
        self._keys: dict[str, tuple[Key, frozenset[Scope], frozenset[str] | None]] = {}
        self.accounts = dict[str, Account]()  # by the ids of the keys
        self._revoked, self._failures = dict[str, Key](), Failures(monotonic)
        self._monotonic = monotonic
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
        self._revoked |= {id_: key for id_, (key, *_) in self._keys.items() if id_ not in found}
        self._keys = found
        for id_, (key, *_) in found.items():
            self.accounts.setdefault(id_, Account(key.name, key.limits, self._monotonic)).limits = key.limits
        self.accounts = {id_: self.accounts[id_] for id_ in found}

    def find(self, address: str, authorizations: Iterable[str]) -> Caller:
        """Return the caller with the key in the only ``Authorization`` header, or one that is not known."""
        given = [*authorizations]
        found = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        public = read_id(found[1]) if found else ""
        name, fault = "", "malformed key" if given else "no key"
        if found and public:
            digest = hash_key(found[1])
            if caller := self._make(public, address, digest):
                return caller
            name, fault = self._explain(public, digest)
        wait = self._failures.add(find_client(address)) if given else 0.0
        # also for what is open to all
        return Caller(
            find_client(address), address, _OPEN, frozenset(), is_known=False, name=name, fault=fault, retry_after=wait
        )

    def _explain(self, public: str, digest: str) -> tuple[str, str]:
        """Return the name of a key that is not valid, if it once was, and why it is not."""
        is_here = public in self._keys
        key = self._keys[public][0] if is_here else self._revoked.get(public)
        if key is None or not any(hmac.compare_digest(each.sha256, digest) for each in key.secrets):
            return "", "unknown key"
        return key.name, "expired key" if is_here else "revoked key"

    def is_valid(self, caller: Caller) -> bool:
        """Whether a caller's key is valid, and still allows what it allowed."""
        return self._make(caller.id, caller.address, caller.digest) == caller

    def _make(self, public: str, address: str, digest: str) -> Caller | None:
        if public not in self._keys:
            return None
        (key, scopes, models), now = self._keys[public], datetime.fromtimestamp(self._clock(), UTC)
        right = [hmac.compare_digest(secret.sha256, digest) and secret.is_valid(now) for secret in key.secrets]
        if not any(right):
            return None
        account = self.accounts[public]
        return Caller(public, address, scopes, models, digest=digest, name=key.name, account=account)
