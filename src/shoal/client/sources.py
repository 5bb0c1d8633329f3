"""Answers of one streamed request, read one at a time, each within its own time.

Nothing is read ahead: a caller that does not read stops the server through the flow control of its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, Protocol

from shoal.client.calls import Answer
from shoal.client.failures import CallError, Kind


class Source(Protocol):
    """Reads the answers of one request; any thread may cancel it, also during a read."""

    def read(self, seconds: float) -> Answer | None:
        """Return the next answer within ``seconds``; None after the last or a cancellation; or raise ``CallError``."""

    def cancel(self) -> None:
        """End the request."""


class AsyncSource:
    """Reads answers from an asynchronous generator; the request ends when the generator ends or is closed."""

    def __init__(self, answers: AsyncGenerator[Answer, None]) -> None:
        self._answers = answers
        self._reading: asyncio.Future[Answer | None] | None = None
        self._cancelled = asyncio.Event()

    async def read(self, seconds: float) -> Answer | None:
        """Return the next answer within ``seconds``, None after the last; or raise ``CallError``."""
        if self._cancelled.is_set():
            return None
        self._reading = asyncio.ensure_future(anext(self._answers, None))
        try:
            return await asyncio.wait_for(self._reading, seconds)
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while waiting") from None
        except asyncio.CancelledError:
            if not self._cancelled.is_set():  # the reader's own task was
                raise
            return None

    def cancel(self) -> asyncio.Future[Any]:
        """End the request; returns what to await for it to be done."""
        self._cancelled.set()
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
            return self._reading
        return asyncio.ensure_future(self._answers.aclose())


class LoopSource:
    """The same for threads: reads in an event loop that another thread runs."""

    def __init__(self, source: AsyncSource, loop: asyncio.AbstractEventLoop) -> None:
        self._source, self._loop = source, loop
        self._reading: Future[Answer | None] | None = None

    def read(self, seconds: float) -> Answer | None:
        self._reading = asyncio.run_coroutine_threadsafe(self._source.read(seconds), self._loop)
        try:
            return self._reading.result()
        except CancelledError:
            return None

    def cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel()  # its reader is released even if the loop stops first
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its connections with it
            self._loop.call_soon_threadsafe(self._source.cancel)


class WatchedSource:
    """Reads from a blocking iterator; a thread cancels the request when an answer is late.

    ``receive`` makes the iterator, which reads within ``watch``. gRPC itself limits the time of a whole stream alone.
    """

    def __init__(self, receive: Callable[[WatchedSource], Generator[Answer, None, None]]) -> None:
        self._answers = receive(self)
        self._cancel: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._deadline = self._wakes_at = math.inf  # of the answer that is waited for; and of the thread
        self._is_late = self._is_over = False

    def read(self, seconds: float) -> Answer | None:
        self._set_deadline(time.monotonic() + seconds)
        try:
            return next(self._answers, None)
        except CallError as failure:
            raise CallError(Kind.TIMEOUT, "while waiting") if self._is_late else failure from None
        finally:
            self._set_deadline(math.inf)

    @contextmanager
    def watch(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call ``cancel`` when an answer is late, and at the end of the block."""
        self._cancel = cancel
        threading.Thread(target=self._watch, args=[cancel], name="shoal-stream", daemon=True).start()
        try:
            yield
        finally:
            self._stop()

    def _set_deadline(self, deadline: float) -> None:
        with self._changed:
            self._deadline = deadline
            if deadline < self._wakes_at:  # later ones are seen when the thread wakes
                self._changed.notify()

    def _watch(self, cancel: Callable[[], object]) -> None:
        with self._changed:
            while not self._is_over:
                self._wakes_at = self._deadline
                self._changed.wait(min(max(0, self._wakes_at - time.monotonic()), threading.TIMEOUT_MAX))
                if self._deadline <= time.monotonic():
                    self._is_late = self._is_over = True
        cancel()

    def _stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._cancel()

    def cancel(self) -> None:
        self._stop()
        with contextlib.suppress(ValueError):  # it is being read, by a thread that sees the end itself
            self._answers.close()
