"""Who may come in, and which server answers: what both front doors and the supervisor know in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from shoal.serving.server import Server
from shoal.serving.supervisor.admission import Admission
from shoal.serving.supervisor.logs import log

T = TypeVar("T")
MANY_BYTES = 2**30  # of requests at a time, in this process's memory
MANY_STREAMS = 256
QUIET_SECONDS = 5.0  # after which a stream that has had its answers keeps nobody waiting
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


def lost(model: str) -> RefusedError:
    """What the client of a request hears that was under way when its model's process ended, and is not sent again."""
    message = f"The process of {model} ended while it had this request."
    return RefusedError(Why.UNAVAILABLE, message, RETRY_SECONDS, is_lost=True)


@dataclass(eq=False)
class Stream:
    """Requests and answers of one client; how many answers a request has, only its model knows."""

    model: str
    end: Callable[[], None]
    num_sent: int = 0
    num_received: int = 0
    moved: float = field(default_factory=time.monotonic)

    def note(self, *, is_answer: bool) -> None:
        """A request, or an answer, has passed."""
        self.num_received += is_answer
        self.num_sent += not is_answer
        self.moved = time.monotonic()

    @property
    def is_quiet(self) -> bool:
        """Whether it has had an answer for each request, and none lately."""
        return self.num_received >= self.num_sent and time.monotonic() - self.moved > QUIET_SECONDS


@dataclass(eq=False)
class Upstream:
    """A server that is ready, and the requests that it has."""

    server: Server
    sent: dict[asyncio.Future[Any], str] = field(default_factory=dict)  # with the model that each asks for
    streams: set[Stream] = field(default_factory=set)

    async def wait_idle(self) -> None:
        """Until it has answered everything, and its streams have fallen silent."""
        while self.sent or not all(stream.is_quiet for stream in self.streams):
            await asyncio.sleep(0.1)

    def end_streams(self, models: Iterable[str] | None = None) -> None:
        """End those to ``models``, or all."""
        named = None if models is None else set(models)
        for stream in list(self.streams):
            if named is None or stream.model in named:
                stream.end()


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
        self.answered = time.monotonic()  # when the last answer came
        self.num_resent = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by model, and by kind
        self._resends = resends
        # a name that no model has is nobody's, or clients could fill the memory with them
        self._models = {name: Admission(max_wait) for name in (*models, "")}
        self._num_bytes = 0
        self._changed = asyncio.Condition()
        self._num_settled = 0
        self._told = -TELL_SECONDS

    # --- what others ask -----------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The models that there are."""
        return [name for name in self._models if name]

    @property
    def num_requests(self) -> int:
        """How many are under way, a stream that is not quiet among them."""
        streams = self.upstream.streams if self.upstream else ()
        return sum(model.num_requests for model in self._models.values()) + sum(not s.is_quiet for s in streams)

    def in_flight(self, model: str) -> int:
        """How many requests are under way to a model, streams not among them."""
        return self._models[model].num_requests

    def trouble(self, model: str = "") -> str:
        """Why requests to ``model``, or to any, would be refused now; empty where they would not."""
        return self.closed or (self.blocked.get(model, "") if model else next(iter(self.blocked.values()), ""))

    # --- requests ------------------------------------------------------------------------------------------------

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Memory for a request of this size, before it is read.

        Raises:
            RefusedError: nobody is let in now, or others take all of it.
        """
        if self.closed or self._num_bytes + num_bytes > MANY_BYTES:
            self._find("")
            raise RefusedError(Why.BUSY, "Too many requests for this server: they fill its memory.", 1.0)
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def send(
        self, model: str, num_bytes: int, call: Callable[[Server], Awaitable[T]], is_failure: Callable[[T], bool]
    ) -> T:
        """What ``call`` brings back from the server; it raises ``LostError`` where that, or its model, died.

        Raises:
            RefusedError: it was not let in, or lost.
        """
        upstream = self._find(model)
        admission = self._models.get(model, self._models[""])
        self._admit(model, admission, num_bytes)
        is_done = False
        try:
            for is_last in (not self._resends, True):
                try:
                    answer = await self._follow(upstream, model, call)
                except LostError:
                    self.suspected.set()
                    if is_last or not (next_one := await self._wait_for_next(model, upstream)):
                        break
                    upstream = next_one
                    self.num_resent += 1
                else:
                    self.answered = time.monotonic()
                    is_done = not is_failure(answer)
                    self._count(model, "answered" if is_done else "failed")
                    return answer
            self._count(model, "lost")
            raise lost(model)
        finally:
            admission.leave(num_bytes, is_done=is_done)

    @asynccontextmanager
    async def stream(self, model: str, end: Callable[[], None]) -> AsyncIterator[tuple[Server, Stream]]:
        """Around requests with many answers, which cannot be sent again: the server that they go to.

        ``end`` is called where they must stop: their server or model is not well, or goes.
        """
        upstream, stream = self._find(model), Stream(model, end)
        if len(upstream.streams) >= MANY_STREAMS:
            self._count(model, "refused")
            raise RefusedError(Why.BUSY, f"Too many requests for {model}: {MANY_STREAMS} streams are open.", 1.0)
        upstream.streams.add(stream)
        try:
            yield upstream.server, stream
        finally:
            upstream.streams.discard(stream)

    def _find(self, model: str) -> Upstream:
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            self._count(model, "unavailable")
            raise RefusedError(Why.UNAVAILABLE, f"{model or 'The server'} is unavailable: {reason}.", RETRY_SECONDS)
        return self.upstream

    def _admit(self, model: str, admission: Admission, num_bytes: int) -> None:
        wait = admission.refuse(num_bytes)
        if wait is not None:
            self._count(model, "refused")
            self._tell_refusal(model)
            message = f"Too many requests for {model or 'this server'}: {admission.num_requests} are under way."
            raise RefusedError(Why.BUSY, message, wait)
        admission.enter(num_bytes)

    async def _follow(self, upstream: Upstream, model: str, call: Callable[[Server], Awaitable[T]]) -> T:
        """The call as a task of its own, which whoever sees its server die can end."""
        task = asyncio.ensure_future(call(upstream.server))
        upstream.sent[task] = model
        try:
            await asyncio.wait({task})
        finally:  # where the caller goes away, so does its call
            del upstream.sent[task]
            task.cancel()
        if task.cancelled():  # by ``block``
            raise LostError
        return task.result()

    async def _wait_for_next(self, model: str, old: Upstream) -> Upstream | None:
        """The server to ask next: another one, or the same if it turns out to be well; ``None`` if none comes."""
        settled = self._num_settled

        def is_there() -> bool:
            is_another = self.upstream is not old or self._num_settled > settled
            return bool(self.closed) or (is_another and model not in self.blocked)

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_there), RESEND_SECONDS)
        return None if self.closed or model in self.blocked else self.upstream

    def _count(self, model: str, what: str) -> None:
        self.outcomes[model if model in self._models else "", what] += 1

    def _tell_refusal(self, model: str) -> None:
        """Log that there are refusals, but not each."""
        now = time.monotonic()
        if now - self._told > TELL_SECONDS:
            self._told = now
            number = self.outcomes[model if model in self._models else "", "refused"]
            log.warning("Too many requests for %s: %d refused so far.", model, number, extra={"model": model})

    # --- the supervisor ------------------------------------------------------------------------------------------

    def block(self, models: Iterable[str], reason: str) -> None:
        """Let nobody ask these models, and take back what was sent to them."""
        named = dict.fromkeys(models, reason)
        self.blocked |= named
        if self.upstream is not None:
            for task in [task for task, model in self.upstream.sent.items() if model in named]:
                task.cancel()
            self.upstream.end_streams(named)

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
