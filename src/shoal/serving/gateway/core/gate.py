"""Gate of the service: the one way of a client's request to the active Triton server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from shoal.serving.gateway.callers.access_log import Audit
from shoal.serving.gateway.callers.callers import Caller, Callers, Keys
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.callers.quotas import Reservation
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.relay import Relay
from shoal.serving.gateway.core.resending import Resending
from shoal.serving.gateway.core.stream_requests import StreamRequest, StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.logs import log
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.refusals import CLIENT_ERRORS, FailedError, LostError, RefusedError, log_failure, lost

T = TypeVar("T")


class Gate:
    """Admits requests and passes them to the active Triton server; shared by all front ends."""

    def __init__(
        self,
        active: ActiveServer,
        traffic: Traffic,
        exposure: Exposure,
        requests: StreamRequests,
        limits: Limits,
        *,
        resends: bool = True,
        keys: Keys | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.active, self.traffic, self.exposure, self.requests = active, traffic, exposure, requests
        self.limits, self.callers = limits, Callers(limits.trusted_proxies, keys)
        self.audit = audit
        self.resending = Resending(active, is_allowed=resends)
        self.refusals: Counter[str] = Counter()  # that are the client's fault, by kind

    def note_refusal(self, refused: RefusedError) -> None:
        """Count a refusal and log it (at most one line in 10 s), unless the server was busy or unavailable."""
        if (kind := refused.reason.value) in CLIENT_ERRORS:
            self.refusals[kind] += 1
            log.warning("A request was refused (%s): %s", kind, refused.message[:200], extra={"most": 1})

    def is_unready(self, model: str, caller: Caller) -> bool:
        """Whether a caller's request to a model would be refused now."""
        return not self.exposure.is_exposed(model, caller) or bool(self.active.trouble(model))

    def reserve_memory(self, caller: Caller, model: str = "") -> Reservation:
        """Return a memory reservation for a request. It grows as bytes arrive, and must be released.

        Raises:
            RefusedError: the model or the server is unavailable now.
        """
        self.traffic.find(model)
        return Reservation(self.traffic.memory, caller)

    async def ask(
        self,
        caller: Caller,
        model: str,
        body: bytes,
        call: Callable[[Upstream, str], Awaitable[T]],
        *,
        is_waited_for: Callable[[], bool] = lambda: True,
        request_id: str = "",
    ) -> T:
        """Run ``call`` on the active Triton server and return its result; ``call`` sends ``body``.

        ``call`` also gets the id with which to send the request in place of ``request_id``, which stands in the result;
        or an empty text: send it as it is. ``is_waited_for`` says whether the client still waits; if not, a lost
        request is not sent again.

        Raises:
            RefusedError: the request was refused, or it was lost because the server or the model's process died.
            FailedError: Triton answered with an error.
        """
        upstream, traffic = self.traffic.find(model), self.traffic
        if seconds := self.resending.quarantine.remaining(model, body):
            traffic.count(model, "refused")
            log_failure(model, request_id, lost(model, seconds).message)
            raise lost(model, seconds)
        own: StreamRequest | None = None

        async def send(upstream: Upstream) -> T:
            if own is not None:
                own.upstream = upstream
            return await call(upstream, own.own_id if own else "")

        with traffic.admit(model, len(body), caller) as admitted:
            try:
                with self.requests.follow(caller, model, request_id) as own:
                    async with traffic.queue(model).take(caller):
                        upstream = self.active.upstream or upstream  # another one may have replaced it meanwhile
                        answer = await self.resending.run(model, body, upstream, send, is_waited_for)
                self.active.note_answer()
                admitted.is_done = True
            except FailedError as error:
                self.active.note_answer()
                traffic.count(model, "failed")
                error.message = own.restore_id(error.message) if own else error.message
                if error.is_fault:
                    log_failure(model, request_id, error.message)
                raise
            except LostError:
                traffic.count(model, "lost")
                log_failure(model, request_id, self.active.lost(model).message)
                raise self.active.lost(model) from None
            else:
                traffic.count(model, "answered")
                return answer

    def stop(self, caller: Caller, model: str, request_id: str) -> None:
        """Stop the requests of a caller to ``model`` with the caller's id ``request_id``.

        Raises:
            RefusedError: no such request is in flight, or the model or the server is unavailable now.
        """
        self.traffic.find(model)
        self.requests.stop_own(caller, model, request_id)

    def open_stream(self, caller: Caller, model: str = "", metadata: Iterable[tuple[str, str]] = ()) -> Relay:
        """Return a stream to the active server, which is a context manager.

        Raises:
            RefusedError: ``model`` or the server is unavailable now.
        """
        return Relay(caller, self.traffic.find(model), self.active, self.traffic, self.requests, metadata)
