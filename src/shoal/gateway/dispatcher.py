"""Who may come in, and which server answers: what both front doors and the supervisor know in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from shoal.gateway.admission import Admission
from shoal.gateway.limits import Hold, Limits, Pool
from shoal.gateway.logs import log
from shoal.gateway.refusals import RETRY_SECONDS, LostError, RefusedError, Why, lost
from shoal.gateway.suspects import Suspects
from shoal.gateway.upstream import Stream, Upstream
from shoal.server.launch import Server

T = TypeVar("T")
RESEND_SECONDS = 30.0  # that a request whose server died waits for the next one
TOGETHER_SECONDS = 1.0  # in which all that a dead process had is heard of


class Dispatcher:
    """Lets requests in, and through to the server of the day.

    ``blocked`` tells of each model that cannot be asked why not. A request that is under way when its server or model
    dies is sent once more to the next one, if ``resends``, one such request at a time; not so one that was alone or was
    lost twice, for it may be the cause: its bytes are refused for a minute. Clients may ask the models in ``exposed``,
    and know those in ``told``; ``default`` is the one whose configuration they get if they name none.
    """

    def __init__(
        self,
        models: Iterable[str],
        *,
        exposed: Iterable[str],
        told: Iterable[str],
        default: str,
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
        self.default = default
        self.memory = Pool(int(limits.memory_mib * 2**20), limits.client_share)
        self.streams = Pool(limits.max_streams, limits.client_share)
        self.refusals: Counter[str] = Counter()  # of the fronts, by kind
        self._resends = resends
        self._resending = asyncio.Lock()
        self._suspects = Suspects()
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
        """Whether clients may know its metadata, configuration and statistics: steps of what they may ask, too."""
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

    def find(self, model: str) -> Upstream:
        """The server that answers for a model, or for itself.

        Raises:
            RefusedError: none does now.
        """
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            self._count(model, "unavailable")
            raise RefusedError(Why.UNAVAILABLE, f"{model or 'The server'} is unavailable: {reason}.", RETRY_SECONDS)
        return self.upstream

    def hold(self, address: str, model: str = "") -> Hold:
        """Memory for a request of a client's, which grows as that arrives, and is to be released.

        Raises:
            RefusedError: nobody is let in now.
        """
        self.find(model)
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
        upstream = self.find(model)
        if self._suspects.has(model, body):
            self._count(model, "refused")
            raise lost(model)
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
                            upstream = self.find(model)
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
            self._suspects.add(model, body)
            await self._wait_for_next(model, upstream)  # whose turn is next finds a server that is well
            return False
        if self._resends:
            next_one = await self._wait_for_next(model, upstream)
        else:
            await asyncio.sleep(TOGETHER_SECONDS)
            next_one = None
        if upstream.num_lost == 1 and next_one is not upstream:
            self._suspects.add(model, body)
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

    @asynccontextmanager
    async def stream(self, model: str, address: str, end: Callable[[], None]) -> AsyncIterator[tuple[Server, Stream]]:
        """Around requests with many answers, which cannot be sent again: the server that they go to.

        ``end`` is called where they must stop: their server or model is not well, or goes; or they are quiet, and
        another one needs their place.
        """
        upstream, stream = self.find(model), Stream(model, address, end)
        upstream.streams.add(stream)
        try:
            yield upstream.server, stream
        finally:
            upstream.streams.discard(stream)

    def _is_open(self, model: str) -> bool:
        return self.upstream is not None and not self.closed and model not in self.blocked

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
        """Await the call in its own task. ``block`` can cancel it; a client that disconnects cannot."""
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
