"""Turns of callers: requests that wait for a model do so in the service, a queue for each caller."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.gateway.core.callers import Caller


class Turns:
    """Lets at most about ``width`` requests to a model into Triton, whose queue does not distinguish callers.

    The callers that have requests now get equal parts of ``width``, and at least one place each. So a request waits for
    few others of each caller, however many one of them has sent. With ``width`` 0, no request waits.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._sent = Counter[str]()  # by caller
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def take(self, caller: Caller) -> AsyncIterator[None]:
        """Wait for a turn of the caller's, and hold it while the context is open."""
        if caller.id in self._waiting or (self._width and self._sent[caller.id] >= self._share(caller.id)):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(caller.id, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was this one's turn meanwhile
                    self._give_back(caller.id)
                raise
        else:
            self._sent[caller.id] += 1
        try:
            yield
        finally:
            self._give_back(caller.id)

    def _share(self, *more: str) -> int:
        return max(1, -(-self._width // len(self._sent.keys() | self._waiting.keys() | {*more})))

    def _give_back(self, caller: str) -> None:
        self._sent[caller] -= 1
        if not self._sent[caller]:
            del self._sent[caller]
        share = self._share() if self._waiting else 0
        for name, waiting in list(self._waiting.items()):
            while waiting and (self._sent[name] < share or waiting[0].done()):
                turn = waiting.popleft()
                if not turn.done():  # else it was cancelled
                    self._sent[name] += 1
                    turn.set_result(None)
            if not waiting:
                del self._waiting[name]
