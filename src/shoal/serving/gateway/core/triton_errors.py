"""Triton's error messages, and the metadata that is passed on to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import grpc  # type: ignore[import-untyped]

from shoal.clients.client.failures import Kind, grpc_failure

# Request headers that are passed on, besides those that describe the encoding.
HEADERS = ("traceparent", "tracestate", "x-request-id")
_CARRIED = re.compile(r"[ -~]{1,1024}")  # values of ASCII metadata: gRPC over HTTP/2, "Requests"
# Triton's messages for a dead model process, when a request was running and when it was queued.
_DEAD = re.compile(r"Stub process '.*' is not healthy|Failed to process the request\(s\).*Broken pipe")
_UNHEALTHY = re.compile(
    r"(?:in ensemble '[^']*', )*(?:Failed to process the request\(s\) for model(?: instance)? '[^']*', message: )?"
    r"Stub process '([^']*)' is not healthy\."
)
_NO_SERVER = (Kind.UNREACHABLE, Kind.NOT_TRITON, Kind.CONNECTION_LOST)
# Parts of Triton's messages, and what a client reads in their place. The first names a path on the server, or says
# nothing; the others do not say what to send, or say what the server's owner could configure.
_REWORDED = [
    (re.compile(r"\n+At:\n.*|\[request id: <id_unknown>\] ", re.DOTALL), ""),
    (
        re.compile(r"attempt to access JSON non-string as string"),
        "each value of a BYTES tensor has to be a JSON string, so not null, a number or an object",
    ),
    (
        re.compile(r"attempt to access JSON non-(?:number|(?:un)?signed[ -]integer) as [\w -]+"),
        "each value has to be a number of the tensor's datatype, such as a whole one for INT64; not null, not a string",
    ),
    (
        re.compile(r"attempt to access JSON non-boolean as boolean"),
        "each value of a BOOL tensor has to be true or false",
    ),
    (re.compile(r"attempt to access JSON non-array as array"), 'it has to be a list, such as "data": [1, 2]'),
    (re.compile(r"Shape does not match true shape of 'data' field"), "it has not as many values as 'shape' says"),
    (
        re.compile(r"(support models with decoupled transaction policy)"),
        r"\1: POST /v2/models/NAME/generate_stream, or gRPC's stream",
    ),
    (
        re.compile(r" NOTE: Setting a non-zero max_batch_size .*"),
        " The first number of a shape is the number of rows: one row of shape [1] is sent as [1,1]. A model whose"
        " config.pbtxt has max_batch_size: 0 takes [1].",
    ),
]


def forwarded_metadata(metadata: Iterable[tuple[str, Any]] | None) -> tuple[tuple[str, str], ...]:
    """Return those headers or metadata that are passed on to Triton: tracing headers and request id.

    Values that gRPC does not carry, or longer than 1,024 characters, are dropped: with them, grpc's call never begins.
    """
    return tuple((key, value) for key, value in metadata or () if key in HEADERS and _CARRIED.fullmatch(value))


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


def reword(message: str) -> str:
    """Return an error message of Triton as clients read it: without a traceback, and with what to send."""
    for pattern, words in _REWORDED:
        message = pattern.sub(words, message)
    return message
