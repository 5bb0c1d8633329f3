"""The active Triton server, and the models that are unavailable now."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from shoal.serving.gateway.core.upstream import Upstream
from shoal.serving.gateway.refusals import RETRY_SECONDS, RefusalReason, RefusedError, lost

NEXT_SECONDS = 30.0  # that a request waits for the next server after its own died
MOST_RETRY_SECONDS = 30.0  # that a refusal names because a model has been unavailable for so long


class ActiveServer:
    """The active Triton server. The supervisor replaces it, and blocks models whose processes failed.

    ``blocked`` maps each unavailable model to the reason; ``closed`` is the reason why all requests are refused, empty
    while the service is open. ``suspected`` is when the latest request was lost, since something may be wrong, or 0.0.
    ``answered`` is the time of the last answer, ``next_start`` the time before which no next server is started.
    """

    def __init__(self) -> None:
        self.upstream: Upstream | None = None
        self.blocked: dict[str, str] = {}
        self.closed = "it is starting"
        self.suspected = 0.0
        self.answered = time.monotonic()
        self.next_start = 0.0
        self._since: dict[str, float] = {}  # when each unavailable model became so
        self._changed = asyncio.Condition()
        self._num_confirmed = 0

    # --- for requests --------------------------------------------------------------------------------------------

    def trouble(self, model: str = "") -> str:
        """Return the reason why requests would be refused now, or an empty string if they would not.

        Without a ``model``, return the reason for any one of the models whose requests would be refused.
        """
        return self.closed or (self.blocked.get(model, "") if model else next(iter(self.blocked.values()), ""))

    def find(self, model: str) -> Upstream:
        """Return the active server, if ``model`` is available. An empty name stands for the server's own API.

        Raises:
            RefusedError: the model or the server is unavailable now.
        """
        reason = self.closed or self.blocked.get(model, "")
        if reason or self.upstream is None:
            message = f"{model or 'The server'} is unavailable: {reason}."
            raise RefusedError(RefusalReason.UNAVAILABLE, message, self._retry_after(model))
        return self.upstream

    def _retry_after(self, model: str) -> float:
        """Estimate the seconds until a model is available: it is likely to stay away as long as it has been."""
        now = time.monotonic()
        away = min(now - self._since.get(model, now), MOST_RETRY_SECONDS)
        return max(RETRY_SECONDS, away, self.next_start - now + RETRY_SECONDS)

    def lost(self, model: str) -> RefusedError:
        """Build the refusal for a request that was in flight when its model's process ended, or the service stopped."""
        if not self.closed:
            return lost(model)
        message = f"The server is stopping, and ended this request{f' to {model}' if model else ''}."
        return RefusedError(RefusalReason.UNAVAILABLE, message, RETRY_SECONDS)

    def is_open(self, model: str) -> bool:
        """Whether requests to a model can be sent now."""
        return self.upstream is not None and not self.closed and model not in self.blocked

    def suspect(self) -> None:
        """Note that a request was lost."""
        self.suspected = time.monotonic()

    def note_answer(self) -> None:
        """Note that Triton has answered a request."""
        self.answered = time.monotonic()

    async def wait_for_next(self, model: str, old: Upstream) -> Upstream | None:
        """Wait up to 30 s for a new server, or until ``old`` proves healthy; ``None`` if ``model`` is unavailable."""
        confirmed = self._num_confirmed

        def is_there() -> bool:
            is_another = self.upstream is not old or self._num_confirmed > confirmed
            return bool(self.closed) or (is_another and model not in self.blocked)

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_there), NEXT_SECONDS)
        return self.upstream if self.is_open(model) else None

    # --- for the supervisor --------------------------------------------------------------------------------------

    def refuse(self, models: Iterable[str], reason: str) -> None:
        """Refuse new requests to these models. Their requests in flight go on."""
        named = dict.fromkeys(models, reason)
        self.blocked |= named
        self._since = dict.fromkeys(named, time.monotonic()) | self._since

    def block(self, models: Iterable[str], reason: str) -> None:
        """Refuse new requests to these models, cancel the models' requests in flight, and end their streams."""
        named = {*models}
        self.refuse(named, reason)
        if self.upstream is not None:
            for task in [task for task, model in self.upstream.sent.items() if model in named]:
                task.cancel()
            self.upstream.end_streams(named)

    async def activate(self, upstream: Upstream) -> None:
        """Make ``upstream`` the active server, and unblock all models."""
        self.upstream, self.blocked, self._since, self.closed, self.next_start = upstream, {}, {}, "", 0.0
        await self._notify()

    async def confirm_healthy(self) -> None:
        """Note that the active server proved healthy, although a request to it was lost."""
        self._num_confirmed += 1
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
