"""Sans-I/O request logic shared by Client and AsyncClient: options, retry policy and request flows.

A flow is a generator. It yields lists of calls; the calls of one list may be sent concurrently. It receives their
results, or the error of the first call that failed. At its end it returns the final result.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from shoal.authoring.repository.default_model import find_top
from shoal.clients.client.calls import (
    RESERVED,
    Answer,
    Call,
    Description,
    Method,
    Parameter,
    ServedModel,
    check_outputs,
    count_rows,
    join,
    split,
    to_arrays,
    too_many_rows,
)
from shoal.clients.client.failures import PORTS, SECURE, CallError, Kind, Peer, RestrictedError, UnknownModelError
from shoal.clients.client.tls import Tls
from shoal.clients.keys import check_key
from shoal.errors import InputError, ShoalError
from shoal.kit.component.spec import STRING, ModelSpec, TensorSpec

T = TypeVar("T")
Flow: TypeAlias = Generator[list[Call], list[Any], T]
MAX_SECONDS = 1e7  # largest time-out that the libraries support
FIRST_PAUSE, MAX_PAUSE = 0.1, 5.0  # seconds before a retry; each pause is twice the one before


# --- options --------------------------------------------------------------------------------------------------------


class ClientOptions(NamedTuple):
    """Validated options of a client."""

    url: str
    protocol: str
    timeout: float
    concurrency: int
    retries: int
    is_repeatable: bool
    tls: Tls | None = None


def read_url(
    url: str, protocol: str, ca_cert: str | os.PathLike[str] = "", client_cert: str | os.PathLike[str] = ""
) -> tuple[str, Tls | None]:
    """Return ``url`` as HOST:PORT, with the TLS that its scheme asks for.

    If it is empty, the address is this machine and Triton's usual port for the protocol.

    Raises:
        InputError: ``url`` names another protocol, or is not an address with a port.
    """
    example = f"127.0.0.1:{PORTS[protocol]}"
    scheme, _, rest = str(url or example).rpartition("://")
    if scheme not in ("", protocol, SECURE[protocol]):
        is_http = scheme in ("http", "https")
        shown = url if scheme == "https" else rest.rstrip("/") if is_http else example
        raise InputError(
            f"{url} names the protocol {scheme}; this client speaks {protocol}, with TLS {SECURE[protocol]}.",
            f"Give the address alone, {shown}"
            + (", and the protocol: --protocol http, in Python protocol='http'" if is_http else ""),
        )
    address = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@?#\[\]]+):(\d{1,5})/?", rest)
    if not address or not 0 < int(address[2]) < 2**16:
        raise InputError(f"{url!r} is not HOST:PORT.", f"Triton's port for {protocol} is {PORTS[protocol]}: {example}")
    is_secure = scheme == SECURE[protocol]
    for name, path in (("ca_cert", ca_cert), ("client_cert", client_cert)):
        if path and not is_secure:
            fix = f"Give the address with its scheme: {SECURE[protocol]}://{rest.rstrip('/')}"
            raise InputError(f"{name} has no effect without TLS.", fix)
    return f"{address[1]}:{address[2]}", Tls.read(str(ca_cert), str(client_cert)) if is_secure else None


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """Return ``seconds``, checked to be a finite number above 0.

    Raises:
        InputError: ``seconds`` is something else.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0 or math.isinf(seconds):
        raise InputError(f"{name} is {seconds!r}; it must be a number of seconds above 0.", f"For a minute: {name}=60")
    return seconds


def closed_client() -> InputError:
    """Build the error for the use of a client after ``close``."""
    return InputError("This client is closed.", "Make another client.")


def _check_count(name: str, count: int, least: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise InputError(
            f"{name} is {count!r}; it must be a whole number, {least} or more.", f"Give {name}={least + 3}"
        )
    return count


def check_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Check request parameters for the types that the protocol supports.

    Raises:
        InputError: a value has another type, or a name is reserved by Triton.
    """
    if not isinstance(parameters, Mapping):
        raise InputError(f"parameters is {parameters!r}, not values by name.", 'For example: {"NAME": "value"}')
    for name, value in parameters.items():
        if name in RESERVED or name.startswith("triton_"):
            raise InputError(f"The parameter {name} is reserved by Triton.", "Choose another name.")
        is_number = type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63)
        if not is_number and not isinstance(value, str):
            raise InputError(f"The parameter {name} is {value!r}.", "Give a str, a bool, a float or an int of 64 bits.")
    return dict(parameters)


# --- retries --------------------------------------------------------------------------------------------------------


class Attempts:
    """Attempts of one call: the time left, and the back-off before the next attempt."""

    def __init__(self, call: Call, settings: ClientOptions) -> None:
        self.seconds = settings.timeout if call.timeout is None else call.timeout
        self._deadline = time.monotonic() + min(self.seconds, MAX_SECONDS)
        self._retries = settings.retries
        self._safe = {Kind.UNREACHABLE, Kind.BUSY} | ({Kind.CONNECTION_LOST} if settings.is_repeatable else set())
        self._pauses = 0
        self._settings = settings

    @property
    def server(self) -> Peer:
        """Address, protocol and time-out, for error messages."""
        return Peer(self._settings.url, self._settings.protocol, self.seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline, more than 0: some libraries take a time-out of 0 for none.

        Raises:
            CallError: none are left; nothing is sent.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise CallError(Kind.TIMEOUT, "before sending")
        return seconds

    def pause(self, failure: CallError) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        The pause is at least as long as the server asks. It has jitter, so that clients rejected together do not retry
        together.
        """
        if failure.kind not in self._safe or self._pauses >= self._retries:
            return None
        own = min(MAX_PAUSE, FIRST_PAUSE * 2**self._pauses) * random.uniform(0.5, 1)
        seconds = max(failure.after * random.uniform(1, 1.2), own)
        self._pauses += 1
        return seconds if seconds < self._deadline - time.monotonic() else None


# --- flows ----------------------------------------------------------------------------------------------------------


class InferRequest(NamedTuple):
    """Inputs and options of a request as the caller gave them, not yet checked."""

    model: str
    values: Mapping[str, Any] | None
    named: Mapping[str, Any]
    outputs: Sequence[str] | None = None
    request_id: str = ""
    timeout: float | None = None
    parameters: Mapping[str, Parameter] | None = None
    version: int | None = None


def merge(inputs: Mapping[str, Any] | None, named: Mapping[str, Any], declared: Sequence[TensorSpec]) -> dict[str, Any]:
    """Merge the inputs given as a mapping, or as a data frame of pandas or polars, and as keywords.

    The required inputs of ``declared``, those of the model, are the example of an error.

    Raises:
        InputError: an input is given both ways, or ``inputs`` is something else.
    """
    given: Any = {} if inputs is None else inputs
    if hasattr(given, "columns") and hasattr(given, "dtypes"):
        given = {str(name): given[name] for name in given.columns}
    if not isinstance(given, Mapping):
        needed = [spec for spec in declared if not spec.is_optional] or declared[:1]
        example = ", ".join(f'"{spec.name}": {_show_rows(spec)}' for spec in needed)
        what = f"The inputs are of type {type(given).__name__}, not values by name."
        raise InputError(what, f"For example: {{{example}}}")
    if both := sorted(given.keys() & named.keys()):
        raise InputError(f"The input {both[0]} is given twice.", "Give it in the mapping or by keyword.")
    return {**given, **named}


def _show_rows(spec: TensorSpec) -> str:
    """Return an example of an input's value: one row of one value, or the shape of an array of several."""
    if spec.dims == (1,):
        return '["A text."]' if spec.dtype == STRING else "[1]"
    shape = ", ".join("N" if size == -1 else str(size) for size in spec.dims)
    return f"an array of shape [rows, {shape}]"


def _check_model(model: Any) -> None:
    if not model:
        raise InputError("The model has no name.", "Name a model of the server's repository.")
    if not isinstance(model, str):
        raise InputError(f"The model is {model!r}, not a name.", 'Give its name first: ("MODEL", {"TEXT": [...]})')


class Flows:
    """Make the flow of each kind of request to one server. A flow is a generator of the calls that a request needs.

    The models' descriptions are cached.
    """

    def __init__(self) -> None:
        self._described: dict[str, ModelSpec] = {}

    def describe(self, model: str, timeout: float | None = None) -> Flow[ModelSpec]:
        """Fetch the model's description, from the cache if possible."""
        _check_model(model)
        if model not in self._described:
            try:
                (found,) = yield [Call(Method.CONFIG, model, timeout=timeout)]
            except RestrictedError:
                (found,) = yield [Call(Method.METADATA, model, timeout=timeout)]
            self._described[model] = found.spec
        return self._described[model]

    def find_default(self) -> Flow[str]:
        """Find the server's default model: `shoal serve` names one; on other servers, ``find_top`` chooses it."""
        try:
            (found,) = yield [Call(Method.CONFIG, "")]
        except UnknownModelError:
            pass
        else:
            self._described[found.spec.name] = found.spec
            return str(found.spec.name)
        try:
            names = dict.fromkeys(each.name for each in (yield from self.list_models()) if each.is_ready)
            described: Sequence[Description] = yield [Call(Method.CONFIG, name) for name in names]
        except RestrictedError as error:
            raise InputError(f"{error.what} Which model is meant?", "Name it, as in --model NAME") from None
        return find_top({model.spec.name: model.calls for model in described}, "The server")

    def list_models(self) -> Flow[list[ServedModel]]:
        """Fetch the models of the server that the client may ask."""
        (found,) = yield [Call(Method.INDEX, "")]
        return found  # type: ignore[no-any-return]

    def is_ready(self, model: str) -> Flow[bool]:
        """Whether the server has ``model`` loaded."""
        (answer,) = yield [Call(Method.READY, model)]
        return bool(answer)

    def infer(self, request: InferRequest) -> Flow[Answer]:
        """Run one request, in parts if it has more rows than the model takes at a time."""
        call, spec = yield from self._prepare(Method.INFER, request)
        try:
            if not spec.is_batched or count_rows(call.arrays) <= spec.max_batch_size:
                (answer,) = yield [call]
                return answer  # type: ignore[no-any-return]
            parts = split(call, spec.max_batch_size)
            return join(call, parts, (yield parts))
        except InputError as error:
            self.note_refusal(error, call.model)
            raise

    def stream(self, request: InferRequest) -> Flow[Call]:
        """Check one streamed request; return the call for the client to send."""
        call, spec = yield from self._prepare(Method.STREAM, request)
        if spec.is_batched and count_rows(call.arrays) > spec.max_batch_size:
            raise too_many_rows(count_rows(call.arrays), spec)
        return call

    def note_refusal(self, error: ShoalError, model: str) -> None:
        """Drop the cached description of a model that refused a request, because the model may have been replaced."""
        if isinstance(error, InputError):
            self._described.pop(model, None)

    def _prepare(self, method: Method, request: InferRequest) -> Flow[tuple[Call, ModelSpec]]:
        """Check one request against the model's description.

        A cached description is fetched again if the request does not fit it, because the model may have been replaced.
        """
        timeout = None if request.timeout is None else check_timeout(request.timeout)
        _check_model(request.model)
        is_cached = request.model in self._described
        spec = yield from self.describe(request.model, timeout)
        try:
            return _make_call(method, request, spec), spec
        except InputError as error:
            if not is_cached:
                raise
            self.note_refusal(error, request.model)
        spec = yield from self.describe(request.model, timeout)
        return _make_call(method, request, spec), spec


def _make_call(method: Method, request: InferRequest, spec: ModelSpec) -> Call:
    return Call(
        method,
        request.model,
        outputs=check_outputs(request.outputs or (), [output.name for output in spec.outputs]),
        arrays=to_arrays(spec.inputs, merge(request.values, request.named, spec.inputs), is_batched=spec.is_batched),
        request_id=request.request_id,
        parameters=check_parameters(request.parameters or {}),
        timeout=request.timeout,
        spec=spec,
        version=None if request.version is None else _check_count("version", request.version, 1),
    )


# --- clients --------------------------------------------------------------------------------------------------------


class BaseClient:
    """Checked options and request flows of a client, blocking or asynchronous."""

    def __init__(
        self,
        url: str = "",
        *,
        protocol: str = "grpc",
        timeout: float = 60.0,
        concurrency: int = 4,
        retries: int = 3,
        is_repeatable: bool = False,
        api_key: str = "",
        ca_cert: str | os.PathLike[str] = "",
        client_cert: str | os.PathLike[str] = "",
    ) -> None:
        if protocol not in PORTS:
            raise InputError(f"Unknown protocol {protocol!r}.", f"Known: {', '.join(PORTS)}.")
        check_timeout(timeout)
        _check_count("concurrency", concurrency, 1)
        _check_count("retries", retries, 0)
        self.url, tls = read_url(url, protocol, ca_cert, client_cert)
        self.protocol, self.timeout = protocol, timeout
        self._options = ClientOptions(self.url, protocol, timeout, concurrency, retries, is_repeatable, tls)
        key = check_key(api_key) if api_key else ""
        # In a closure, where no listing of the client's attributes shows the key.
        self._connect: Callable[[Callable[..., Any]], Any] = lambda make: make(self.url, key, self._options.tls)
        self._flows, self._is_closed = Flows(), False
        self._open()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise InputError("A client has no model of its own to call.", 'Name one: client.infer("MODEL", INPUT=values)')

    def _open(self) -> None:
        """Prepare the connections."""
        raise NotImplementedError
