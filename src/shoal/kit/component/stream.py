"""Streams of the answers to one request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Queue

from shoal.errors import ShoalError
from shoal.kit.component.base import Component, check_outputs
from shoal.kit.component.spec import BATCH_INDEX, Array, Arrays


class Stream:
    """Takes any number of answers to one request, then the end, and passes them on to the client. Thread-safe.

    A stream is closed once it was ended or its client has left (disconnected, or cancelled the request); then it takes
    no more answers. ``request_id`` is the id that the client gave the request: it may be empty, and is not unique.
    """

    most_ahead = 4  # answers of a hosted model that may wait to be passed on together

    def __init__(self, component: Component, num_rows: int, request_id: str = "") -> None:
        self.request_id = request_id
        self._component, self._num_rows = component, num_rows
        self._lock = threading.Lock()
        self._is_open = True
        self._has_left = False
        self.is_handed_over = False
        self._calls: list[Callable[[], None]] = []
        # The last answer if the client asks for the end, or what makes it: every declared output.
        self.farewell: Arrays | Callable[[], Arrays] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the stream still takes answers."""
        return self._is_open

    @property
    def has_left(self) -> bool:
        """Whether the client has left, that is, no longer wants answers."""
        return self._has_left

    def send(self, outputs: Arrays) -> bool:
        """Send one answer: every declared output, ``[rows, *dims]`` with the request's number of rows.

        With an output ``batch_index``, INT32 ``[1]``, an answer is to those rows of the request that it names.
        Returns False if the stream is closed; then stop computing answers. If an output differs from its declaration in
        ``config.pbtxt``, the stream ends with an error.
        """
        try:
            component = self._component
            is_indexed = isinstance(outputs, Mapping) and BATCH_INDEX in outputs
            rows = len(outputs[BATCH_INDEX]) if is_indexed else self._num_rows
            outputs = check_outputs(component.context.spec, outputs, rows, component.optional_outputs)
        except Exception as error:
            self.end(error)
            return False
        with self._lock:
            if self._is_open:
                self._deliver(outputs)
            return self._is_open

    def end(self, error: Exception | None = None) -> None:
        """End the stream, with an error if there is one. Later calls have no effect."""
        failure = None if error is None else self._component.failure(error)
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            if failure is not None:
                self._deliver(failure)
            self._deliver(None)

    def on_leave(self, call: Callable[[], None]) -> None:
        """Run ``call`` in another thread when the client leaves; if the client has left already, run it now."""
        with self._lock:
            if not self._has_left:
                self._calls.append(call)
                return
        call()

    def hand_over(self) -> None:
        """Let another thread end the stream, and not the end of the component's generator."""
        self.is_handed_over = True

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work``, which sends answers, where this stream's answers are sent, after those before it.

        It does not run in the caller's thread, which may hold locks of the stream that ``work`` closes.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Close the stream, because its client no longer wants answers. Components do not call this."""
        self._give_up(None)

    def stop(self) -> None:
        """Close the stream, because its client asked for the end; it still gets ``farewell``."""
        if callable(self.farewell):
            self.farewell = self.farewell()
        self._give_up(self.farewell)

    def _give_up(self, last: Arrays | None) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open, self._has_left = False, True
            if last is not None:
                self._deliver(last)
            self._deliver(None)
            calls = list(self._calls)
        for call in calls:
            call()

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        """Pass on an answer, an error or, with None, the end of the stream. The caller holds the lock."""
        raise NotImplementedError


class QueueStream(Stream):
    """Stream whose answers are read in this process: iterate over it, then close it.

    The queue of answers is unbounded: a slow reader of one stream must not block an engine that answers many requests.
    """

    most_ahead = sys.maxsize

    def __init__(self, component: Component, num_rows: int, request_id: str = "") -> None:
        super().__init__(component, num_rows, request_id)
        self._items: Queue[Arrays | ShoalError | Callable[[], None] | None] = Queue()

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        self._items.put(item)

    def defer(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread that reads the answers."""
        self._items.put(work)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        while (item := self._items.get()) is not None:
            if callable(item):
                item()
                continue
            if isinstance(item, ShoalError):
                try:
                    raise item
                finally:
                    del item  # or the error would hold this frame, and the frame the error
            yield dict(item)

    def close(self) -> None:
        """Close the stream as if its client had left; the component then stops computing answers."""
        self.leave()
