"""Who may come in, and which server answers: what both front doors and the supervisor know in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from shoal.serving.server import Server
from shoal.serving.supervisor.admission import Admission
from shoal.serving.supervisor.logs import log

T = TypeVar("T")
TELL_SECONDS = 10.0  # between two lines about refusals
RESEND_SECONDS = 30.0  # that a request whose server died waits for the next one
RETRY_SECONDS = 5.0  # about what a server takes to come back


class Why(Enum):
    """Why a request was refused."""

    BUSY = "too many requests"
    UNAVAILABLE = "unavailable"


class RefusedError(Exception):
    """A request that no model has run, or, if it ``is_lost``, perhaps; ``retry_after`` is in seconds."""

    def __init__(self, why: Why, message: str, retry_after: float, *, is_lost: bool = False) -> None:
        super().__init__(message)
        self.why, self.message, self.retry_after, self.is_lost = why, message, retry_after, is_lost


class LostError(Exception):
    """The server, or a process of the model, ended with the request."""


@dataclass
class Upstream:
    """A server that is ready, and the requests that it has."""

    server: Server
    sent: dict[asyncio.Future[Any], str] = field(default_factory=dict)  # with the model that each asks for

    async def wait_idle(self) -> None:
        """Until it has answered everything."""
        while self.sent:
            await asyncio.wait(self.sent, timeout=1.0)


class Gate:
    """Lets requests in, and through to the server of the day.

    ``blocked`` tells of each model that cannot be asked why not. A request that is under way when its server or model
    dies is sent once more to the next one, if ``resends``; so is none that was lost twice, for it may be the cause.
    """

    def __init__(self, models: Iterable[str], *, max_wait: float, resends: bool) -> None:
        self.upstream: Upstream | None = None
        self.blocked: dict[str, str] = {}
        self.closed = "it is starting"  # why nothing is let in; empty while the door is open
        self.suspected = asyncio.Event()  # that something is wrong: a request was lost
        self.num_resent = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by model, and by kind
        self._resends = resends
        # a name that no model has is nobody's, or clients could fill the memory with them
        self._models = {name: Admission(max_wait) for name in (*models, "")}
        self._changed = asyncio.Condition()
        self._num_settled = 0
        self._told = -TELL_SECONDS

    @property
    def num_requests(self) -> int:
        """How many are under way."""
        return sum(model.num_requests for model in self._models.values())

    def in_flight(self) -> dict[str, int]:
        """How many are under way to each model."""
        return {name: model.num_requests for name, model in self._models.items()}

    def trouble(self, model: str = "") -> str:
        """Why requests to ``model``, or to any, would be refused now; empty where they would not."""
        return self.closed or (self.blocked.get(model, "") if model else next(iter(self.blocked.values()), ""))

    def _count(self, model: str, what: str) -> None:
        self.outcomes[model if model in self._models else "", what] += 1

    def _tell_refusal(self, model: str) -> None:
        """Log that there are refusals, but not each."""
        now = time.monotonic()
        if now - self._told > TELL_SECONDS:
            self._told = now
            number = self.outcomes[model, "refused"]
            log.warning("Too many requests for %s: %d refused so far.", model, number, extra={"model": model})

    async def send(
        self, model: str, num_bytes: int, call: Callable[[Server], Awaitable[T]], is_failure: Callable[[T], bool]
    ) -> T:
        """What ``call`` brings back from the server; it raises ``LostError`` where that, or its model, died.

        Raises:
            RefusedError: it was not let in, or lost.
        """
        async with self.enter(model, num_bytes):
            for is_last in (not self._resends, True):
                upstream = self._find(model)
                try:
                    answer = await self._follow(upstream, model, call)
                    self._count(model, "failed" if is_failure(answer) else "answered")
                    return answer
                except LostError:
                    self.suspected.set()
                    if is_last:
                        break
                    await self._wait_for_next(model, upstream)
                    self.num_resent += 1
            self._count(model, "lost")
            message = f"The process of {model} ended while it had this request."
            raise RefusedError(Why.UNAVAILABLE, message, RETRY_SECONDS, is_lost=True)

    @asynccontextmanager
    async def enter(self, model: str, num_bytes: int) -> AsyncIterator[None]:
        """Around a request, however it is sent."""
        self._find(model)
        admission = self._models.get(model, self._models[""])
        wait = admission.refuse(num_bytes)
        if wait is not None:
            self._count(model, "refused")
            self._tell_refusal(model)
            raise RefusedError(
                Why.BUSY, f"Too many requests for {model}: {admission.num_requests} are under way.", max(wait, 0.1)
            )
        admission.enter(num_bytes)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            admission.leave(num_bytes, is_done=is_done)

    def _find(self, model: str) -> Upstream:
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            self._count(model, "unavailable")
            raise RefusedError(Why.UNAVAILABLE, f"{model or 'The server'} is unavailable: {reason}.", RETRY_SECONDS)
        return self.upstream

    async def _follow(self, upstream: Upstream, model: str, call: Callable[[Server], Awaitable[T]]) -> T:
        """The call as a task of its own, which whoever sees its server die can end."""
        task = asyncio.ensure_future(call(upstream.server))
        upstream.sent[task] = model
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by ``block``, not by the caller's going away
                raise LostError from None
            task.cancel()
            raise
        finally:
            del upstream.sent[task]

    async def _wait_for_next(self, model: str, lost: Upstream) -> None:
        settled = self._num_settled

        def is_there() -> bool:
            is_another = self.upstream is not lost or self._num_settled > settled
            return bool(self.closed) or (is_another and model not in self.blocked)

        async with self._changed:
            with contextlib.suppress(TimeoutError):  # then it hears why not
                await asyncio.wait_for(self._changed.wait_for(is_there), RESEND_SECONDS)

    @asynccontextmanager
    async def stream(self, model: str, num_bytes: int) -> AsyncIterator[Server]:
        """Around a request with many answers, which cannot be sent again: the server that it goes to."""
        async with self.enter(model, num_bytes):
            upstream, mark = self._find(model), asyncio.get_running_loop().create_future()
            upstream.sent[mark] = model  # a server that retires waits for it
            try:
                yield upstream.server
            finally:
                del upstream.sent[mark]
                mark.cancel()

    def block(self, models: Iterable[str], reason: str) -> None:
        """Let nobody ask these models, and take back what was sent to them."""
        named = dict.fromkeys(models, reason)
        self.blocked |= named
        if self.upstream is not None:
            for task in [task for task, model in self.upstream.sent.items() if model in named]:
                task.cancel()

    async def open(self, upstream: Upstream) -> None:
        """All is well, and this server answers from now on."""
        self.upstream, self.blocked, self.closed = upstream, {}, ""
        await self._tell()

    async def settle(self) -> None:
        """The suspicion was looked into: the server that a request was lost by is well."""
        self._num_settled += 1
        await self._tell()

    async def close(self, reason: str) -> None:
        """Let nobody in any more."""
        self.closed = reason
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
