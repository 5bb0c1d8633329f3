"""Dispatch of requests to the active Triton server; state shared by the HTTP and gRPC front ends and the supervisor.

Sections: requests that may have killed a process; the dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from shoal.gateway.core.refusals import RETRY_SECONDS, LostError, RefusedError, Why, log_failure, lost
from shoal.gateway.core.upstream import Stream, Upstream
from shoal.gateway.logs import log
from shoal.gateway.options import Admission, Hold, Limits, Pool

T = TypeVar("T")
SUSPECT_SECONDS = 60.0  # for which identical bytes are refused
RESEND_SECONDS = 30.0  # that a request waits for the next server after its own died
TOGETHER_SECONDS = 1.0  # in which all requests of a dead process fail
_MOST_SUSPECTS = 1024
_MOST_LISTED = 20  # models named in a refusal


# --- requests that may have killed a process -------------------------------------------------------------------------


class Suspects:
    """Digests of requests that may have killed a model's process. Each digest is kept for a minute."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int, bytes], float] = {}  # by model, number of bytes, and digest

    def add(self, model: str, body: bytes) -> None:
        """For a minute, refuse requests to ``model`` with the same bytes as ``body``."""
        now = time.monotonic()
        recent = [(key, end) for key, end in self._ends.items() if end > now]
        self._ends = {**dict(recent[-_MOST_SUSPECTS:]), (model, len(body), _digest(body)): now + SUSPECT_SECONDS}
        log.error("A request of %d bytes to %s may have killed a process; its bytes are refused.", len(body), model)

    def has(self, model: str, body: bytes) -> bool:
        """Whether requests to ``model`` with the bytes ``body`` are refused now."""
        if not any(key[:2] == (model, len(body)) for key in self._ends):  # large bodies take long to digest
            return False
        return self._ends.get((model, len(body), _digest(body)), 0.0) > time.monotonic()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


# --- the dispatcher --------------------------------------------------------------------------------------------------


class Dispatcher:
    """Admits requests and passes them to the active Triton server.

    ``blocked`` maps each unavailable model to the reason. If ``resends`` is true, a request that was in flight when its
    server or model died is resent once, to the next server; such requests are resent one at a time. A request that was
    the only one in flight, or that was lost twice, may have killed the process. It is not resent, and requests with the
    same bytes are refused for a minute.

    Clients may send requests to the models in ``exposed``. They may read the metadata, configuration and statistics of
    the models in ``visible``: the exposed models and the models that these call. ``default`` is the model whose
    configuration clients get if they name no model.
    """

    def __init__(
        self,
        models: Iterable[str],
        *,
        exposed: Iterable[str],
        visible: Iterable[str],
        default: str,
        max_wait: float,
        resends: bool,
        limits: Limits,
        slots: Mapping[str, int] | None = None,
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
        self.refusals: Counter[str] = Counter()  # that are the client's fault, by kind
        self._resends = resends
        self._resending = asyncio.Lock()
        self._suspects = Suspects()
        self._exposed, self._visible = frozenset(exposed), frozenset(visible)
        # unknown names share the entry "", or clients could fill the memory with them
        self._models = {
            name: Admission(max_wait, slots=(slots or {}).get(name, 0), share=limits.client_share)
            for name in (*models, "")
        }
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

    def is_visible(self, model: str) -> bool:
        """Whether clients may read a model's metadata, configuration and statistics."""
        return model in self._visible

    def check_exposed(self, model: str) -> None:
        """Raise ``RefusedError`` unless clients may send requests to a model."""
        if model not in self._exposed:
            raise self._absent(model)

    def check_visible(self, model: str) -> None:
        """Raise ``RefusedError`` unless clients may see a model's metadata, configuration and statistics."""
        if model not in self._visible:
            raise self._absent(model)

    def _absent(self, model: str) -> RefusedError:
        """Build the refusal of a request to an unknown or hidden model. The message lists the models for clients."""
        known = ", ".join(self.exposed[:_MOST_LISTED])
        what = "is a step, and closed to clients" if self.is_visible(model) else "is not found"
        return RefusedError(Why.ABSENT, f"Request for unknown model: {model[:100]!r} {what}. Models: {known}.")

    def note_refusal(self, refused: RefusedError) -> None:
        """Count a refusal and log it (at most one line in 10 s), unless the server was busy or unavailable."""
        if refused.why not in (Why.BUSY, Why.UNAVAILABLE):
            self.refusals[refused.why.value] += 1
            log.warning("A request was refused (%s): %s", refused.why.value, refused.message[:200], extra={"most": 1})

    @property
    def num_requests(self) -> int:
        """Number of requests in flight, plus the number of streams that are not quiet (see ``Stream.is_quiet``)."""
        streams = self.upstream.streams if self.upstream else ()
        return sum(model.num_requests for model in self._models.values()) + sum(not s.is_quiet for s in streams)

    def is_full(self, model: str) -> bool:
        """Whether a model has at least ``slots`` requests in flight; False for a model without this parameter."""
        return self._models[model].is_full

    def in_flight(self, model: str) -> int:
        """Return the number of requests to a model that are in flight, including requests within streams."""
        return self._models[model].num_requests

    def trouble(self, model: str = "") -> str:
        """Return the reason why requests would be refused now, or an empty string if they would not.

        Without a ``model``, return the reason for any one of the models whose requests would be refused.
        """
        return self.closed or (self.blocked.get(model, "") if model else next(iter(self.blocked.values()), ""))

    def is_unready(self, model: str) -> bool:
        """Whether a client's request to a model would be refused now."""
        return not self.is_exposed(model) or bool(self.trouble(model))

    # --- requests ------------------------------------------------------------------------------------------------

    def find(self, model: str) -> Upstream:
        """Return the active Triton server, if ``model`` is available. An empty name stands for the server's own API.

        Raises:
            RefusedError: the model or the server is unavailable now.
        """
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            self._count(model, "unavailable")
            raise RefusedError(Why.UNAVAILABLE, f"{model or 'The server'} is unavailable: {reason}.", RETRY_SECONDS)
        return self.upstream

    def hold(self, address: str, model: str = "") -> Hold:
        """Return a memory reservation for a client's request. The caller grows it as bytes arrive, and must release it.

        Raises:
            RefusedError: the model or the server is unavailable now.
        """
        self.find(model)
        return Hold(self.memory, address)

    def grow(self, held: Hold, num_bytes: int) -> None:
        """Reserve memory for more bytes of a request.

        Raises:
            RefusedError: the memory for requests is full, or the client has used up its share.
        """
        if not held.has_room(num_bytes):
            raise RefusedError(Why.BUSY, "Too many requests for this server: they fill its memory.", 1.0)
        held.grow(num_bytes)

    async def send(
        self,
        model: str,
        body: bytes,
        call: Callable[[Upstream], Awaitable[T]],
        is_failure: Callable[[T], bool],
        is_waited_for: Callable[[], bool] = lambda: True,
        request_id: str = "",
    ) -> T:
        """Run ``call`` on the active Triton server and return its result.

        ``call`` must raise ``LostError`` if the server or the model's process died. ``is_failure`` says whether the
        result of ``call`` is an error. ``is_waited_for`` says whether the client still waits; if not, a lost request is
        not resent.

        Raises:
            RefusedError: the request was refused, or it was lost because the server or the model's process died.
        """
        upstream = self.find(model)
        if self._suspects.has(model, body):
            self._count(model, "refused")
            log_failure(model, request_id, lost(model).message)
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
            log_failure(model, request_id, self.lost(model).message)
            raise self.lost(model)
        finally:
            self.leave(model, len(body), is_done=is_done)

    async def _may_go_again(self, model: str, body: bytes, upstream: Upstream, *, is_last: bool) -> bool:
        """Wait for the next server, and return whether to resend a lost request to it.

        A lost request was in flight when its server or model died; ``is_last`` says that it was lost twice. If it may
        have killed the process, it is not resent, and requests with the same bytes are refused for a minute.
        """
        self.suspected.set()
        if is_last:
            self._suspects.add(model, body)
            await self._wait_for_next(model, upstream)  # so that the next request in turn finds a healthy server
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
        """Hold the lock for resent requests, after waiting at most 30 s for it.

        Requests are resent one at a time. If the next server dies too, it is then known which request killed it.
        """
        try:
            await asyncio.wait_for(self._resending.acquire(), RESEND_SECONDS)
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._resending.release()

    @contextmanager
    def stream(self, model: str, address: str) -> Iterator[tuple[Upstream, Stream]]:
        """Register a stream on the active server. The caller must set ``Stream.end`` before awaiting anything.

        ``model`` may be empty: a stream over gRPC can have requests to several models.
        """
        upstream, stream = self.find(model), Stream({model}, address)
        upstream.streams.add(stream)
        try:
            yield upstream, stream
        finally:
            upstream.streams.discard(stream)

    def _is_open(self, model: str) -> bool:
        return self.upstream is not None and not self.closed and model not in self.blocked

    def enter(self, model: str, num_bytes: int, address: str = "") -> None:
        """Count a request to a model as in flight.

        Raises:
            RefusedError: too many requests to the model are in flight, or the request would wait too long.
        """
        admission = self._models.get(model, self._models[""])
        wait = admission.refuse(num_bytes, address)
        if wait is not None:
            self._count(model, "refused")
            log.warning("Too many requests for %s.", model or "this server", extra={"model": model, "most": 1})
            message = f"Too many requests for {model or 'this server'}: {admission.num_requests} are in flight."
            raise RefusedError(Why.BUSY, message, wait)
        admission.enter(num_bytes, address)

    def leave(self, model: str, num_bytes: int, address: str = "", *, is_done: bool) -> None:
        """Record that an admitted request has ended; ``is_done`` is False if it was lost or got an error."""
        self._models.get(model, self._models[""]).leave(num_bytes, address, is_done=is_done)

    def end_unread(self) -> None:
        """End the streams that are not read, of models with requests that wait for their places."""
        full = {name for name in self.names if self._models[name].has_waiting}
        if self.upstream is not None and full:
            self.upstream.end_unread(lambda stream: bool(stream.models & full))

    def lost(self, model: str) -> RefusedError:
        """Build the refusal for a request that was in flight when its model's process ended, or the service stopped."""
        if not self.closed:
            return lost(model)
        message = f"The server is stopping, and ended this request to {model}."
        return RefusedError(Why.UNAVAILABLE, message, RETRY_SECONDS)

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Hold one of a limited number of places for a stream. The place is taken before the stream's first message.

        If no place is free for this client, the stream that has been quiet for longest is ended.

        Raises:
            RefusedError: no place is free, and no stream is quiet.
        """
        if not self.streams.has(address):
            streams = self.upstream.streams if self.upstream else set()
            is_full = self.streams.taken >= self.streams.most
            quiet = [stream for stream in streams if stream.is_quiet and (is_full or stream.address == address)]
            if not quiet:
                if self.upstream is not None:
                    self.upstream.end_unread(lambda stream: is_full or stream.address == address)
                raise RefusedError(Why.BUSY, f"Too many requests for this server: {self.streams.taken} streams.", 1.0)
            min(quiet, key=lambda stream: stream.moved).end()
        self.streams.take(address)
        try:
            yield
        finally:
            self.streams.give_back(address)

    async def _follow(self, upstream: Upstream, model: str, call: Callable[[Upstream], Awaitable[T]]) -> T:
        """Run ``call`` in a task that ``block`` can cancel, but that a client which disconnects does not cancel."""
        task = asyncio.ensure_future(call(upstream))
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
        """Wait up to 30 s for a new server, or until ``old`` proves healthy; ``None`` if ``model`` is unavailable."""
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
        """Refuse new requests to these models, cancel the models' requests in flight, and end their streams."""
        named = dict.fromkeys(models, reason)
        self.blocked |= named
        if self.upstream is not None:
            for task in [task for task, model in self.upstream.sent.items() if model in named]:
                task.cancel()
            self.upstream.end_streams(named)

    async def open(self, upstream: Upstream) -> None:
        """Make ``upstream`` the active server, and unblock all models."""
        self.upstream, self.blocked, self.closed = upstream, {}, ""
        await self._notify()

    async def settle(self) -> None:
        """Note that the active server proved healthy, although a request to it was lost."""
        self._num_settled += 1
        if self.upstream is not None and not self.blocked:
            self.upstream.num_lost = 0
        await self._notify()

    async def close(self, reason: str) -> None:
        """Refuse all further requests, and give ``reason`` to the clients."""
        self.closed = reason
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
