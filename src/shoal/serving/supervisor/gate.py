"""Who may come in, and which server answers: what both front doors and the supervisor know in common."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from shoal.serving.server import Server
from shoal.serving.supervisor.admission import Admission
from shoal.serving.supervisor.limits import Hold, Limits, Pool
from shoal.serving.supervisor.logs import log

T = TypeVar("T")
QUIET_SECONDS = 5.0  # after which a stream that has had its answers keeps nobody waiting
RESEND_SECONDS = 30.0  # that a request whose server died waits for the next one
RETRY_SECONDS = 5.0  # about what a server takes to come back
TOGETHER_SECONDS = 1.0  # in which all that a dead process had is heard of
SUSPECT_SECONDS = 60.0  # that the bytes of a request which may have killed a process are refused
_MOST_SUSPECTS = 1024


class Why(Enum):
    """Why a request was refused; the value is its kind among the metrics."""

    BUSY = "busy"  # too many at a time
    UNAVAILABLE = "unavailable"
    WRONG = "wrong"  # no request that Triton could survive or read
    ABSENT = "absent"  # a model or a path that is not here, or not for clients
    CLOSED = "closed"  # a part of Triton that is not for clients
    METHOD = "method"
    LARGE = "large"
    ENCODING = "encoding"
    SLOW = "slow"


class RefusedError(Exception):
    """A request that no model has run, or, if it ``is_lost``, perhaps; ``retry_after`` is in seconds, 0 for never."""

    def __init__(self, why: Why, message: str, retry_after: float = 0.0, *, is_lost: bool = False) -> None:
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
    address: str
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
        return self.is_answered and time.monotonic() - self.moved > QUIET_SECONDS

    @property
    def is_answered(self) -> bool:
        """Whether it has had an answer for each request."""
        return self.num_received >= self.num_sent


@dataclass(eq=False)
class Upstream:
    """A server that is ready, and the requests that it has."""

    server: Server
    sent: dict[asyncio.Future[Any], str] = field(default_factory=dict)  # with the model that each asks for
    streams: set[Stream] = field(default_factory=set)
    num_lost: int = 0  # requests that it died with
    is_repeat: bool = False  # whether one of them had been under way when the server before it died

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
    dies is sent once more to the next one, if ``resends``, one such request at a time; not so one that was alone or was
    lost twice, for it may be the cause: its bytes are refused for a minute. Clients may ask the models in ``exposed``,
    and know those in ``told``.
    """

    def __init__(
        self,
        models: Iterable[str],
        *,
        exposed: Iterable[str],
        told: Iterable[str],
        max_wait: float,
        resends: bool,
        limits: Limits,
    ) -> None:
        self.upstream: Upstream | None = None
        self.blocked: dict[str, str] = {}
        self.closed = "it is starting"  # why nothing is let in; empty while the door is open
        self.suspected = asyncio.Event()  # that something is wrong: a request was lost
        self.answered = time.monotonic()  # when the last answer came
        self.num_resent = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by model, and by kind
        self.limits = limits
        self.memory = Pool(int(limits.memory_mib * 2**20), limits.client_share)
        self.streams = Pool(limits.max_streams, limits.client_share)
        self.refusals: Counter[str] = Counter()  # of the fronts, by kind
        self._resends = resends
        self._resending = asyncio.Lock()
        self._suspects: dict[bytes, float] = {}  # digests of requests, and until when they are refused
        self._exposed, self._told = frozenset(exposed), frozenset(told)
        # a name that no model has is nobody's, or clients could fill the memory with them
        self._models = {name: Admission(max_wait) for name in (*models, "")}
        self._changed = asyncio.Condition()
        self._num_settled = 0

    # --- what others ask -----------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The models that there are."""
        return [name for name in self._models if name]

    def is_exposed(self, model: str) -> bool:
        """Whether clients may ask it."""
        return model in self._exposed

    def is_told(self, model: str) -> bool:
        """Whether clients may know its configuration and statistics: steps of what they may ask, too."""
        return model in self._told

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

    def is_unready(self, model: str) -> bool:
        """Whether a client's request to it would be refused now."""
        return not self.is_exposed(model) or bool(self.trouble(model))

    # --- requests ------------------------------------------------------------------------------------------------

    def hold(self, address: str, model: str = "") -> Hold:
        """Memory for a request of a client's, which grows as that arrives, and is to be released.

        Raises:
            RefusedError: nobody is let in now.
        """
        self._find(model)
        return Hold(self.memory, address)

    def grow(self, held: Hold, num_bytes: int) -> None:
        """Room for more of a request.

        Raises:
            RefusedError: others take all of it, or the same client has its share.
        """
        if not held.has_room(num_bytes):
            raise RefusedError(Why.BUSY, "Too many requests for this server: they fill its memory.", 1.0)
        held.grow(num_bytes)

    async def send(
        self,
        model: str,
        body: bytes,
        call: Callable[[Server], Awaitable[T]],
        is_failure: Callable[[T], bool],
        is_waited_for: Callable[[], bool] = lambda: True,
    ) -> T:
        """What ``call`` brings back from the server; it raises ``LostError`` where that, or its model, died.

        ``is_waited_for`` tells whether a client still wants the answer; what nobody wants is not sent again.

        Raises:
            RefusedError: it was not let in, or lost.
        """
        upstream = self._find(model)
        self._check_suspects(model, body)
        self.enter(model, len(body))
        is_done = False
        try:
            async with contextlib.AsyncExitStack() as held:
                for is_last in (False, True):
                    try:
                        answer = await self._follow(upstream, model, call)
                    except LostError:
                        upstream.num_lost += 1
                        upstream.is_repeat |= is_last
                        if not await self._may_go_again(model, body, upstream, is_last=is_last) or not is_waited_for():
                            break
                        await held.enter_async_context(self._turn())
                        if self._is_open(model):
                            upstream = self._find(model)
                        elif next_one := await self._wait_for_next(model, upstream):
                            upstream = next_one
                        else:
                            break
                        self.num_resent += 1
                    else:
                        self.answered = time.monotonic()
                        is_done = not is_failure(answer)
                        self._count(model, "answered" if is_done else "failed")
                        return answer
            self._count(model, "lost")
            raise lost(model)
        finally:
            self.leave(model, len(body), is_done=is_done)

    async def _may_go_again(self, model: str, body: bytes, upstream: Upstream, *, is_last: bool) -> bool:
        """Whether to send a lost request again, once there is a server; if not, it may have killed the process."""
        self.suspected.set()
        if is_last:
            self._suspect(model, body)
            await self._wait_for_next(model, upstream)  # whose turn is next finds a server that is well
            return False
        if self._resends:
            next_one = await self._wait_for_next(model, upstream)
        else:
            await asyncio.sleep(TOGETHER_SECONDS)
            next_one = None
        if upstream.num_lost == 1 and next_one is not upstream:
            self._suspect(model, body)
            return False
        return next_one is not None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One after the other: if one kills the next server too, it is known which. None waits for ever."""
        try:
            await asyncio.wait_for(self._resending.acquire(), RESEND_SECONDS)
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._resending.release()

    def _suspect(self, model: str, body: bytes) -> None:
        now = time.monotonic()
        recent = [(digest, end) for digest, end in self._suspects.items() if end > now]
        self._suspects = dict(recent[-_MOST_SUSPECTS:])
        self._suspects[_digest(model, body)] = now + SUSPECT_SECONDS
        log.error("A request of %d bytes to %s may have killed a process; its like is refused.", len(body), model)

    def _check_suspects(self, model: str, body: bytes) -> None:
        if self._suspects and self._suspects.get(_digest(model, body), 0.0) > time.monotonic():
            self._count(model, "refused")
            raise lost(model)

    @asynccontextmanager
    async def stream(self, model: str, address: str, end: Callable[[], None]) -> AsyncIterator[tuple[Server, Stream]]:
        """Around requests with many answers, which cannot be sent again: the server that they go to.

        ``end`` is called where they must stop: their server or model is not well, or goes; or they are quiet, and
        another one needs their place.
        """
        upstream, stream = self._find(model), Stream(model, address, end)
        upstream.streams.add(stream)
        try:
            yield upstream.server, stream
        finally:
            upstream.streams.discard(stream)

    def _is_open(self, model: str) -> bool:
        return self.upstream is not None and not self.closed and model not in self.blocked

    def _find(self, model: str) -> Upstream:
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            self._count(model, "unavailable")
            raise RefusedError(Why.UNAVAILABLE, f"{model or 'The server'} is unavailable: {reason}.", RETRY_SECONDS)
        return self.upstream

    def enter(self, model: str, num_bytes: int) -> None:
        """A request is on its way to a model.

        Raises:
            RefusedError: it would wait too long.
        """
        admission = self._models.get(model, self._models[""])
        wait = admission.refuse(num_bytes)
        if wait is not None:
            self._count(model, "refused")
            log.warning("Too many requests for %s.", model or "this server", extra={"model": model, "most": 1})
            message = f"Too many requests for {model or 'this server'}: {admission.num_requests} are under way."
            raise RefusedError(Why.BUSY, message, wait)
        admission.enter(num_bytes)

    def leave(self, model: str, num_bytes: int, *, is_done: bool) -> None:
        """It is over."""
        self._models.get(model, self._models[""]).leave(num_bytes, is_done=is_done)

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """For a stream, from before its first message on. Where all are taken, the one that is quiet longest goes.

        Raises:
            RefusedError: none is quiet.
        """
        if not self.streams.has(address):
            streams = self.upstream.streams if self.upstream else set()
            is_full = self.streams.taken >= self.streams.most
            quiet = [stream for stream in streams if stream.is_quiet and (is_full or stream.address == address)]
            if not quiet:
                raise RefusedError(Why.BUSY, f"Too many requests for this server: {self.streams.taken} streams.", 1.0)
            min(quiet, key=lambda stream: stream.moved).end()
        self.streams.take(address)
        try:
            yield
        finally:
            self.streams.give_back(address)

    async def _follow(self, upstream: Upstream, model: str, call: Callable[[Server], Awaitable[T]]) -> T:
        """The call as a task of its own, which whoever sees its server die can end, and no client that leaves."""
        task = asyncio.ensure_future(call(upstream.server))
        upstream.sent[task] = model
        try:
            while True:
                try:
                    return await asyncio.shield(task)
                except asyncio.CancelledError:
                    if task.cancelled():  # by ``block``
                        raise LostError from None
        finally:
            del upstream.sent[task]

    async def _wait_for_next(self, model: str, old: Upstream) -> Upstream | None:
        """The server to ask next: another one, or the same if it turns out to be well; ``None`` if none comes."""
        settled = self._num_settled

        def is_there() -> bool:
            is_another = self.upstream is not old or self._num_settled > settled
            return bool(self.closed) or (is_another and model not in self.blocked)

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_there), RESEND_SECONDS)
        return self.upstream if self._is_open(model) else None

    def _count(self, model: str, what: str) -> None:
        self.outcomes[model if model in self._models else "", what] += 1

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
        if self.upstream is not None and not self.blocked:
            self.upstream.num_lost = 0
        await self._tell()

    async def close(self, reason: str) -> None:
        """Let nobody in any more."""
        self.closed = reason
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _digest(model: str, body: bytes) -> bytes:
    digest = hashlib.blake2b(f"{model}\0".encode(), digest_size=16)
    digest.update(body)
    return digest.digest()
