"""Heartbeat of a model's process: the start time of its current batch, in a file that a watchdog reads.

From outside, a process that hangs looks like an idle one: only the process itself knows that it has a request.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

VARIABLE = "SHOAL_BEACONS"  # names the folder, in the server's environment
_SINCE = struct.Struct("<d")  # start of the current batch, seconds on the machine's monotonic clock; 0 while idle


class Beacon:
    """Writer of this process's heartbeat, to a file of the folder ``SHOAL_BEACONS`` that is named by process id."""

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        self._file = (Path(folder) / str(os.getpid())).open("wb", buffering=0) if folder else None
        self.close_batch()

    def open_batch(self) -> None:
        """Record that a batch begins."""
        self._tell(time.monotonic())

    def close_batch(self) -> None:
        """Record that the batch is answered."""
        self._tell(0.0)

    def _tell(self, since: float) -> None:
        if self._file is not None:
            os.pwrite(self._file.fileno(), _SINCE.pack(since), 0)

    def close(self) -> None:
        """Close the file; called when the model is unloaded."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_beacon(folder: Path, pid: int) -> float | None:
    """Return the start time of a process's current batch; 0 while it is idle, None if it has no heartbeat."""
    try:
        content = (folder / str(pid)).read_bytes()
    except OSError:
        return None
    return float(_SINCE.unpack(content)[0]) if len(content) == _SINCE.size else None
