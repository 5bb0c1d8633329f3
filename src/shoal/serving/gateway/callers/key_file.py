"""File of the keys of a service's clients: their digests, rights and times, and the changes of ``shoal keys``.

Its JSON is ``{"keys": [{"name": "ci", "id": "0123456789ab", "models": ["*"], "may": ["infer", "list"], "secrets":
[{"sha256": "...", "created": "2026-01-01T00:00:00Z", "expires": null}], "limits": {"requests_per_minute": 60}}]}``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from shoal.clients.keys import hash_key, make_key
from shoal.errors import ArtifactError, InputError, SetupError, suggest
from shoal.system.files import parse_json, read_bytes, replace_file

ACTS = ("infer", "list", "metrics")  # what a key may do, besides asking whether models are ready
DEFAULT_ACTS = ("infer", "list")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,128}", re.ASCII)
_SPAN = re.compile(r"(\d{1,6})([smhd])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_MOST_BYTES = 2**20
_MOST = 10**9  # largest limit


@dataclass(frozen=True)
class Secret:
    """Digest of a key's whole text, and the time (UTC) from which the key is no longer valid; None: never."""

    sha256: str
    created: datetime
    expires: datetime | None = None

    def is_valid(self, now: datetime) -> bool:
        """Whether the secret has not expired."""
        return self.expires is None or now < self.expires


class KeyLimits(NamedTuple):
    """Limits of a key's requests for inference; 0 is none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    at_once: int = 0


@dataclass(frozen=True)
class Key:
    """A client's key: its name, its public id, the patterns of the models that it may use, and what it may do.

    It has several ``secrets`` only while it is rotated.
    """

    name: str
    id: str
    models: tuple[str, ...]
    may: tuple[str, ...]
    secrets: tuple[Secret, ...]
    limits: KeyLimits = field(default_factory=KeyLimits)


def read_span(option: str, text: str) -> timedelta:
    """Read a time such as ``90d`` or ``24h``.

    Raises:
        InputError: it is something else.
    """
    if not (found := _SPAN.fullmatch(text)):
        raise InputError(f"{option} {text!r} is not a time.", f"Give a number and s, m, h or d: {option} 24h")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def default_file() -> Path:
    """Return the file of ``shoal keys`` unless another is named: ``~/.config/shoal/keys.json``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "shoal" / "keys.json"


# --- changes -----------------------------------------------------------------------------------------------------


class KeyFile:
    """File of keys, with its changes; each one replaces the file atomically. ``clock`` gives the time in UTC."""

    def __init__(self, path: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.path, self._clock = path, clock

    def read(self) -> list[Key]:
        """Read the keys.

        Raises:
            InputError: there is no such file, or other users can read it.
            ArtifactError: the file is damaged.
        """
        path = self.path
        try:
            info = path.stat()
            mode = info.st_mode
            # a Secret of Kubernetes belongs to root, and is read by the group of the service
            private = 0o037 if info.st_uid == 0 != os.geteuid() else 0o077
            if stat.S_ISREG(mode) and mode & private:
                raise InputError(
                    f"Other users can read or write {path} (mode {stat.S_IMODE(mode):04o}).", f"chmod 600 {path}"
                )
            content = read_bytes(path, _MOST_BYTES)
        except FileNotFoundError:
            raise InputError(f"There is no file {path}.", f"Make a key: shoal keys new NAME --file {path}") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}.", "Name a file of keys.") from None
        try:
            return _parse(parse_json(content, object_pairs_hook=_unique))
        except ValueError as error:
            reason = "it is not JSON to its end" if isinstance(error, json.JSONDecodeError) else error
            raise ArtifactError(
                f"{path} is not a file of keys: {reason}.", "Correct it, or make another: shoal keys new NAME"
            ) from None

    def new(
        self,
        name: str,
        models: Sequence[str] = ("*",),
        may: Sequence[str] = DEFAULT_ACTS,
        span: timedelta | None = None,
        limits: Mapping[str, int | None] = {},
    ) -> str:
        """Add a key that is valid for ``span``; return its text, which is stored nowhere.

        ``limits`` are those of ``KeyLimits``, by name; None is no limit.

        Raises:
            InputError: a value is wrong, or there is a key of this name.
        """
        if not _NAME.fullmatch(name):
            raise InputError(f"{name!r:.80} is not a name.", "Give up to 64 letters, digits, dots, dashes: team-a")
        if wrong := next((each for each in models if not _PATTERN.fullmatch(each)), None):
            raise InputError(f"--models {wrong!r:.80} is not a pattern of names.", "For example: --models 'ensemble_*'")
        if wrong := next((each for each in may if each not in ACTS), None):
            raise InputError(f"--may {wrong!r:.80} is not known.", suggest(wrong, ACTS))
        if span is not None and not span:
            raise InputError("--expires 0 makes a key that is never valid.", "Give it time: --expires 90d")
        given = {name: number for name, number in limits.items() if number is not None}
        if wrong := next((name for name, number in given.items() if not 0 < number <= _MOST), None):
            option = f"--{wrong.replace('_', '-')}"
            raise InputError(f"{option} {given[wrong]} is out of range.", f"Give 1 to {_MOST}, or leave it out.")
        public = secrets.token_hex(6)
        with self._change(is_new=True) as keys:
            if any(key.name == name for key in keys):
                file = f" --file {self.path}" if self.path != default_file() else ""
                raise InputError(
                    f"{self.path} has a key {name} already.", f"Replace it: shoal keys rotate {name}{file}"
                )
            text, secret = self._make(public, span)
            keys.append(Key(name, public, tuple(models), tuple(sorted({*may})), (secret,), KeyLimits(**given)))
        return text

    def revoke(self, name: str) -> None:
        """Remove a key.

        Raises:
            InputError: there is no key of this name.
        """
        with self._change() as keys:
            keys.remove(self._find(keys, name))

    def rotate(self, name: str, overlap: timedelta) -> str:
        """Give a key another secret and return its text; earlier ones stay valid for ``overlap`` at most.

        The new secret is valid for as long as the last one was when it was made.

        Raises:
            InputError: there is no key of this name.
        """
        with self._change() as keys:
            key, now = self._find(keys, name), self._clock()
            last = key.secrets[-1]
            text, secret = self._make(key.id, last.expires - last.created if last.expires else None)
            old = [replace(each, expires=min(each.expires or now + overlap, now + overlap)) for each in key.secrets]
            kept = [each for each in old if each.is_valid(now)]
            keys[keys.index(key)] = replace(key, secrets=(*kept, secret))
        return text

    def _find(self, keys: Sequence[Key], name: str) -> Key:
        for key in keys:
            if key.name == name:
                return key
        raise InputError(f"{self.path} has no key {name!r:.80}.", suggest(name, [key.name for key in keys]))

    def _make(self, public: str, span: timedelta | None) -> tuple[str, Secret]:
        now, text = self._clock().replace(microsecond=0), make_key(public)
        latest = datetime.max.replace(tzinfo=UTC)
        return text, Secret(hash_key(text), now, now + min(span, latest - now) if span else None)

    @contextmanager
    def _change(self, *, is_new: bool = False) -> Iterator[list[Key]]:
        """Read the keys, and replace the file by those that the context leaves; one process at a time does so."""
        try:
            if is_new:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target = self.path.resolve()  # a link stays
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SetupError(f"{self.path.parent} cannot be used: {error.strerror}.", "Name another --file.") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            keys = [] if is_new and not target.exists() else self.read()
            yield keys
            text = json.dumps({"keys": [_to_json(key) for key in keys]}, indent=1)
            replace_file(target, f"{text}\n".encode())
            os.fsync(folder)
        except OSError as error:
            raise SetupError(f"{self.path} cannot be written: {error.strerror}.", "Name another --file.") from None
        finally:
            os.close(folder)


# --- the file's JSON ---------------------------------------------------------------------------------------------


def _to_json(key: Key) -> dict[str, Any]:
    given = [
        {"sha256": each.sha256, "created": show_time(each.created), "expires": show_time(each.expires)}
        for each in key.secrets
    ]
    limits = {name: number for name, number in key.limits._asdict().items() if number}
    own = {"name": key.name, "id": key.id, "models": [*key.models], "may": [*key.may]}
    return {**own, "secrets": given, "limits": limits}


def show_time(time: datetime | None) -> str | None:
    """Return a time as in ISO 8601, to the second, in UTC; None for None."""
    return None if time is None else f"{time.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat()}Z"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a field twice")
    return found


def _parse(document: Any) -> list[Key]:
    (entries,) = _take(document, "the file", keys=list)
    keys = [_parse_key(entry) for entry in entries]
    for values, what in (([key.name for key in keys], "name"), ([key.id for key in keys], "id")):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ValueError(f"it has the {what} {twice} twice")
    return keys


def _parse_key(entry: Any) -> Key:
    entry = {"limits": {}, **entry} if isinstance(entry, dict) else entry  # which a file without limits lacks
    name, public, models, may, given, limits = _take(
        entry, "a key", name=str, id=str, models=list, may=list, secrets=list, limits=dict
    )
    what = f"the key {name!r:.80}"
    is_right = _NAME.fullmatch(name) and re.fullmatch("[0-9a-f]{12}", public) and given
    if not is_right or any(not isinstance(each, str) or not _PATTERN.fullmatch(each) for each in models):
        raise ValueError(f"{what} has a wrong name, id, or pattern of models, or no secret")
    if any(each not in ACTS for each in may):
        raise ValueError(f"{what} may something else than {', '.join(ACTS)}")
    found = []
    for each in given:
        digest, created, expires = _take(each, what, sha256=str, created=str, expires=str | None)
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{what} has a wrong digest")
        found.append(Secret(digest, _parse_time(created, what), _parse_time(expires, what) if expires else None))
    if any(each not in KeyLimits._fields or type(limit) is not int or limit < 1 for each, limit in limits.items()):
        raise ValueError(f"{what} has a limit that is not a whole number of {', '.join(KeyLimits._fields)}")
    return Key(name, public, tuple(models), tuple(may), tuple(found), KeyLimits(**limits))


def _parse_time(text: str, what: str) -> datetime:
    with suppress(ValueError, OverflowError):  # beyond the years 1 to 9999 in UTC
        if (time := datetime.fromisoformat(text)).tzinfo is not None:
            return time.astimezone(UTC)
    raise ValueError(f"{what} has the time {text!r:.40}, which is not like 2026-01-31T12:00:00Z")


def _take(entry: Any, what: str, **fields: Any) -> list[Any]:
    """Return the values of an object that has these fields, of these types, and no others."""
    if not isinstance(entry, dict):
        raise ValueError(f"{what} is not an object")
    if odd := sorted(entry.keys() ^ fields.keys()):
        raise ValueError(f"{what} {'has an unknown' if odd[0] in entry else 'lacks the'} field {odd[0]!r:.60}")
    for name, kind in fields.items():
        if not isinstance(entry[name], kind):
            raise ValueError(f"{what} has a wrong {name!r}")
    return [entry[name] for name in fields]
