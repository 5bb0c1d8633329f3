"""Why a request was not answered."""

from __future__ import annotations

from enum import Enum

RETRY_SECONDS = 5.0  # about what a server takes to come back


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
    """The answer to a request that was under way when its model's process ended, and is not sent again."""
    message = f"The process of {model} ended while it had this request."
    return RefusedError(Why.UNAVAILABLE, message, RETRY_SECONDS, is_lost=True)
