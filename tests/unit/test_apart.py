"""Work in a forked process."""

from __future__ import annotations

import gc
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from shoal.system.apart import run_apart


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self, ended: list[int]) -> None:
        self.own, self.ended = self, ended

    def __del__(self) -> None:
        self.ended.append(os.getpid())


def collect(ended: list[int]) -> tuple[int, list[int]]:
    gc.collect()
    return os.getpid(), ended


def test_finalizers_run_where_their_threads_are() -> None:
    ended = list[int]()
    Ring(ended)
    assert run_apart(collect, ended)[1] == ended == [os.getpid()]


def test_errors_and_kills_are_raised_here() -> None:
    assert run_apart(collect, [])[0] != os.getpid()
    with pytest.raises(ZeroDivisionError):
        run_apart(divmod, 1, 0)
    with pytest.raises(BrokenProcessPool):
        run_apart(signal.raise_signal, signal.SIGKILL)
