"""Classification of failed calls over both protocols, and their translation into errors for callers."""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
from enum import Enum
from typing import NamedTuple

from shoal.clients.client.calls import Call
from shoal.errors import InputError, ServerError, ShoalError, suggest

PORTS = {"grpc": 8001, "http": 8000}
SECURE = {"grpc": "grpcs", "http": "https"}  # schemes of addresses with TLS, by protocol


# End of the refusals of a server started by `shoal serve`.
_LATER = re.compile(r"Try again in (\d+) s\.")


class Kind(Enum):
    """Kind of a failure: decides whether a retry is safe, and which error the caller gets."""

    UNREACHABLE = "no connection: nothing was sent"
    UNTRUSTED = "no TLS connection: nothing was sent"
    NOT_TRITON = "the peer is not a Triton server"
    BUSY = "Triton rejected the request before running it"
    CONNECTION_LOST = "the connection broke: the request may have run"
    FAILED = "Triton, or a model in it, failed"
    TIMEOUT = "the time is up"
    REFUSED = "the request is at fault"
    KEY = "the server wants another key, or one at all"
    RESTRICTED = "the operation is restricted to administrators"


class CallError(Exception):
    """Failure of a call, raised by transports; ``explain`` makes the ``ShoalError`` for callers from it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message
        found = _LATER.search(message)
        self.after = float(found[1]) if found else 0.0  # seconds before which a retry is useless


class UnknownModelError(InputError):
    """The server has no model of this name."""


class RestrictedError(ServerError):
    """The server restricts this part of its interface to administrators."""


class Peer(NamedTuple):
    """Address, protocol and time-out of a request, for error messages.

    ``has_begun`` means that some answers of a stream have come; ``seconds`` is then the time-out between two answers.
    """

    url: str
    protocol: str
    seconds: float
    has_begun: bool = False


# --- classification -------------------------------------------------------------------------------------------------

# gRPC's wording. If the connection breaks before HTTP/2 is negotiated, the peer is not a gRPC server.
_NO_CONNECTION = re.compile(r"failed to connect|errors resolving|DNS resolution|hostname lookup")
_NO_TLS = re.compile(r"CERTIFICATE_VERIFY_FAILED|SSL_ERROR|Hostname Verification|Peer name|\[SSL", re.I)
_NO_HTTP2 = re.compile(
    r"Socket closed|Failed parsing HTTP/2|http1|Connection reset|http2 header|ALPN|content-type|Method not found", re.I
)
_BROKEN = re.compile(
    r"Socket closed|recvmsg|sendmsg|Connection reset|Broken pipe|GOAWAY|End of TCP stream|RST_STREAM|Stream removed"
    r"|Cancelling all calls",
    re.I,
)
# Wording of Triton and of `shoal serve` for requests that were rejected before they reached the model.
_REJECTED = re.compile(
    r"Exceeds maximum queue size|Server is stopping|is unavailable: |Too many requests for |Concurrent RPC limit"
)
_LOST = re.compile(r"ended while it had this request")  # wording of `shoal serve`
_DECOUPLED = re.compile(r"support models with decoupled transaction policy")
# Signs that a model failed, for messages without a status: Triton's wording for a dead process and for an exception, a
# shoal component's wording for an exception, and a traceback.
_BROKE = re.compile(r"^Stub process |^Failed to process the request|^Model \S+ failed on this request \(|\n\nAt:\n")


def grpc_failure(code: str, details: str) -> CallError:
    """Classify a gRPC status other than OK; ``code`` is its name."""
    if code == "DEADLINE_EXCEEDED":
        return CallError(Kind.TIMEOUT, details)
    if code == "UNAUTHENTICATED":
        return CallError(Kind.KEY, details)
    if code == "PERMISSION_DENIED":
        return CallError(Kind.RESTRICTED, details)
    if code == "UNAVAILABLE" and _NO_CONNECTION.search(details):
        reason = re.sub(r"^.*last error: \w+: ", "", details)
        if _NO_TLS.search(reason):
            return _untrusted(reason)
        return CallError(Kind.NOT_TRITON if _NO_HTTP2.search(reason) else Kind.UNREACHABLE, _plain(reason))
    if code in ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED") and not _REJECTED.search(details):
        return CallError(Kind.REFUSED, details)
    if code == "UNAVAILABLE" and "restricted" in details:
        return CallError(Kind.RESTRICTED, details)
    if code in ("UNAVAILABLE", "CANCELLED", "INTERNAL") and _BROKEN.search(details):
        return CallError(Kind.CONNECTION_LOST, _plain(details))
    if code in ("UNIMPLEMENTED", "UNKNOWN", "UNAVAILABLE") and (_NO_HTTP2.search(details) or not details):
        return CallError(Kind.NOT_TRITON, details or code)
    return _failed(code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"), details, code)


def http_failure(status: int, body: bytes) -> CallError:
    """Classify an HTTP status other than 200."""
    if status == 401:
        return CallError(Kind.KEY, f"HTTP {status}")
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return CallError(Kind.NOT_TRITON, f"HTTP {status}")
    if status in (400, 404, 413):
        return CallError(Kind.REFUSED, str(message))
    if status == 403:
        return CallError(Kind.RESTRICTED, str(message))
    return _failed(status in (429, 503), str(message), f"HTTP {status}")


def stream_failure(message: str) -> CallError:
    """Classify an error within a stream by its wording, because Triton sends it without a status."""
    if _BROKE.search(strip(message)):
        return CallError(Kind.FAILED, f"{message} (within a stream)")
    failure = _failed(True, message, "")
    return CallError(Kind.REFUSED, message) if failure.kind is Kind.FAILED else failure


def connection_failure(error: OSError) -> CallError:
    """Classify an error from opening a connection."""
    if error.errno == errno.ECONNREFUSED:
        return CallError(Kind.UNREACHABLE, "connection refused")
    if isinstance(error, ssl.SSLError):
        return _untrusted(str(error))
    return CallError(Kind.UNREACHABLE, "there is no such host" if _is_lookup(error) else _plain(str(error)))


def _untrusted(reason: str) -> CallError:
    """Classify a failed handshake: the peer has no TLS, or a certificate that is not trusted."""
    if found := re.search(r"verify.failed: ([^:(]+)", reason, re.I):
        reason = found[1].strip()
    return CallError(Kind.UNTRUSTED, "it has no TLS" if re.search("wrong.version", reason, re.I) else reason)


def _is_lookup(error: OSError) -> bool:
    return isinstance(error, socket.gaierror) or isinstance(error.__cause__, socket.gaierror)


def _failed(is_unavailable: bool, message: str, status: str) -> CallError:
    if _DECOUPLED.search(message):
        return CallError(Kind.REFUSED, message)
    if is_unavailable and _REJECTED.search(message):
        return CallError(Kind.BUSY, message)
    if is_unavailable and _LOST.search(message):
        return CallError(Kind.CONNECTION_LOST, message)
    return CallError(Kind.FAILED, f"{message} ({status})")


def _plain(reason: str) -> str:
    """Normalise a library's connection error to one short reason."""
    lowered = reason.lower()
    if "refused" in lowered:
        return "connection refused"
    if "resolv" in lowered or "lookup" in lowered:
        return "there is no such host"
    if re.search(r"reset|closed|broken pipe", lowered):
        return "connection closed"
    return reason or "no reason given"


# --- errors for callers ---------------------------------------------------------------------------------------------


def explain(failure: CallError, call: Call, server: Peer) -> ShoalError:
    """Build the error for callers: what happened, and what to do."""
    url, protocol, seconds, has_begun = server
    message = strip(failure.message, call.request_id)
    match failure.kind:
        case Kind.UNREACHABLE:
            return ServerError(
                f"No Triton answers at {url} ({message}).",
                "Start one: shoal serve REPOSITORY; or give the address of one: --url HOST:PORT",
            )
        case Kind.UNTRUSTED:
            return ServerError(
                f"No secure connection to the server at {url} was made: {message.rstrip('.')}.",
                "If the certificate is right, name its authority: --ca-cert FILE, in Python ca_cert=...",
            )
        case Kind.NOT_TRITON:
            other = "http" if protocol == "grpc" else "grpc"
            return ServerError(
                f"The server at {url} is not a Triton that speaks {protocol} ({message}).",
                f"Triton's port for {protocol} is {PORTS[protocol]} unless it was started with another; "
                f"for its {other} port: --protocol {other}, in Python protocol={other!r}; with TLS: {SECURE[protocol]}://{url}",
            )
        case Kind.CONNECTION_LOST if has_begun:
            return ServerError(
                f"The connection to the server at {url} broke during a stream ({message}).",
                "A stream is not sent again once an answer has come: ask again.",
            )
        case Kind.TIMEOUT if has_begun:
            return ServerError(
                f"The server at {url} sent no further answer within {seconds:g} s.",
                f"Give it longer: between={2 * seconds:g}",
            )
        case Kind.CONNECTION_LOST:
            return ServerError(
                f"The connection to the server at {url} broke during a request ({message}).",
                "It may have run. If requests may run twice, is_repeatable=True sends them again.",
            )
        case Kind.TIMEOUT:
            return ServerError(
                f"The server at {url} did not answer within {seconds:g} s.", f"Give it longer: timeout={2 * seconds:g}"
            )
        case Kind.BUSY:
            return _rejected(message, call, url)
        case Kind.KEY:
            return ServerError(
                f"The server at {url} wants a key, and did not accept what it got.",
                "Give one that is valid: --api-key-file FILE, or SHOAL_API_KEY; in Python api_key=...",
            )
        case Kind.RESTRICTED:
            return RestrictedError(f"The server at {url} does not allow this: {message.rstrip('.')}.")
        case Kind.REFUSED:
            return _refused(message, call, url)
        case Kind.FAILED:
            return _failed_within(message) or _server_failed(message, url)


def strip(message: str, request_id: str = "") -> str:
    """Return ``message`` without the prefixes that Triton's core adds."""
    prefix = re.compile(rf"in ensemble '[^']*', |\[request id: ({re.escape(request_id)}|<id_unknown>)\] ")
    while found := prefix.match(message):
        message = message[found.end() :]
    return message


def _rejected(message: str, call: Call, url: str) -> ServerError:
    if _LATER.search(message):
        what, _, fix = message.rpartition(" Try")
        return ServerError(f"The server at {url} rejected the request: {what}", f"Try{fix}")
    if "queue" in message:
        return ServerError(
            f"The server at {url} is busy: the queue of {call.model} is full.",
            "Send fewer requests at a time, or try more often: retries=10",
        )
    return ServerError(f"The server at {url} is stopping.", "Start one: shoal serve REPOSITORY")


def _failed_within(message: str) -> ShoalError | None:
    """Return the error of a failed shoal component, without what Triton adds to it.

    Return None if ``message`` is not from a shoal component.
    """
    found = re.match(r"(Model \S+ failed on this request \(\w+\)\.) (See the server's log\.) \([^()]*\)$", message)
    return ShoalError(found[1], found[2]) if found else None


def _server_failed(message: str, url: str) -> ServerError:
    stub = re.match(r"Stub process '(.*?)(_\d+)*' is not healthy", message)
    if stub:
        return ServerError(
            f"The process of model {stub[1]} at {url} has died.", "Restart the server; its log says why it died."
        )
    without_trace = re.sub(r"\n\nAt:\n.*?(?= \([^()]*\)$|$)", "", message, flags=re.DOTALL)
    return ServerError(f"The server at {url} failed: {without_trace}")


def _refused(message: str, call: Call, url: str) -> InputError:
    if message == "Not Found" or message.startswith("Request for unknown model"):
        listed = re.search(r"Models: (.+)\.$", message)
        known = listed[1].split(", ") if listed else []
        fix = suggest(call.model, known) if known else "Name a model of its repository."
        if "closed to clients" in message:
            return UnknownModelError(
                f"The server at {url} does not offer {call.model} to clients: it is a step of an ensemble.",
                f"Open it: shoal serve REPOSITORY --expose {call.model}",
            )
        if call.version and f"version {call.version} " in message:
            what = f"The server at {url} has not loaded version {call.version} of {call.model}."
            return UnknownModelError(
                what, "Leave the version out for the latest, or change the model's version_policy."
            )
        return UnknownModelError(f"The server at {url} has no model {call.model}.", fix)
    if _DECOUPLED.search(message):
        return InputError(
            f"{call.model} answers in pieces.", "Use client.stream(...), on the command line: shoal infer --stream"
        )
    return InputError(shift_row(message, call.first_row))


def shift_row(message: str, first_row: int) -> str:
    """Add ``first_row`` to the row number in a component's message, which counts from the first row of the part."""
    return re.sub(r"^([^\s\[\]]+)\[(\d+)\]", lambda row: f"{row[1]}[{int(row[2]) + first_row}]", message)
