"""Dispatch of requests to the active server; state shared by both fronts and the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from shoal.gateway.admission import Admission
from shoal.gateway.limits import Hold, Limits, Pool
from shoal.gateway.logs import log
from shoal.gateway.refusals import RETRY_SECONDS, LostError, RefusedError, Why, lost
from shoal.gateway.suspects import Suspects
from shoal.gateway.tokens import Tokens
from shoal.gateway.upstream import Stream, Upstream
from shoal.server.launch import Server

T = TypeVar("T")
RESEND_SECONDS = 30.0  # that a request waits for the next server after its own died
TOGETHER_SECONDS = 1.0  # in which all requests of a dead process fail


class Dispatcher:
    """Admits requests and passes them to the active server.

    ``blocked`` gives the reason for each unavailable model. With ``resends``, a request in flight when its server or
    model dies is resent once to the next one, one such request at a time. A request that was alone, or was lost twice,
    may be the cause: it is not resent, and its bytes are refused for a minute. Clients may send requests to the models
    in ``exposed``, and see those in ``told``; ``default`` is the model whose configuration they get if they name none.
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
        slots: Mapping[str, int] | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.upstream: Upstream | None = None
        self.blocked: dict[str, str] = {}
        self.closed = "it is starting"  # why all requests are refused; empty while open
        self.suspected = asyncio.Event()  # set when a request was lost: something may be wrong
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
        # unknown names share the entry "", or clients could fill the memory with them
        self._models = {name: Admission(max_wait, slots=(slots or {}).get(name, 0)) for name in (*models, "")}
        self.first_answers: dict[str, list[float]] = {}  # by decoupled model: how many, and the sum of their seconds
        self.tokens = tokens or Tokens(())
        self._changed = asyncio.Condition()
        self._num_settled = 0

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of all models."""
        return [name for name in self._models if name]

    @property
    def exposed(self) -> list[str]:
        """Names of the models that clients may send requests to."""
        return sorted(self._exposed)

    def is_exposed(self, model: str) -> bool:
        """Whether clients may send requests to a model."""
        return model in self._exposed

    def is_told(self, model: str) -> bool:
        """Whether clients may see a model's metadata, configuration and statistics: also steps of exposed ones."""
        return model in self._told

    @property
    def num_requests(self) -> int:
        """Number of requests in flight, including streams that are not quiet."""
        streams = self.upstream.streams if self.upstream else ()
        return sum(model.num_requests for model in self._models.values()) + sum(not s.is_quiet for s in streams)

    def is_full(self, model: str) -> bool:
        """Whether a model's engine runs as many streams as it can."""
        return self._models[model].is_full

    def note_first(self, model: str, seconds: float) -> None:
        """Record how long the first answer to a request took."""
        known = self.first_answers.setdefault(model, [0, 0.0])
        known[0] += 1
        known[1] += seconds

    def in_flight(self, model: str) -> int:
        """Return the number of requests in flight to a model, without streams."""
        return self._models[model].num_requests

    def trouble(self, model: str = "") -> str:
        """Return why requests to ``model``, or to any model, would be refused now; empty if they would not."""
        return self.closed or (self.blocked.get(model, "") if model else next(iter(self.blocked.values()), ""))

    def is_unready(self, model: str) -> bool:
        """Whether a client's request to a model would be refused now."""
        return not self.is_exposed(model) or bool(self.trouble(model))

    # --- requests ------------------------------------------------------------------------------------------------

    def find(self, model: str) -> Upstream:
        """Return the active server for a model, or, for an empty name, for the server's own API.

        Raises:
            RefusedError: it is unavailable now.
        """
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            self._count(model, "unavailable")
            raise RefusedError(Why.UNAVAILABLE, f"{model or 'The server'} is unavailable: {reason}.", RETRY_SECONDS)
        return self.upstream

    def hold(self, address: str, model: str = "") -> Hold:
        """Return a memory reservation for a client's request; it grows as bytes arrive, and must be released.

        Raises:
            RefusedError: requests are refused now.
        """
        self.find(model)
        return Hold(self.memory, address)

    def grow(self, held: Hold, num_bytes: int) -> None:
        """Reserve memory for more bytes of a request.

        Raises:
            RefusedError: the memory is full, or the client has used up its share.
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
        """Run ``call`` on the active server and return its result; it raises ``LostError`` if server or model died.

        ``is_waited_for`` says whether the client still waits; if not, a lost request is not resent.

        Raises:
            RefusedError: the request was refused, or lost.
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
        """Whether to resend a lost request, decided once there is a server; if not, it may have killed the process."""
        self.suspected.set()
        if is_last:
            self._suspects.add(model, body)
            await self._wait_for_next(model, upstream)  # so that the next in turn finds a healthy server
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
        """Resend one request at a time, so that one that kills the next server too is identified; waits are bounded."""
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
        """Register a stream on the active server; streams cannot be resent.

        ``end`` is called when the stream must stop: its server or model fails or is retired, or it is quiet and
        another stream needs its place.
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
        """Admit a request to a model.

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
        """Record the end of an admitted request."""
        self._models.get(model, self._models[""]).leave(num_bytes, is_done=is_done)

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Hold a place for a stream, from before its first message; if all are taken, the longest quiet stream ends.

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
        """Wait for the next server: another one, or the same if it proves healthy; ``None`` on time-out."""
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
        """Refuse requests to these models, and cancel those in flight to them."""
        named = dict.fromkeys(models, reason)
        self.blocked |= named
        if self.upstream is not None:
            for task in [task for task, model in self.upstream.sent.items() if model in named]:
                task.cancel()
            self.upstream.end_streams(named)

    async def open(self, upstream: Upstream) -> None:
        """Make this the active server, and unblock all models."""
        self.upstream, self.blocked, self.closed = upstream, {}, ""
        await self._tell()

    async def settle(self) -> None:
        """Clear suspicion of a server that lost a request: it proved healthy."""
        self._num_settled += 1
        if self.upstream is not None and not self.blocked:
            self.upstream.num_lost = 0
        await self._tell()

    async def close(self, reason: str) -> None:
        """Refuse all further requests."""
        self.closed = reason
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
