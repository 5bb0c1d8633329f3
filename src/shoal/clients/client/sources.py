"""Answers of a streamed request, read from a connection one at a time.

Nothing is read ahead. If a caller does not read, the flow control of the connection makes the server wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from shoal.clients.client.calls import Answer, Call
from shoal.clients.client.failures import CallError, Kind

T = TypeVar("T")


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


class Looped:
    """Blocking transport: threads share an asynchronous one, whose event loop runs in a thread of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=[self._loop], name="shoal-client-loop", daemon=True)
        self._thread.start()
        self._transport = self._wait(_open(make))
        # Also ends a client that is dropped without close(). It does not wait: it may run in any thread.
        self._end = weakref.finalize(self, asyncio.run_coroutine_threadsafe, _end(self._transport), self._loop)

    def stream(self, call: Call) -> LoopSource:
        return LoopSource(self._transport.stream(call), self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also an interrupt
            future.cancel()
            raise
        finally:
            del future  # or its error would hold this frame, and the frame the error

    def close(self) -> None:
        self._end()
        self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _open(make: Callable[[], Any]) -> Any:
    return make()  # within the loop, which the transport belongs to


async def _end(transport: Any) -> None:
    await transport.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)  # cancelled streams end first
    asyncio.get_running_loop().stop()
