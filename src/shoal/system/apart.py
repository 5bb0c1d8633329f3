"""Work in a forked process, whose memory goes back with its end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def run_apart(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a forked process: what it loads is not in this one. Its errors are raised here.

    Raises:
        BrokenProcessPool: the process was killed.
    """
    # A finalizer may wait for a thread, which a forked process does not have: it would wait there for ever.
    gc.collect()
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(function, *args).result()
