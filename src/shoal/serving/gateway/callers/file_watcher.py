"""Files of a running service that are read again when they change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal.errors import ShoalError
from shoal.serving.gateway.logs import log

_PERIOD = 1.0  # seconds between two looks at the files
_AGAIN = 60.0  # seconds between two lines about damaged files


class WatchedFiles:
    """Content of files that a service follows: ``read`` reads it, and ``take`` puts it into effect.

    If the files are damaged or missing, what was read before stays; ``stays`` says so in the log. ``clock`` is the time
    in seconds since 1970.

    Raises:
        InputError, ArtifactError: the files cannot be read now, as ``read`` says.
    """

    stays = ""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self._paths, self._clock = paths, clock
        self.is_damaged, self._told = False, 0.0
        self._seen = self._look()
        self.take(self.read())

    def read(self) -> Any:
        """Read the files, in any thread."""
        raise NotImplementedError

    def take(self, found: Any) -> None:
        """Put what was read into effect."""
        raise NotImplementedError

    async def follow(self, after: Callable[[], object] = lambda: None) -> NoReturn:
        """Follow the files. ``after`` is called after each look."""
        while True:
            await asyncio.sleep(_PERIOD)
            await self.look()
            after()

    async def look(self) -> None:
        """Read the files again if they have changed, or if they were damaged."""
        seen = await asyncio.to_thread(self._look)
        if seen == self._seen and not self.is_damaged:
            return
        try:
            found = await asyncio.to_thread(self.read)
        except ShoalError as error:
            if not self.is_damaged or self._clock() - self._told >= _AGAIN:
                self._told = self._clock()
                log.error("%s: %s", self.stays, error)
            self.is_damaged = True
            return
        if await asyncio.to_thread(self._look) != seen:
            return  # they are being replaced: the next look sees what belongs together
        self._seen, self.is_damaged = seen, False
        self.take(found)
        log.info("Read again: %s.", ", ".join(map(str, self._paths)))

    def _look(self) -> list[tuple[int, ...]]:
        return [_identify(path) for path in self._paths]


def _identify(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
