"""Answers of a streamed request: read from a connection one at a time, and handed to callers.

Nothing is read ahead. If a caller does not read, the flow control of the connection makes the server wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, Self

from shoal.clients.client.calls import Answer, Call
from shoal.clients.client.failures import CallError, Kind, Peer, explain
from shoal.clients.client.flow import Attempts, ClientOptions
from shoal.errors import ShoalError

# --- answers for callers --------------------------------------------------------------------------------------------


class Course:
    """Sans-I/O state of one streamed request: the time-out of the next answer, and the retry after a failure."""

    def __init__(
        self,
        call: Call,
        settings: ClientOptions,
        between: float | None,
        note_refusal: Callable[[ShoalError, str], None],
    ) -> None:
        self.call = call
        self._settings, self._note_refusal = settings, note_refusal
        self._attempts: Attempts | None = None
        timeout = settings.timeout if call.timeout is None else call.timeout
        self._between = timeout if between is None else between
        self._has_begun = False

    @property
    def seconds(self) -> float:
        """Seconds within which the next answer must come; for the first answer, counted from the first read."""
        if self._has_begun:
            return self._between
        if self._attempts is None:
            self._attempts = Attempts(self.call, self._settings)
        return self._attempts.left

    def note_answer(self) -> None:
        """Note that an answer has come; from now on the request is not sent again."""
        self._has_begun = True

    def pause(self, failure: CallError) -> float:
        """Return the seconds to wait before the request is sent again.

        Raises:
            ShoalError: the request is not sent again. This is the error that callers get.
        """
        assert self._attempts is not None
        pause = None if self._has_begun else self._attempts.pause(failure)
        if pause is not None:
            return pause
        raise self._explain(failure, self._attempts.server) from None

    def _explain(self, failure: CallError, server: Peer) -> ShoalError:
        if self._has_begun:
            server = server._replace(seconds=self._between, has_begun=True)
        error = explain(failure, self.call, server)
        self._note_refusal(error, self.call.model)
        return error


class Replies(Iterator[Answer]):
    """Answers of one request, in order, as they come; made by ``Client.stream``::

        with client.stream("my_model", TEXT=["A text."]) as replies:
            for answer in replies:
                print(answer["WORD"])

    Leaving the loop or the ``with`` block early, or dropping the object, ends the request on the server. Answers that
    came before an error are returned before it is raised. One thread reads; any thread may cancel.
    """

    def __init__(self, course: Course, open_source: Callable[[Call], LoopSource | WatchedSource]) -> None:
        self._course, self._open_source = course, open_source
        self._source: LoopSource | WatchedSource | None = None
        self._end: BaseException | None = None  # raised by a read once the stream is over

    def __next__(self) -> Answer:
        try:
            while self._end is None:
                if self._source is None:
                    self._source = self._open_source(self._course.call)
                try:
                    answer = self._source.read(self._course.seconds)
                except CallError as failure:
                    if self._end is None:  # else the stream was cancelled during the wait
                        self._source = None
                        time.sleep(self._course.pause(failure))
                else:
                    if answer is None:
                        break
                    self._course.note_answer()
                    return answer
        except BaseException:  # also an interrupt
            self.cancel()
            raise
        self.cancel()
        raise self._end or StopIteration

    def cancel(self) -> None:
        """End the request, if it has not ended; the iteration ends too."""
        self._stop(StopIteration())

    def close(self) -> None:
        """End the request, as ``cancel`` does."""
        self.cancel()

    def _stop(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
            if self._source is not None:
                self._source.cancel()

    def __del__(self) -> None:
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncReplies(AsyncIterator[Answer]):
    """Answers of one request, in order, as they come; made by ``AsyncClient.stream``::

        async with client.stream("my_model", TEXT=["A text."]) as replies:
            async for answer in replies:
                print(answer["WORD"])

    Leaving the ``async with`` block early ends the request on the server, and so does cancelling the task that reads.
    Answers that came before an error are returned before it is raised.
    """

    def __init__(
        self, open_course: Callable[[], Awaitable[Course]], open_source: Callable[[Call], AsyncSource]
    ) -> None:
        self._open_course, self._open_source = open_course, open_source
        self._course: Course | None = None
        self._source: AsyncSource | None = None
        self._end: BaseException | None = None
        self._ending: asyncio.Future[Any] | None = None

    async def __anext__(self) -> Answer:
        try:
            while self._end is None:
                self._course = self._course or await self._open_course()
                if self._source is None:
                    self._source = self._open_source(self._course.call)
                try:
                    answer = await self._source.read(self._course.seconds)
                except CallError as failure:
                    if self._end is None:
                        self._source = None
                        await asyncio.sleep(self._course.pause(failure))
                else:
                    if answer is None:
                        break
                    self._course.note_answer()
                    return answer
        except BaseException:
            self.cancel()
            raise
        self.cancel()
        raise self._end or StopAsyncIteration

    def cancel(self) -> None:
        """End the request, if it has not ended; the iteration ends too. Call it in the client's event loop."""
        self._stop(StopAsyncIteration())

    async def close(self) -> None:
        """End the request, as ``cancel`` does, and wait until the connection is free."""
        self.cancel()
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)

    def _stop(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
            if self._source is not None:
                self._ending = self._source.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# --- answers of a connection ----------------------------------------------------------------------------------------


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
