"""Fair queue of a model: requests that wait for it do so in the service, by caller, and callers take turns."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager

from shoal.serving.gateway.callers.callers import Caller

_RECENT_SECONDS = 10.0  # for which a caller that has asked counts as one of several


class Turn:
    """A caller's turn to send a request. It has come when ``begun`` is done; from then on, it has a place."""

    def __init__(self, caller: str, entered: float) -> None:
        self.caller, self.entered, self.has_place = caller, entered, False
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FairQueue:
    """Lets at most about ``width`` requests to a model into Triton, whose queue does not distinguish callers.

    The callers that have requests now get equal parts of ``width``, and at least one place each. So a request waits for
    few others of each caller, however many one of them has sent. With ``width`` 0, no request waits.

    If several callers have asked within the last ten seconds, the places above ``shared`` are kept free for those that
    have less than an equal part of it. So a caller that asks now and then finds a place of a model whose requests take
    long, although another caller could use all of them. With ``shared`` 0, no place is kept free.
    """

    def __init__(self, width: int, shared: int = 0, clock: Callable[[], float] | None = None) -> None:
        self._width, self._shared, self._clock = width, shared, clock or time.monotonic
        self.waits = 0, 0.0  # how many turns have come, and the sum of the seconds until then
        self._sent = Counter[str]()  # by caller
        self._waiting: dict[str, deque[Turn]] = {}
        self._asked: dict[str, float] = {}  # when a caller has asked for the last time, the latest one last

    @asynccontextmanager
    async def take(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn of the caller's, and hold it while the context is open."""
        with self.enter(caller) as turn:
            await turn.begun
            yield

    @contextmanager
    def enter(self, caller: Caller) -> Iterator[Turn]:
        """Return the next turn of a caller, which is given back at the end of the context, even if it has not come."""
        turn = Turn(caller.id, self._clock())
        if self._shared:
            self._note_asked(turn.caller)
        self._waiting.setdefault(turn.caller, deque()).append(turn)
        try:
            self._begin_turns([turn.caller])
            yield turn
        finally:
            self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        name = turn.caller
        if turn.has_place:
            self._sent[name] -= 1
            if not self._sent[name]:
                del self._sent[name]
        else:
            self._waiting[name].remove(turn)
            if not self._waiting[name]:
                del self._waiting[name]
        self._begin_turns([*self._waiting])

    def _begin_turns(self, names: Collection[str]) -> None:
        """Begin the turns that these callers wait for, as far as there are places."""
        several = len(self._sent.keys() | self._waiting.keys())  # a turn that begins does not change it
        for name in names:
            waiting = self._waiting[name]
            while waiting and self._has_place(name, several):
                turn = waiting.popleft()
                self._sent[name] += 1
                turn.has_place = True
                self.waits = self.waits[0] + 1, self.waits[1] + self._clock() - turn.entered
                if not turn.begun.done():  # else its task was cancelled, and leaves soon
                    turn.begun.set_result(None)
            if not waiting:
                del self._waiting[name]

    def _has_place(self, name: str, several: int) -> bool:
        if not self._width:
            return True
        sent = self._sent[name]
        if sent >= max(1, -(-self._width // several)):
            return False
        if not self._shared or self._sent.total() < self._shared:
            return True
        recent = len(self._asked.keys() | self._sent.keys() | self._waiting.keys())
        return recent == 1 or sent < max(1, self._shared // recent)

    def _note_asked(self, caller: str) -> None:
        now = self._clock()
        self._asked.pop(caller, None)
        self._asked[caller] = now
        while now - self._asked[first := next(iter(self._asked))] > _RECENT_SECONDS:
            del self._asked[first]
