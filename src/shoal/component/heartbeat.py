"""Whether a model's process is at work, for whoever watches over it from outside.

A process that hangs looks like one that has nothing to do: only it knows that it was asked for something.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

VARIABLE = "SHOAL_BEACONS"  # names the folder, in the server's environment
_SINCE = struct.Struct("<d")  # when the batch under way began, by the machine's monotonic clock in seconds; 0: none is


class Beacon:
    """Tells since when this process has been running a batch, in a file of ``SHOAL_BEACONS`` that bears its id."""

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        self._file = (Path(folder) / str(os.getpid())).open("wb", buffering=0) if folder else None
        self.close_batch()

    def open_batch(self) -> None:
        """A batch begins."""
        self._tell(time.monotonic())

    def close_batch(self) -> None:
        """It is answered."""
        self._tell(0.0)

    def _tell(self, since: float) -> None:
        if self._file is not None:
            os.pwrite(self._file.fileno(), _SINCE.pack(since), 0)

    def close(self) -> None:
        """The model is unloaded."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_beacon(folder: Path, pid: int) -> float | None:
    """Since when that process has been running a batch; 0 while it runs none, ``None`` where it does not tell."""
    try:
        content = (folder / str(pid)).read_bytes()
    except OSError:
        return None
    return float(_SINCE.unpack(content)[0]) if len(content) == _SINCE.size else None
