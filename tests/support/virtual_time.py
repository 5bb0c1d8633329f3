"""Event loop whose clock jumps to the next timer instead of waiting, so that pauses of minutes take milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from selectors import DefaultSelector
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
MOST_SECONDS = 3000.0  # of virtual time for a test
DEADLOCK_SECONDS = 20.0  # of real time without any event


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop with virtual time. Work for threads runs in the loop, ``thread_seconds`` of virtual time later.

    ``patience`` is how long the loop waits for sockets, in real seconds, before its clock jumps.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.now, self.thread_seconds = 1000.0, 0.0
        selector = DefaultSelector()
        wait = selector.select

        def select(timeout: float | None = None) -> Any:
            events = wait(min(patience, timeout) if timeout is not None else DEADLOCK_SECONDS)
            if not events and timeout is None:
                raise RuntimeError("No task of this loop will ever run again.")
            if not events and timeout:
                self.now += timeout
            return events

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def run_in_executor(self, _: Any, function: Callable[..., Any], *arguments: Any) -> Any:  # type: ignore[override]
        """Run a function in the loop instead of a thread."""
        future = self.create_future()

        def work() -> None:
            try:
                result = function(*arguments)
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.call_later(self.thread_seconds, work)
        return future


def run(work: Coroutine[Any, Any, T], patience: float = 0.0) -> T:
    """Run a coroutine in virtual time, which ``time.monotonic`` returns too, for at most 3000 s of it."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(patience)) as runner:
        loop = runner.get_loop()
        with patch.object(time, "monotonic", loop.time):
            return runner.run(asyncio.wait_for(work, MOST_SECONDS))


async def settle() -> None:
    """Let all other tasks run until they wait for time or for one another."""
    for _ in range(20):
        await asyncio.sleep(0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
