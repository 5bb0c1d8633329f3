"""Answers of a streamed request for callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self

from shoal.clients.client.calls import Answer, Call
from shoal.clients.client.failures import CallError, Peer, explain
from shoal.clients.client.flow import Attempts, ClientOptions
from shoal.clients.client.sources import AsyncSource, LoopSource, WatchedSource
from shoal.errors import ShoalError


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
