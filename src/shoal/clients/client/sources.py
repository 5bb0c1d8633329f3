"""Answers of a streamed request, read from a connection one at a time.

Nothing is read ahead. If a caller does not read, the flow control of the connection makes the server wait.
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
from typing import Any

from shoal.clients.client.calls import Answer
from shoal.clients.client.failures import CallError, Kind


class AsyncSource:
    """Reads answers from an asynchronous generator; the request ends when the generator ends or is closed."""

    def __init__(self, answers: AsyncGenerator[Answer, None]) -> None:
        self._answers = answers
        self._reading: asyncio.Future[Answer | None] | None = None
        self._cancelled = asyncio.Event()

    async def read(self, seconds: float) -> Answer | None:
        """Return the next answer, or None after the last one.

        Raises:
            CallError: the request failed, or no answer came within ``seconds``.
        """
        if self._cancelled.is_set():
            return None
        self._reading = asyncio.ensure_future(anext(self._answers, None))
        try:
            return await asyncio.wait_for(self._reading, seconds)
        except CallError as failure:
            self._reading = None
            raise failure.with_traceback(None) from None  # wait_for's frame holds the error, and others the request
        except TimeoutError:
            raise CallError(Kind.TIMEOUT, "while waiting") from None
        except asyncio.CancelledError:
            if not self._cancelled.is_set():  # the reader's own task was
                raise
            return None

    def cancel(self) -> asyncio.Future[Any]:
        """End the request; await the returned future to wait until it has ended."""
        self._cancelled.set()
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
            return self._reading
        return asyncio.ensure_future(self._answers.aclose())


class LoopSource:
    """Reads from an ``AsyncSource`` whose event loop runs in another thread. Any thread may cancel, even during a read.

    ``read`` returns the next answer, or None after the last answer or a cancellation.
    """

    def __init__(self, source: AsyncSource, loop: asyncio.AbstractEventLoop) -> None:
        self._source, self._loop = source, loop
        self._reading: Future[Answer | None] | None = None

    def read(self, seconds: float) -> Answer | None:
        self._reading = asyncio.run_coroutine_threadsafe(self._source.read(seconds), self._loop)
        try:
            return self._reading.result()
        except CancelledError:
            return None
        finally:
            self._reading = None  # or its error would hold this object, and the error's frames the request

    def cancel(self) -> None:
        reading = self._reading
        if reading is not None:
            reading.cancel()  # its reader is released even if the loop stops first
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its connections with it
            self._loop.call_soon_threadsafe(self._source.cancel)


class WatchedSource:
    """Reads from a blocking iterator; a second thread cancels the request when an answer is late, as gRPC cannot.

    ``receive`` makes the iterator, which must read inside ``with source.watch(cancel)``. ``read`` returns the next
    answer, or None after the last answer or a cancellation. Any thread may cancel, even during a read.
    """

    def __init__(self, receive: Callable[[WatchedSource], Generator[Answer, None, None]]) -> None:
        self._answers = receive(self)
        self._cancel: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._deadline = self._wakes_at = math.inf  # when the next answer is late; when the thread wakes
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
        """Call ``cancel`` when an answer is late, and in any case at the end of the ``with`` block."""
        self._cancel = cancel
        threading.Thread(target=self._watch, args=[cancel], name="shoal-stream", daemon=True).start()
        try:
            yield
        finally:
            self._stop()

    def _set_deadline(self, deadline: float) -> None:
        with self._changed:
            self._deadline = deadline
            if deadline < self._wakes_at:  # the thread sees a later deadline when it wakes
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
        with contextlib.suppress(ValueError):  # another thread is reading it, and sees the end itself
            self._answers.close()
