"""Streamed requests: ids of our own, marks on last answers, counts, and requests to stop.

Triton 24.10 does not tell the members of an ensemble that its client has left, and can crash when a stream is
abandoned. So each request within a stream gets an id of its own, and asks Triton to mark its last answer. When the
client of a decoupled model leaves, a request with the input ``stop`` and this id goes to the model, or to the members
of the ensemble that have such an input; the rest of the answers is read and discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2

from shoal.component.callees import STOP
from shoal.component.spec import STRING, ModelSpec
from shoal.gateway.dispatcher import Stream, Upstream
from shoal.gateway.models import find_members
from shoal.gateway.screening import WITH_END
from shoal.repository.config import ModelConfig
from shoal.repository.graph import is_decoupled

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
END = "triton_final_response"  # parameter of an answer: whether it is the last of its request
_AGAIN_SECONDS = 0.2  # until the next stop request: the first may come before the request reaches its engine
_KINDS = {"num_input_tokens": "input", "num_output_tokens": "output"}  # by the output that counts them
KINDS = tuple(_KINDS.values())


@dataclass
class Streamed:
    """A request within a stream that was sent to Triton as ``own_id`` and has no last answer yet.

    ``request_id`` is the client's id. ``is_end_wanted``: the client itself asked for a mark on the last answer.
    """

    own_id: str
    model: str
    request_id: str
    is_decoupled: bool
    meter: Meter | None = None
    num_bytes: int = 0
    is_end_wanted: bool = False
    has_begun: bool = False  # it has had an answer
    sent: float = field(default_factory=time.monotonic)

    def mark(self, request: bytes) -> bytes:
        """Give a serialised request our id, and ask for a mark on its last answer.

        Fields that are appended to a protobuf message replace earlier ones. If Triton does not know that an answer is
        the last when it sends it, it adds an empty answer with the mark.
        """
        added = service_pb2.ModelInferRequest(id=self.own_id)
        added.parameters[WITH_END].bool_param = True
        return request + bytes(added.SerializeToString())

    def is_last(self, message: Any) -> bool:
        """Whether an answer to this request is its last one.

        An error of a decoupled model without a mark refuses the request; one that the model sends is followed by the
        end.
        """
        parameters = message.infer_response.parameters
        return not self.is_decoupled or bool(parameters[END].bool_param if END in parameters else message.error_message)

    def restore_id(self, error: str) -> str:
        """Put the client's id into a message of Triton's that names ours."""
        return error.replace(self.own_id, self.request_id or "<id_unknown>")


class Streaming:
    """Streamed requests to the models of a repository: their ids, what is counted of them, and how they are stopped."""

    def __init__(self, configs: Mapping[str, ModelConfig]) -> None:
        members = find_members(configs)
        self._stops = {
            name: [
                _make_request(configs[engine])
                for engine in ([name] if not config.is_ensemble else sorted(members[name]))
                if any(tensor.name == STOP for tensor in configs[engine].spec.inputs)
            ]
            for name, config in configs.items()
            if is_decoupled(config, configs.get)
        }
        self.tokens = Tokens(config.spec for config in configs.values())
        self.first_answers: dict[str, list[float]] = {}  # by model: how many, and the sum of their seconds
        self._numbers = itertools.count()

    @property
    def models(self) -> list[str]:
        """Names of the decoupled models."""
        return sorted(self._stops)

    def is_decoupled(self, model: str) -> bool:
        """Whether requests to a model have any number of answers."""
        return model in self._stops

    def begin(self, model: str, request_id: str, *, num_bytes: int = 0, is_end_wanted: bool = False) -> Streamed:
        """Give a request an id that no other request has."""
        own_id = f"shoal-{os.getpid()}-{next(self._numbers)}"
        meter = self.tokens.meter(model)
        return Streamed(own_id, model, request_id, self.is_decoupled(model), meter, num_bytes, is_end_wanted)

    def count(self, streamed: Streamed, message: Any, stream: Stream) -> bool:
        """Count an answer, a ``ModelStreamInferResponse``; return whether it is the last of its request."""
        if streamed.meter is not None:
            streamed.meter.read(message.infer_response)
        if not streamed.has_begun:
            streamed.has_begun = True
            known = self.first_answers.setdefault(streamed.model, [0, 0.0])
            known[0] += 1
            known[1] += time.monotonic() - streamed.sent
        is_last = streamed.is_last(message)
        stream.note_answer(is_last=is_last)
        return is_last

    async def stop(self, upstream: Upstream, streamed: Streamed, is_ended: Callable[[], bool]) -> None:
        """Send stop requests until the request has ended, if its model takes them."""
        requests = self._stops.get(streamed.model, [])
        while requests and not is_ended():
            for request in requests:
                with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # also: the server was stopped
                    await _send(upstream, request, streamed.own_id)
            await asyncio.sleep(_AGAIN_SECONDS)


async def _send(upstream: Upstream, request: Any, request_id: str) -> None:
    message = service_pb2.ModelInferRequest()
    message.CopyFrom(request)
    message.id = request_id
    async for _ in upstream.channel.stream_stream(METHOD)(iter([message.SerializeToString()])):
        pass


def _make_request(config: ModelConfig) -> Any:
    """Make a stop request with the smallest inputs that the model needs."""
    request = service_pb2.ModelInferRequest(model_name=config.name)
    rows = [1] if config.spec.is_batched else []
    for tensor in config.spec.inputs:
        if tensor.is_optional and tensor.name != STOP:
            continue
        shape = [*rows, *(max(1, size) for size in tensor.dims)]
        kind = "BYTES" if tensor.dtype == STRING else tensor.dtype.removeprefix("TYPE_")
        request.inputs.add(name=tensor.name, datatype=kind, shape=shape)
        size = int(np.prod(shape)) * (4 if tensor.dtype == STRING else tensor.numpy_dtype.itemsize)
        request.raw_input_contents.append(b"\1" * size if tensor.name == STOP else bytes(size))
    return request


# --- tokens ----------------------------------------------------------------------------------------------------------


class Meter:
    """Counts the tokens of one request as its answers come: each has the numbers of tokens so far."""

    def __init__(self, counts: Counter[tuple[str, str]], model: str) -> None:
        self._counts, self._model = counts, model
        self._known = dict.fromkeys(_KINDS, 0)

    def read(self, answer: Any) -> None:
        """Count what a ``ModelInferResponse`` adds."""
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=False):
            if output.name in _KINDS and len(raw) == 4:
                number = int.from_bytes(raw, "little")
                self._counts[self._model, _KINDS[output.name]] += max(0, number - self._known[output.name])
                self._known[output.name] = max(number, self._known[output.name])


class Tokens:
    """Sums of ``input`` and ``output`` tokens by model, of those models that declare both counts, UINT32 ``[1]``."""

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self._models = {spec.name for spec in specs if _declares_tokens(spec)}
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def models(self) -> list[str]:
        """Names of these models."""
        return sorted(self._models)

    def meter(self, model: str) -> Meter | None:
        """Return a meter for one request; None if the model does not report tokens."""
        return Meter(self.counts, model) if model in self._models else None


def _declares_tokens(spec: ModelSpec) -> bool:
    declared: Mapping[str, Any] = {tensor.name: (tensor.dtype, tensor.dims) for tensor in spec.outputs}
    return all(declared.get(name) == ("TYPE_UINT32", (1,)) for name in _KINDS)
