"""Requests that were in flight when their server or model died: which of them are sent again, and which are not."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from shoal.serving.gateway.core.active_server import NEXT_SECONDS, ActiveServer
from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.refusals import LostError

T = TypeVar("T")
SUSPECT_SECONDS = 60.0  # for which identical bytes are refused
TOGETHER_SECONDS = 1.0  # in which all requests of a dead process fail
_MOST_SUSPECTS = 1024


class Quarantine:
    """Digests of requests that may have killed a model's process. Each digest is kept for a minute."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int, bytes], float] = {}  # by model, number of bytes, and digest

    def add(self, model: str, body: bytes) -> None:
        """For a minute, refuse requests to ``model`` with the same bytes as ``body``."""
        now = time.monotonic()
        recent = [(key, end) for key, end in self._ends.items() if end > now]
        self._ends = {**dict(recent[-_MOST_SUSPECTS:]), (model, len(body), _digest(body)): now + SUSPECT_SECONDS}
        log.error("A request of %d bytes to %s may have killed a process; its bytes are refused.", len(body), model)

    def remaining(self, model: str, body: bytes) -> float:
        """Return the seconds for which requests to ``model`` with the bytes ``body`` are refused; 0 if they are not."""
        if not any(key[:2] == (model, len(body)) for key in self._ends):  # large bodies take long to digest
            return 0.0
        return max(0.0, self._ends.get((model, len(body), _digest(body)), 0.0) - time.monotonic())


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


class Resending:
    """Runs calls to the active server and, if ``is_allowed``, once more on the next server if they were lost.

    A call that was lost because the service itself ended the server is not under suspicion: it is sent again, as often
    as that happens, and at once.

    Such calls are sent again one at a time. A request that was the only one in flight, or that was lost twice, may have
    killed the process. It is not sent again, and its bytes are quarantined. Questions, which have no model, are not
    under suspicion: all clients ask them with the same bytes.
    """

    def __init__(self, active: ActiveServer, *, is_allowed: bool) -> None:
        self.quarantine, self.num_resent = Quarantine(), 0
        self._active, self._is_allowed, self._turn_lock = active, is_allowed, asyncio.Lock()

    async def run(
        self,
        model: str,
        body: bytes,
        upstream: Upstream,
        call: Callable[[Upstream], Awaitable[T]],
        is_waited_for: Callable[[], bool],
    ) -> T:
        """Run ``call`` on ``upstream``, perhaps once more on the next server, and return its result.

        ``is_waited_for`` says whether the client still waits; if not, a lost call is not repeated.

        Raises:
            LostError: the call was lost, and is not repeated.
        """
        async with contextlib.AsyncExitStack() as held:
            is_last = False
            while True:
                try:
                    return await _follow(upstream, model, call)
                except LostError as error:
                    upstream.kill_unhealthy(str(error))
                    next_one: Upstream | None
                    if upstream.is_stopped:
                        next_one = await self._wait_after_stop(model, upstream, is_waited_for)
                    else:
                        upstream.num_lost += 1
                        upstream.is_repeat |= is_last
                        if not await self._may_go_again(model, body, upstream, is_last=is_last) or not is_waited_for():
                            raise
                        await held.enter_async_context(self._turn())
                        is_last = True
                        is_open = self._active.is_open(model)
                        next_one = (
                            self._active.find(model) if is_open else await self._active.wait_for_next(model, upstream)
                        )
                    if next_one is None:
                        raise
                    upstream = next_one
                    self.num_resent += 1

    async def _wait_after_stop(self, model: str, old: Upstream, is_waited_for: Callable[[], bool]) -> Upstream | None:
        """Wait for the server after ``old``, which the service ended; ``None`` if the request is not sent again."""
        while self._is_allowed and is_waited_for() and not self._active.closed:
            next_one = await self._active.wait_for_next(model, old)
            if next_one not in (None, old):
                return next_one
        return None

    async def _may_go_again(self, model: str, body: bytes, upstream: Upstream, *, is_last: bool) -> bool:
        """Wait for the next server, and return whether to resend a lost request to it.

        A lost request was in flight when its server or model died; ``is_last`` says that it was lost twice.
        """
        self._active.suspect()
        if is_last:
            if model:
                self.quarantine.add(model, body)
            await self._active.wait_for_next(model, upstream)  # the next request in turn finds a healthy server
            return False
        if self._is_allowed:
            next_one = await self._active.wait_for_next(model, upstream)
        else:
            await asyncio.sleep(TOGETHER_SECONDS)
            next_one = None
        if model and upstream.num_lost == 1 and next_one is not upstream:
            self.quarantine.add(model, body)
            return False
        return next_one is not None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Hold the lock for resent requests, after waiting at most 30 s for it.

        If the next server dies too, it is then known which request killed it.
        """
        try:
            await asyncio.wait_for(self._turn_lock.acquire(), NEXT_SECONDS)
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._turn_lock.release()


async def _follow(upstream: Upstream, model: str, call: Callable[[Upstream], Awaitable[T]]) -> T:
    """Run ``call`` in a task that ``ActiveServer.block`` can cancel, but that a disconnecting client does not."""
    if upstream.is_stopped:
        raise LostError
    task = asyncio.ensure_future(call(upstream))
    upstream.sent[task] = model
    try:
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():  # by ``block`` or ``Upstream.stop``
                    raise LostError from None
    finally:
        del upstream.sent[task]
        del task  # whose exception refers to this frame: only the garbage collector would free the request's body
