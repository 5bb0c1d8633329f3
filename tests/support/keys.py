"""Files of keys for tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shoal.clients.keys import make_key, read_id
from shoal.serving.gateway.callers.key_file import KeyFile
from shoal.serving.gateway.callers.key_ring import KeyRing
from tests.support.gates import CONFIGS

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


class World:
    """A file of keys, a ring that follows it, and their clock."""

    def __init__(self, folder: Path) -> None:
        self.now = NOW
        self.file = KeyFile(folder / "keys.json", lambda: self.now)
        self.key = self.file.new("team")

    def ring(self) -> KeyRing:
        # a minute passes between two looks: no address has too many wrong keys
        return KeyRing(self.file.path, CONFIGS, lambda: self.now.timestamp(), itertools.count(0, 60).__next__)


def bearer(key: str) -> str:
    return f"Bearer {key}"


def bad_keys(world: World) -> list[list[str]]:
    """Return the values of ``Authorization`` headers, none of which is good."""
    key = world.key
    expired = world.file.new("old", span=timedelta(seconds=1))
    revoked = world.file.new("gone")
    world.file.revoke("gone")
    world.now += timedelta(seconds=2)
    swapped = key[:19] + make_key("0" * 12)[19:]
    values = [
        "", "Bearer", "Bearer ", bearer(key[:-1]), bearer(key[:40]), bearer(f"{key}0"), bearer(f"{key} "), key,
        f"Basic {key}", bearer("schlüssel"), bearer(key.upper()), bearer(swapped), bearer(make_key(read_id(key))),
        bearer(make_key("0" * 12)), bearer(expired), bearer(revoked), f"Bearer  {key}", f"{bearer(key)}, {bearer(key)}",
    ]  # fmt: skip
    return [[], [bearer(key), bearer(key)], *([value] for value in values)]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def make_path(pattern: str) -> str:
    """Return a path that a route has."""
    return (
        pattern.replace("(?:/versions/(?P<version>[^/]+))?", "")
        .replace("(?P<model>[^/]+(?:/[^/]+)?)", "plain")
        .replace("(?P<model>[^/]+)", "plain")
    )
