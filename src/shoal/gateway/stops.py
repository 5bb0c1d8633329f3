"""Stop requests: an engine whose client has left is told to compute no more.

Triton 24.10 does not tell the members of an ensemble that its client has left, and can crash when a stream is
abandoned. So each request to a decoupled model gets an id of its own. When its client leaves, a request with the input
``stop`` and this id goes to the model, or to the members of the ensemble that have such an input; the rest of the
answers is read and discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2

from shoal.component.callees import STOP
from shoal.component.spec import STRING
from shoal.gateway.models import find_members
from shoal.repository.config import ModelConfig
from shoal.repository.graph import is_decoupled
from shoal.server.launch import Server

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_AGAIN_SECONDS = 0.2  # until the next stop request: the first may come before the request reaches its engine


class Stops:
    """Stop requests for the decoupled models of a repository; ``channel`` returns the gRPC channel to a server."""

    def __init__(self, configs: Mapping[str, ModelConfig], channel: Callable[[Server], Any]) -> None:
        self._channel = channel
        members = find_members(configs)
        self._requests = {
            name: [
                _make_request(configs[engine])
                for engine in ([name] if not config.is_ensemble else sorted(members[name]))
                if any(tensor.name == STOP for tensor in configs[engine].spec.inputs)
            ]
            for name, config in configs.items()
            if is_decoupled(config, configs.get)
        }
        self._numbers = itertools.count()

    @property
    def models(self) -> list[str]:
        """Names of the decoupled models."""
        return sorted(self._requests)

    def is_decoupled(self, model: str) -> bool:
        """Whether requests to a model have any number of answers."""
        return model in self._requests

    def next_id(self) -> str:
        """Return a request id that no other request has."""
        return f"shoal-{os.getpid()}-{next(self._numbers)}"

    async def leave(self, server: Server, model: str, request_id: str, is_ended: Callable[[], bool]) -> None:
        """Send stop requests until the request is ended."""
        while not is_ended() and self._requests[model]:
            for request in self._requests[model]:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self._send(server, request, request_id)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _send(self, server: Server, request: Any, request_id: str) -> None:
        message = service_pb2.ModelInferRequest()
        message.CopyFrom(request)
        message.id = request_id
        call = self._channel(server).stream_stream(METHOD)(iter([message.SerializeToString()]))
        async for _ in call:
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
