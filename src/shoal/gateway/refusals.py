"""Refusals of requests, and their reasons."""

from __future__ import annotations

from enum import Enum

RETRY_SECONDS = 5.0  # about the time of a restart


class Why(Enum):
    """Reason for a refusal; the value is its kind in the metrics."""

    BUSY = "busy"  # too many requests at a time
    UNAVAILABLE = "unavailable"
    WRONG = "wrong"  # malformed, or would crash Triton
    ABSENT = "absent"  # a model or a path that is not here, or not for clients
    CLOSED = "closed"  # a part of Triton that is not for clients
    METHOD = "method"
    LARGE = "large"
    ENCODING = "encoding"
    SLOW = "slow"


class RefusedError(Exception):
    """A request was refused before it ran or, if ``is_lost``, was lost; ``retry_after`` is in seconds, 0 for never."""

    def __init__(self, why: Why, message: str, retry_after: float = 0.0, *, is_lost: bool = False) -> None:
        super().__init__(message)
        self.why, self.message, self.retry_after, self.is_lost = why, message, retry_after, is_lost


class LostError(Exception):
    """The server, or a process of the model, ended while it had the request."""


def lost(model: str) -> RefusedError:
    """Build the refusal for a request that was in flight when its model's process ended, and is not resent."""
    message = f"The process of {model} ended while it had this request."
    return RefusedError(Why.UNAVAILABLE, message, RETRY_SECONDS, is_lost=True)
