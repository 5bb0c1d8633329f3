"""Refusals of requests, with their reasons and messages."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

from shoal.serving.gateway.logs import log

RETRY_SECONDS = 5.0  # about the time of a restart
FAULT = "The server failed on this request, and its log says why."


class RefusalReason(Enum):
    """Reason for a refusal. The value is the label ``kind`` of the refusal in the metrics."""

    BUSY = "busy"  # too many requests at a time
    UNAVAILABLE = "unavailable"
    WRONG = "wrong"  # malformed, or would crash Triton
    ABSENT = "absent"  # a model or a path that is not here, or not for clients
    CLOSED = "closed"  # a part of Triton that is not for clients, or not for the client's key
    KEY = "key"  # no valid key
    LIMIT = "limit"  # more than the limits of the client's key, or too many wrong keys
    METHOD = "method"
    LARGE = "large"
    ENCODING = "encoding"
    SLOW = "slow"
    FAULT = "fault"  # of the gateway itself


CLIENT_ERRORS = [each.value for each in RefusalReason if each.value not in ("busy", "unavailable")]


class RefusedError(Exception):
    """A request was refused before it ran, or was lost because its server or model died.

    The client may retry after ``retry_after`` seconds; 0 means that it should not retry. ``request_id`` is the
    request's id, where it was known.
    """

    request_id = ""

    def __init__(self, reason: RefusalReason, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.message, self.retry_after = reason, message, retry_after

    @property
    def client_message(self) -> str:
        """The message for clients. It says after how many seconds to retry."""
        return f"{self.message} Try again in {self.retry_seconds} s." if self.retry_after else self.message

    @property
    def retry_seconds(self) -> int:
        """Whole seconds after which to retry, at least 1; no fewer than it takes."""
        return max(1, math.ceil(self.retry_after))

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers, or metadata, that say after how long to retry."""
        if not self.retry_after:
            return ()
        return ("retry-after", str(self.retry_seconds)), ("retry-after-ms", str(math.ceil(1000 * self.retry_after)))


class LostError(Exception):
    """The server, or a process of the model, ended while a request was in flight to it."""


class FailedError(Exception):
    """Triton answered with an error.

    ``status`` is a gRPC status code or an HTTP status. ``is_fault`` says that the server or the model is at fault, not
    the request.
    """

    def __init__(self, status: Any, message: str, *, is_fault: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.is_fault = status, message, is_fault


def wrong(message: str) -> RefusedError:
    """Build the refusal of a request that is malformed, or would crash Triton."""
    return RefusedError(RefusalReason.WRONG, message)


def lost(model: str, seconds: float = 0.0) -> RefusedError:
    """Build the refusal of a request that was lost with its model's process, or is quarantined for ``seconds``."""
    message = f"{f'The process of {model}' if model else 'The server'} ended while it had this request."
    message += " It may be the reason, and is refused meanwhile." if seconds else ""
    return RefusedError(RefusalReason.UNAVAILABLE, message, seconds or RETRY_SECONDS)


def closed(what: str) -> RefusedError:
    """Build the refusal for a part of Triton that is closed to clients."""
    return RefusedError(RefusalReason.CLOSED, f"{what} is closed to clients of this server.")


def no_path(path: str) -> RefusedError:
    """Build the refusal of a path that is not here."""
    return RefusedError(RefusalReason.ABSENT, f"There is no path {path[:100]!r} here. GET / lists the paths.")


def keyless(retry_after: float = 0.0) -> RefusedError:
    """Build the refusal of a client without a valid key: the same words whatever is wrong with the one it sent.

    A client at an address that has sent too many wrong keys has to wait for ``retry_after`` seconds.
    """
    if retry_after:
        message = "Too many requests for this server: they had wrong keys, and came from one address."
        return RefusedError(RefusalReason.LIMIT, message, retry_after)
    return RefusedError(RefusalReason.KEY, "A valid key is needed: Authorization: Bearer KEY")


def log_failure(model: str, request_id: str, message: str) -> None:
    """Log a request that failed because of the server or the model."""
    reason = message.splitlines()[0] if message else "no reason given"
    extra = {"model": model, "request_id": request_id}
    log.warning("A request to %s failed: %s", model or "the server", reason, extra=extra)
