"""Serve a model repository with all front ends."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from shoal.serving.gateway.control.service import Service
from shoal.serving.gateway.fronts import open_fronts
from shoal.serving.gateway.options import Addresses, Options

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's mallopt


def run_service(repository: Path | str, options: Options, on_ready: Callable[[Addresses, Path], None]) -> int:
    """Serve ``repository`` until SIGTERM or SIGINT; return the exit code.

    The service runs on a copy of its own (see ``server/snapshot.py``). ``on_ready`` is called with the service's
    addresses and this copy when all models are ready. After the first signal, the service refuses new requests and
    waits for the requests in flight. A second signal ends the wait.

    Raises:
        InputError: Triton does not support the path, or there is no repository.
        SetupError: a port is taken, or this machine cannot run the server.
        ServerError: a model did not load, or no server could be started for ten minutes.
    """

    def begin(at: Addresses, folder: Path) -> None:
        on_ready(at, folder)
        gc.freeze()  # modules and models: a full collection would stop the event loop for 40 ms to look at them

    # By default, glibc keeps blocks of megabytes that were freed for later, for each thread that has had one.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 2**19)
        libc.mallopt(_ARENA_MAX, 2)
    return Service(Path(repository).resolve(), options, open_fronts).run(begin)
