"""Requests and streams in flight: their numbers, memory and places, and their outcomes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from shoal.serving.gateway.callers.accounts import Together
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.quotas import Quota, Reservation
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.admission import Admission
from shoal.serving.gateway.core.fair_queue import FairQueue
from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.refusals import RefusalReason, RefusedError

OUTCOMES = "answered", "failed", "refused", "unavailable", "lost"


class Admitted:
    """A request in flight. ``is_done``: its work was done, so it was neither lost nor got an error."""

    is_done = False


class Traffic:
    """Counts the requests in flight, and refuses those for which there is no room.

    ``slots`` gives, for some models, how many requests the model computes at once (see ``Admission``), and ``widths``
    how many are in Triton if several callers ask at once (see ``FairQueue``).
    """

    def __init__(
        self,
        active: ActiveServer,
        models: Iterable[str],
        limits: Limits,
        *,
        max_wait: float,
        slots: Mapping[str, int] | None = None,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        self.memory = Quota(int(limits.memory_mib * 2**20), limits.client_share)
        self.streams = Quota(limits.max_streams, limits.client_share)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by model, and by kind
        self._active = active
        # unknown names share the entry "", or clients could fill the memory with them
        self._models = {
            name: Admission(max_wait, slots=(slots or {}).get(name, 0), share=limits.client_share)
            for name in (*models, "")
        }
        self._with_slots, self._no_queue = frozenset(slots or ()), FairQueue(0)
        self._queues = {
            name: FairQueue((widths or {}).get(name, 0), _leave_free((slots or {}).get(name, 0)))
            for name in self._models
        }

    @property
    def models(self) -> list[str]:
        """Names of all models."""
        return [name for name in self._models if name]

    @property
    def num_requests(self) -> int:
        """Number of requests in flight, plus the number of streams that are not quiet (``TritonStream.is_quiet``)."""
        streams = self._active.upstream.streams if self._active.upstream else ()
        return sum(model.num_requests for model in self._models.values()) + sum(not s.is_quiet for s in streams)

    def is_full(self, model: str) -> bool:
        """Whether a model has at least ``slots`` requests in flight; False for a model without this parameter."""
        return self._models[model].is_full

    def in_flight(self, model: str) -> int:
        """Return the number of requests to a model that are in flight, including requests within streams."""
        return self._models[model].num_requests

    def count(self, model: str, outcome: str) -> None:
        """Count the outcome of a request."""
        self.outcomes[model if model in self._models else "", outcome] += 1

    def find(self, model: str) -> Upstream:
        """Return the active server, if ``model`` is available. An empty name stands for the server's own API.

        Raises:
            RefusedError: the model or the server is unavailable now.
        """
        try:
            return self._active.find(model)
        except RefusedError:
            self.count(model, "unavailable")
            raise

    def grow(self, held: Reservation, num_bytes: int) -> None:
        """Reserve memory for more bytes of a request.

        Raises:
            RefusedError: the memory for requests is full, or the caller has used up its share.
        """
        if not held.has_room(num_bytes):
            raise RefusedError(RefusalReason.BUSY, "Too many requests for this server: they fill its memory.", 1.0)
        held.grow(num_bytes)

    def check_limits(self, caller: Caller, model: str) -> None:
        """Raise ``RefusedError`` if a caller's key has used up one of its limits, which are for inference."""
        if caller.limits is not None:
            try:
                caller.limits.check()
            except RefusedError:
                self.count(model, "refused")
                raise

    @contextmanager
    def admit(self, model: str, num_bytes: int, caller: Caller) -> Iterator[Admitted]:
        """Count a request to a model as in flight until the context ends.

        Raises:
            RefusedError: too many requests to the model are in flight, or the request would wait too long, or the
                caller's key has used up a limit.
        """
        admission = self._models.get(model, self._models[""])
        limits = caller.limits if model else None
        if limits is not None:
            self.check_limits(caller, model)
        wait = admission.refuse(num_bytes, caller)
        if wait is not None:
            self.count(model, "refused")
            log.warning("Too many requests for %s.", model or "this server", extra={"model": model, "most": 1})
            message = f"Too many requests for {model or 'this server'}: {admission.num_requests} are in flight."
            raise RefusedError(RefusalReason.BUSY, message, wait)
        admitted = Admitted()
        admission.enter(num_bytes, caller)
        try:
            with limits.use() if limits is not None else nullcontext():
                yield admitted
        finally:
            admission.leave(num_bytes, caller, is_done=admitted.is_done)

    @contextmanager
    def count_once(self, caller: Caller) -> Iterator[Caller]:
        """Return the caller whose requests within the context are parts of one: its key's limits count them as one."""
        if caller.account is None:
            yield caller
            return
        with Together(caller.account) as together:
            yield replace(caller, together=together)

    def queue(self, model: str) -> FairQueue:
        """Return the queue of callers that wait to send a request to a model."""
        return self._queues.get(model, self._queues[""])

    def stream_queue(self, model: str) -> FairQueue:
        """Return the same for requests within streams: only to models with ``slots`` do they wait.

        Of others, it is not known how many such requests they compute at once, or whether these ever end.
        """
        return self.queue(model) if model in self._with_slots else self._no_queue

    @contextmanager
    def reserve_stream(self, caller: Caller) -> Iterator[None]:
        """Hold one of a limited number of places for a stream. The place is taken before the stream's first message.

        If no place is free for this caller, the stream that has been quiet for longest is ended.

        Raises:
            RefusedError: no place is free, and no stream is quiet.
        """
        if not self.streams.has(caller):
            streams = self._active.upstream.streams if self._active.upstream else set()
            is_full = self.streams.taken >= self.streams.most
            rivals = {stream for stream in streams if is_full or stream.caller.id == caller.id}
            quiet = [stream for stream in rivals if stream.is_quiet]
            if not quiet:
                for stream in rivals:
                    stream.end_if_unread()
                message = f"Too many requests for this server: {self.streams.taken} streams are open"
                if not is_full:
                    message += f", and one client has at most {self.streams.share} of {self.streams.most}"
                raise RefusedError(
                    RefusalReason.BUSY, f"{message}. End some, or send several requests in one stream.", 1.0
                )
            min(quiet, key=lambda stream: stream.moved).end()
        self.streams.take(caller)
        try:
            yield
        finally:
            self.streams.give_back(caller)

    def end_unread(self) -> None:
        """End the streams that are not read for too long, or of whose models requests wait for their places."""
        full = {name for name in self.models if self._models[name].has_waiting}
        for stream in list(self._active.upstream.streams) if self._active.upstream else ():
            if stream.began and time.monotonic() - stream.began > stream.patience:
                stream.give_up()
            elif stream.models & full:
                stream.end_if_unread()


def _leave_free(slots: int) -> int:
    """Return how many requests may be in Triton, if there are several callers, before places are kept free."""
    return slots and max(1, slots - max(1, slots // 8))
