"""Refusals of requests, with their reasons and messages, and what clients may see of Triton."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import grpc  # type: ignore[import-untyped]

from shoal.clients.client.failures import Kind, grpc_failure
from shoal.serving.gateway.logs import log

RETRY_SECONDS = 5.0  # about the time of a restart
FAULT = "The server failed on this request, and its log says why."
# Request headers that are passed on, besides those that describe the encoding.
HEADERS = ("traceparent", "tracestate", "x-request-id")
_CARRIED = re.compile(r"[ -~]{1,1024}")  # values of ASCII metadata: gRPC over HTTP/2, "Requests"
# The extensions of Triton that are open to clients.
EXTENSIONS = (
    "classification", "sequence", "schedule_policy", "model_configuration", "binary_tensor_data", "parameters",
    "statistics",
)  # fmt: skip
# Fields of a configuration that reveal the server's files and settings.
PRIVATE = ("parameters", "model_warmup", "cc_model_filenames", "default_model_filename", "metric_tags")
# Triton's messages for a dead model process, when a request was running and when it was queued.
_DEAD = re.compile(r"Stub process '.*' is not healthy|Failed to process the request\(s\).*Broken pipe")
_UNHEALTHY = re.compile(
    r"(?:in ensemble '[^']*', )*(?:Failed to process the request\(s\) for model(?: instance)? '[^']*', message: )?"
    r"Stub process '([^']*)' is not healthy\."
)
_NO_SERVER = (Kind.UNREACHABLE, Kind.NOT_TRITON, Kind.CONNECTION_LOST)
_TRACE = re.compile(r"\n+At:\n.*", re.DOTALL)


# --- refusals --------------------------------------------------------------------------------------------------------


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


def lost(model: str) -> RefusedError:
    """Build the refusal for a request that was in flight when its model's process ended, and that is not resent."""
    message = f"{f'The process of {model}' if model else 'The server'} ended while it had this request."
    return RefusedError(RefusalReason.UNAVAILABLE, message, RETRY_SECONDS)


def closed(what: str) -> RefusedError:
    """Build the refusal for a part of Triton that is closed to clients."""
    return RefusedError(RefusalReason.CLOSED, f"{what} is closed to clients of this server.")


def keyless(retry_after: float = 0.0) -> RefusedError:
    """Build the refusal of a client without a valid key: the same words whatever is wrong with the one it sent.

    A client at an address that has sent too many wrong keys has to wait for ``retry_after`` seconds.
    """
    if retry_after:
        message = "Too many requests for this server: they had wrong keys, and came from one address."
        return RefusedError(RefusalReason.LIMIT, message, retry_after)
    return RefusedError(RefusalReason.KEY, "A valid key is needed: Authorization: Bearer KEY")


def forwarded_metadata(metadata: Iterable[tuple[str, Any]] | None) -> tuple[tuple[str, str], ...]:
    """Return those headers or metadata that are passed on to Triton: tracing headers and request id.

    Values that gRPC does not carry, or longer than 1,024 characters, are dropped: with them, grpc's call never begins.
    """
    return tuple((key, value) for key, value in metadata or () if key in HEADERS and _CARRIED.fullmatch(value))


# --- Triton's words --------------------------------------------------------------------------------------------------


def is_dead(message: str) -> bool:
    """Whether Triton says that a model's process has died."""
    return bool(_DEAD.search(message))


def find_unhealthy(message: str) -> str:
    """Return the instance whose process Triton has given up, though it may still run; empty for other messages.

    The whole message has to be Triton's: a model's error may quote a client's text.
    """
    found = _UNHEALTHY.fullmatch(message)
    return found[1] if found else ""


def is_cut(code: Any, details: str) -> bool:
    """Whether a gRPC status says that the server, or the model's process, has died."""
    is_unavailable = code == grpc.StatusCode.UNAVAILABLE
    return is_dead(details) or (is_unavailable and grpc_failure(code.name, details).kind in _NO_SERVER)


def strip_traceback(message: str) -> str:
    """Strip the traceback from an error message of Triton, because the traceback names paths on the server."""
    return _TRACE.sub("", message)


def trim_config(config: dict[str, Any]) -> dict[str, Any]:
    """Remove fields that reveal the server's files and settings from a model's configuration in JSON."""
    return {name: value for name, value in config.items() if name not in PRIVATE}


def log_failure(model: str, request_id: str, message: str) -> None:
    """Log a request that failed because of the server or the model."""
    log.warning(
        "A request to %s failed: %s", model or "the server", message.splitlines()[0] if message else "no reason given",
        extra={"model": model, "request_id": request_id},
    )  # fmt: skip
