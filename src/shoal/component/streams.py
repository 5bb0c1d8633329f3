"""The answers to one request of a streaming component: sent by any thread, then ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Queue
from typing import TYPE_CHECKING

from shoal.component.base import check_outputs
from shoal.component.tensors import Array, Arrays
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.component.base import Component


class Stream:
    """Any number of answers to one request, then its end. Threads may share it.

    A closed stream takes nothing more: it was ended, or its client has left. ``request_id`` is the client's, which may
    be empty, and is not unique.
    """

    def __init__(self, component: Component, num_rows: int, request_id: str = "") -> None:
        self.request_id = request_id
        self._component, self._num_rows = component, num_rows
        self._lock = threading.Lock()
        self._is_open = True
        self._has_left = False
        self._calls: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether answers are still taken."""
        return self._is_open

    @property
    def has_left(self) -> bool:
        """Whether the client no longer wants answers."""
        return self._has_left

    def send(self, outputs: Arrays) -> bool:
        """Send one answer: every declared output, ``[rows, *dims]`` with the request's number of rows.

        Returns False if the stream is closed: compute no more answers then. An answer that differs from the declaration
        ends the stream with an error.
        """
        try:
            check_outputs(self._component.context.spec, outputs, self._num_rows)
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
        """Run ``call`` as soon as the client leaves, in another thread; at once if it has left already."""
        with self._lock:
            if not self._has_left:
                self._calls.append(call)
                return
        call()

    def leave(self) -> None:
        """Close the stream for a client that no longer wants answers; called by the host."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open, self._has_left = False, True
            self._deliver(None)
            calls = list(self._calls)
        for call in calls:
            call()

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        """Pass on an answer, an error or, with None, the end. The caller holds the lock."""
        raise NotImplementedError


class QueueStream(Stream):
    """A stream whose answers are read in this process: iterate it, and close it.

    Its queue is not bounded: a reader of one stream must not hold up an engine that serves others too.
    """

    def __init__(self, component: Component, num_rows: int, request_id: str = "") -> None:
        super().__init__(component, num_rows, request_id)
        self._items: Queue[Arrays | ShoalError | None] = Queue()

    def _deliver(self, item: Arrays | ShoalError | None) -> None:
        self._items.put(item)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        while (item := self._items.get()) is not None:
            if isinstance(item, ShoalError):
                raise item
            yield dict(item)

    def close(self) -> None:
        """Leave: the component is told, and computes no more answers."""
        self.leave()
