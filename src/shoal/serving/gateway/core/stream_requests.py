"""Requests that can be stopped: their ids, the marks on their last answers, their counts, and requests to stop them.

Triton 24.10 does not tell the models of an ensemble that the client has disconnected, and can crash when a stream is
abandoned. So the service gives each request within a stream an id that no other request has, and asks Triton to mark
the request's last answer. When the client of a decoupled model disconnects, the service sends a *stop request* to the
model, or to those models of the ensemble that have an input ``stop``. A stop request has that input and the same id as
the request to stop. Remaining answers are read and discarded.

Clients' own stop requests are not passed on: the service stops the requests of the same client that have the client's
id. So a request outside streams, too, gets an id that no other request has, if it has one and its model can be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2

from shoal.authoring.repository.call_graph import find_leaves, is_decoupled
from shoal.authoring.repository.config import ModelConfig
from shoal.clients.client.calls import IS_FINAL, WITH_FINAL
from shoal.kit.component.spec import BATCH_INDEX, STOP, STRING, ModelSpec
from shoal.serving.gateway.callers.access_log import AccessEntry, current_entry
from shoal.serving.gateway.callers.callers import ANYONE, Caller
from shoal.serving.gateway.core.traffic import Admitted
from shoal.serving.gateway.core.upstream import SERVICE, Upstream
from shoal.serving.gateway.refusals import wrong

METHOD = f"{SERVICE}ModelStreamInfer"
_AGAIN_SECONDS = 0.2  # until the next stop request: the first may come before the request reaches its engine
_MOST_STOP_BYTES = 2**16  # of a stop request, which asks for nothing
_KINDS = {"num_input_tokens": "input", "num_output_tokens": "output"}  # by the output that counts them
_COUNTED = {BATCH_INDEX, *_KINDS}
KINDS = tuple(_KINDS.values())


@dataclass
class StreamRequest:
    """Request that was sent to Triton, within a stream or stoppable, and does not have its last answer yet.

    ``own_id`` is the id that the service gave it, ``request_id`` the client's id. ``is_end_wanted`` says whether the
    client, too, asked for a mark on the last answer.
    """

    own_id: str
    model: str
    request_id: str
    is_decoupled: bool
    meter: TokenMeter | None = None
    entry: AccessEntry = field(default_factory=current_entry)
    num_bytes: int = 0
    is_end_wanted: bool = False
    caller: Caller = ANYONE
    upstream: Upstream | None = None  # to which it was sent
    has_begun: bool = False  # it has had an answer
    is_stopping: bool = False
    sent: float = field(default_factory=lambda: time.monotonic())
    admitted: Admitted = field(default_factory=Admitted)
    ends: ExitStack = field(default_factory=ExitStack)  # closed after the last answer

    def mark(self, request: bytes) -> bytes:
        """Set ``own_id`` in a serialised request, and ask Triton to mark the last answer.

        Fields that are appended to a serialised protobuf message replace earlier values. If Triton does not know yet
        that an answer is the last when it sends the answer, it later sends an empty answer with the mark.
        """
        added = service_pb2.ModelInferRequest(id=self.own_id)
        added.parameters[WITH_FINAL].bool_param = True
        return request + bytes(added.SerializeToString())

    def is_last(self, message: Any) -> bool:
        """Whether an answer to this request is its last one.

        An answer of a model that is not decoupled is always the last one. From a decoupled model, an error without a
        mark means that Triton refused the request, so no answer follows. An error that the model itself sends has a
        mark that says whether answers follow.
        """
        parameters = message.infer_response.parameters
        return not self.is_decoupled or bool(
            parameters[IS_FINAL].bool_param if IS_FINAL in parameters else message.error_message
        )

    def restore_id(self, error: str) -> str:
        """Replace ``own_id`` in an error message of Triton with the client's id, if it has one."""
        return error.replace(self.own_id, self.request_id or "<id_unknown>").replace("[request id: <id_unknown>] ", "")


class StreamRequests:
    """Ids, counters and stop requests for the requests to the models of a repository.

    ``open`` are the requests in flight by the id that the service gave: all those within streams, and others to models
    that can be stopped.
    """

    def __init__(self, configs: Mapping[str, ModelConfig]) -> None:
        members = find_leaves(configs)
        self._decoupled = {name for name, config in configs.items() if is_decoupled(config, configs.get)}
        self._takes_stop = {
            name for name, config in configs.items() if any(tensor.name == STOP for tensor in config.spec.inputs)
        }
        engines = {name: members[name] if config.is_ensemble else {name} for name, config in configs.items()}
        self._stops = {
            name: [_make_request(configs[engine]) for engine in sorted(found & self._takes_stop)]
            for name, found in engines.items()
        }
        self.open: dict[str, StreamRequest] = {}
        self._stopping = set[asyncio.Task[None]]()
        self.tokens = TokenCounts(config.spec for config in configs.values())
        self.first_answers: dict[str, list[float]] = {}  # by model: how many, and the sum of their seconds
        self._numbers = itertools.count()

    @property
    def models(self) -> list[str]:
        """Names of the decoupled models."""
        return sorted(self._decoupled)

    def is_decoupled(self, model: str) -> bool:
        """Whether a model is decoupled: it may give any number of answers to a request."""
        return model in self._decoupled

    def may_stop(self, model: str, body: bytes) -> bool:
        """Whether a request's body, in any encoding, can be a client's stop request: most requests are none."""
        return model in self._takes_stop and len(body) <= _MOST_STOP_BYTES and STOP.encode() in body

    def is_stop(self, model: str, message: bytes) -> bool:
        """Whether a serialised request to ``model`` is a client's stop request: it ends the request of the same id."""
        return self.may_stop(model, message) and _is_set(message, STOP)

    def check(self, caller: Caller, model: str, message: bytes) -> None:
        """Check that the tokens of a serialised request will be counted, if its key has a limit of them.

        Raises:
            RefusedError: it names outputs, and not those that count its tokens.
        """
        if not (caller.account and caller.account.limits.tokens_per_minute and self.tokens.meter(model)):
            return
        outputs = {output.name for output in service_pb2.ModelInferRequest.FromString(message).outputs}
        if outputs and (absent := sorted(_KINDS.keys() - outputs)):
            raise wrong(
                f"This key has a limit of tokens. Ask for the outputs {' and '.join(absent)} too, or name none."
            )

    @contextmanager
    def begin(
        self,
        model: str,
        request_id: str,
        message: bytes = b"",
        *,
        num_bytes: int = 0,
        is_end_wanted: bool = False,
        caller: Caller = ANYONE,
        upstream: Upstream | None = None,
    ) -> Iterator[StreamRequest]:
        """Keep the record of a new request, the serialised ``message``, within the context.

        It has an id that no other request has.
        """
        own_id = f"shoal-{os.getpid()}-{next(self._numbers)}"
        entry = current_entry()
        meter = self.tokens.meter(model, message, entry.count_tokens)
        is_decoupled = self.is_decoupled(model)
        request = self.open[own_id] = StreamRequest(
            own_id, model, request_id, is_decoupled, meter, entry, num_bytes, is_end_wanted, caller, upstream
        )
        try:
            yield request
        finally:
            del self.open[own_id]

    @contextmanager
    def follow(self, caller: Caller, model: str, request_id: str) -> Iterator[StreamRequest | None]:
        """Keep the record of a request outside streams within the context; None if nobody can stop it."""
        if not (request_id and self._stops.get(model)):
            yield None
            return
        with self.begin(model, request_id, caller=caller) as request:
            yield request

    def count(self, request: StreamRequest, message: Any) -> bool:
        """Count an answer, a ``ModelStreamInferResponse``; return whether it is the last answer to its request."""
        if request.meter is not None:
            request.meter.read(message.infer_response)
        if not request.has_begun:
            request.has_begun = True
            known = self.first_answers.setdefault(request.model, [0, 0.0])
            known[0] += 1
            known[1] += time.monotonic() - request.sent
        return request.is_last(message)

    def stop_own(self, caller: Caller, model: str, request_id: str) -> None:
        """Stop the requests of a caller to ``model`` with the caller's id ``request_id``.

        Raises:
            RefusedError: no such request is in flight.
        """
        asked = caller.owner, model, request_id
        found = [each for each in self.open.values() if asked == (each.caller.owner, each.model, each.request_id)]
        if not (request_id and found):
            what = f"id {request_id!r:.60}" if request_id else "an empty id"
            raise wrong(
                f"Stop: no request of yours with {what} to {model} is in flight. Send the id of a request that is."
            )
        for request in found:
            self.stop(request)

    def stop(self, request: StreamRequest) -> None:
        """Send stop requests for a request until it is no longer in flight.

        Nothing is sent if its model, or no model of its ensemble, has an input ``stop``.
        """
        if self._stops.get(request.model) and not request.is_stopping:
            request.is_stopping = True
            task = asyncio.ensure_future(self._stop(request))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def _stop(self, request: StreamRequest) -> None:
        while request.own_id in self.open:
            for stop in self._stops[request.model]:
                with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # also: the server was stopped
                    if request.upstream is not None:
                        await _send(request.upstream, stop, request.own_id)
            await asyncio.sleep(_AGAIN_SECONDS)


async def _send(upstream: Upstream, request: Any, request_id: str) -> None:
    message = service_pb2.ModelInferRequest()
    message.CopyFrom(request)
    message.id = request_id
    async for _ in upstream.channel.stream_stream(METHOD)(iter([message.SerializeToString()])):
        pass


def _make_request(config: ModelConfig) -> Any:
    """Make a stop request, with the smallest shapes and with zeros for the other inputs that the model needs."""
    request = service_pb2.ModelInferRequest(model_name=config.name)
    rows = [1] if config.spec.is_batched else []
    for tensor in config.spec.inputs:
        if tensor.is_optional and tensor.name != STOP:
            continue
        shape = [*rows, *(max(1, size) for size in tensor.dims)]
        kind = "BYTES" if tensor.dtype == STRING else tensor.dtype.removeprefix("TYPE_")
        request.inputs.add(name=tensor.name, datatype=kind, shape=shape)
        size = int(np.prod(shape)) * (4 if tensor.dtype == STRING else tensor.item_bytes)
        request.raw_input_contents.append(b"\1" * size if tensor.name == STOP else bytes(size))
    return request


# --- tokens ----------------------------------------------------------------------------------------------------------


class TokenMeter:
    """Counts the tokens of one request.

    Each answer gives the total numbers of tokens so far; if ``is_by_answer``, the number of its own output tokens.
    ``note`` is called with the kind and number of those that are new.
    """

    def __init__(self, note: Callable[[str, int], None], *, is_by_answer: bool = False) -> None:
        self._note, self._is_by_answer = note, is_by_answer
        self._known: Counter[tuple[str, int]] = Counter()  # by output and row

    def read(self, answer: Any) -> None:
        """Note the tokens that are new in a ``ModelInferResponse``."""
        pairs = zip(answer.outputs, answer.raw_output_contents, strict=False)
        raws = {output.name: raw for output, raw in pairs if output.name in _COUNTED}
        named = raws.get(BATCH_INDEX, b"")
        for name in _KINDS.keys() & raws.keys():
            if len(raws[name]) % 4:  # not as declared, which Triton does not check
                continue
            numbers = memoryview(raws[name]).cast("I")
            rows = memoryview(named).cast("i") if len(named) == len(raws[name]) else range(len(numbers))
            for row, number in zip(rows, numbers, strict=True):
                self._note(_KINDS[name], max(0, number - self._known[name, row]))
                if not (self._is_by_answer and name == "num_output_tokens"):
                    self._known[name, row] = max(number, self._known[name, row])


class TokenCounts:
    """Total numbers of input and output tokens, by model.

    Counted for models with the outputs ``num_input_tokens`` and ``num_output_tokens``, both UINT32 ``[1]``.
    """

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self._models = {spec.name for spec in specs if _declares_tokens(spec)}
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def models(self) -> list[str]:
        """Names of the models whose tokens are counted."""
        return sorted(self._models)

    def meter(
        self, model: str, message: bytes = b"", note: Callable[[str, int], None] = lambda *_: None
    ) -> TokenMeter | None:
        """Return a meter for a serialised request to ``model``; None if the model does not report its tokens.

        ``note`` is called with the kind and number of tokens that are counted.
        """
        if model not in self._models:
            return None

        def count(kind: str, number: int) -> None:
            self.counts[model, kind] += number
            note(kind, number)

        return TokenMeter(count, is_by_answer=_is_set(message, "return_num_output_tokens"))


def _is_set(message: bytes, switch: str) -> bool:
    """Whether a BOOL input of a serialised ``ModelInferRequest`` is true."""
    if switch.encode() not in message:
        return False
    request = service_pb2.ModelInferRequest.FromString(message)
    for at, tensor in enumerate(request.inputs):
        if tensor.name == switch:
            raw = request.raw_input_contents
            return any(raw[at]) if raw else any(tensor.contents.bool_contents)
    return False


def _declares_tokens(spec: ModelSpec) -> bool:
    declared: Mapping[str, Any] = {tensor.name: (tensor.dtype, tensor.dims) for tensor in spec.outputs}
    return all(declared.get(name) == ("TYPE_UINT32", (1,)) for name in _KINDS)
