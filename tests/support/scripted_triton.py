"""Stand-in for Triton that speaks gRPC and HTTP in this process, behind the real ports for clients."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from aiohttp import web
from tritonclient.grpc import service_pb2

from shoal.authoring.repository.config import ModelConfig
from shoal.clients.client.calls import IS_FINAL
from shoal.kit.component.spec import STRING
from shoal.serving.gateway.callers.callers import Keys
from shoal.serving.gateway.callers.exposure import Exposure
from shoal.serving.gateway.core.active_server import ActiveServer
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.core.models import find_slots, find_widths
from shoal.serving.gateway.core.stream_requests import StreamRequests
from shoal.serving.gateway.core.traffic import Traffic
from shoal.serving.gateway.core.upstream import SERVICE, Upstream
from shoal.serving.gateway.fronts import open_fronts
from shoal.serving.gateway.http.triton_http import TritonHttp
from shoal.serving.gateway.options import Addresses, Options
from tests.support.configs import PYTHON, make_configs, parameter

_LLM = """
backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true },
        { name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
         { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""
_EMBEDDER = """
backend: "python" max_batch_size: 4
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ 5 ] } ]
"""
CONFIGS = make_configs(llm=_LLM + parameter("slots", "2"), plain=PYTHON, embedder=_EMBEDDER)
NUM_ANSWERS = 3  # of a request to ``llm``


class ScriptedTriton:
    """Answers each request at once: numbers are 0, texts ``b"stop"``."""

    admin_key = "key"
    pid = 0

    def __init__(self, configs: Mapping[str, ModelConfig]) -> None:
        self._configs = configs
        self.grpc_url = self.http_url = self.metrics_url = ""

    def service(self, details: Any) -> Any:
        """Return the handler of a method (grpc's interface)."""
        if details.method == f"{SERVICE}ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._infer)

    async def _infer(self, content: bytes, _: Any) -> bytes:
        request = service_pb2.ModelInferRequest.FromString(content)
        return bytes(self._answer(request).SerializeToString())

    async def _stream(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for content in requests:
            request = service_pb2.ModelInferRequest.FromString(content)
            most = NUM_ANSWERS if self._configs[request.model_name].spec.is_decoupled else 1
            for number in range(most):
                message = service_pb2.ModelStreamInferResponse(infer_response=self._answer(request))
                message.infer_response.parameters[IS_FINAL].bool_param = number == most - 1
                yield bytes(message.SerializeToString())

    def _answer(self, request: Any) -> Any:
        spec = self._configs[request.model_name].spec
        answer = service_pb2.ModelInferResponse(model_name=spec.name, model_version="1", id=request.id)
        rows = [request.inputs[0].shape[0]] if spec.is_batched else []
        for tensor in spec.outputs:
            shape = [*rows, *tensor.dims]
            kind = "BYTES" if tensor.dtype == STRING else tensor.dtype.removeprefix("TYPE_")
            answer.outputs.add(name=tensor.name, datatype=kind, shape=shape)
            count = int(np.prod(shape))
            text = b"\4\0\0\0stop" * count if tensor.dtype == STRING else bytes(count * tensor.numpy_dtype.itemsize)
            answer.raw_output_contents.append(text)
        return answer

    async def _infer_http(self, request: web.Request) -> web.Response:
        document = json.loads(await request.read())
        spec = self._configs[request.match_info["model"]].spec
        shape = document["inputs"][0]["shape"] if "inputs" in document else [1, 1]
        outputs = [{"name": each.name, "datatype": each.kind, "shape": shape, "data": [0.0]} for each in spec.outputs]
        return web.json_response({"model_name": spec.name, "model_version": "1", "outputs": outputs})

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Listen on loopback while the context is open."""
        server = grpc.aio.server(handlers=[self])
        self.grpc_url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        app = web.Application()
        app.router.add_post("/v2/models/{model}/{method}", self._infer_http)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        self.http_url = f"{host}:{port}"
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)
            await runner.cleanup()


@asynccontextmanager
async def serve(options: Options, keys: Keys | None = None) -> AsyncIterator[tuple[Gate, Addresses]]:
    """Serve ``CONFIGS`` by a scripted Triton; return the gate, and the addresses for clients."""
    triton, active = ScriptedTriton(CONFIGS), ActiveServer()
    traffic = Traffic(
        active, CONFIGS, options.limits, max_wait=10.0, slots=find_slots(CONFIGS), widths=find_widths(CONFIGS)
    )
    gate = Gate(active, traffic, Exposure({*CONFIGS}), StreamRequests(CONFIGS), options.limits, keys=keys)
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    at = Addresses(*(f"127.0.0.1:{port}" for port in (*ports, 1)))
    async with triton.run():
        upstream = Upstream(triton, TritonHttp(triton))  # type: ignore[arg-type]
        await active.activate(upstream)
        try:
            async with open_fronts(gate, CONFIGS, options, at, None):
                yield gate, at
        finally:
            await upstream.close()
