"""Servers to measure: one that is started for a repository, and one that runs already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.clients.client.flow import read_url
from shoal.clients.client.grpc_transport import channel_options
from shoal.clients.client.operators import read_page
from shoal.clients.client.tls import Access
from shoal.errors import ServerError
from shoal.lab.bench.steps import Reading, read_client, read_group, read_statistics
from shoal.serving.server.launch import KEEP_LOG, Server

_SECONDS = 60  # of a question


class Endpoint(Protocol):
    """Server that is asked at ``url``, with the options ``access`` of a client."""

    url: str
    access: Access

    def read(self) -> Reading:
        """Take a reading."""

    def check(self, reading: Reading, label: str) -> None:
        """Raise ``ServerError`` if requests failed within ``reading``."""


class Started:
    """A server that was started for the measurement: all its requests, and all its CPU time, are of this client."""

    def __init__(self, server: Server, protocol: str) -> None:
        self.url = server.grpc_url if protocol == "grpc" else server.http_url
        self.access: Access = {}
        self._server = server

    def read(self) -> Reading:
        """Take a reading of Triton's statistics, and of CPU times."""
        key = ("triton-grpc-protocol-admin-key", self._server.admin_key)
        reply = _call(self._server.grpc_url, {}, "ModelStatistics", key=key)
        return read_group(self._server.pid, read_statistics(reply))

    def check(self, reading: Reading, label: str) -> None:
        """Raise ``ServerError`` if requests failed."""
        if failed := [name for name, counter in reading.counters.items() if counter.failed]:
            cause = self._server.cause()
            raise ServerError(f"Requests to {', '.join(failed)} failed while {label} was measured: {cause}", KEEP_LOG)


class Found:
    """A server that runs already, on any machine; other clients may ask it too.

    Its CPU time is not known, and its statistics only if it lets this client read them.
    """

    def __init__(self, url: str, protocol: str, access: Access) -> None:
        self.url, self.access, self._protocol = url, access, protocol
        self._has_statistics = True

    def read(self) -> Reading:
        """Take a reading of Triton's statistics, and of this process's CPU time."""
        counters = {}
        if self._has_statistics:
            try:
                counters = read_statistics(self._ask("ModelStatistics", "/v2/models/stats"))
            except ServerError:
                self._has_statistics = False
        return read_client(counters)

    def check(self, reading: Reading, label: str) -> None:
        """Do nothing: what failed may be other clients' requests, and a failed request of this one is an error."""

    def steps(self, model: str) -> dict[str, ModelConfig]:
        """Return the non-ensemble models that ``model`` calls, or itself; empty if the server does not say."""
        try:
            config = as_config(self._ask("ModelConfig", f"/v2/models/{model}/config", model), Path(model))
        except ServerError:
            return {}
        found: dict[str, ModelConfig] = {} if config.is_ensemble else {model: config}
        for step in config.steps:
            found |= self.steps(step.model)
        return found

    def _ask(self, procedure: str, path: str, model: str = "") -> Any:
        """Return Triton's answer as a protobuf message.

        Raises:
            ServerError: the server refuses it, or does not answer.
        """
        from google.protobuf import json_format
        from tritonclient.grpc import model_config_pb2, service_pb2

        if self._protocol == "grpc":
            answer = _call(self.url, self.access, procedure, model)
            return answer.config if model else answer
        kind = model_config_pb2.ModelConfig if model else service_pb2.ModelStatisticsResponse
        try:
            document = json.loads(read_page(self.url, path, **self.access))
            return json_format.ParseDict(document, kind(), ignore_unknown_fields=True)
        except (ValueError, json_format.ParseError) as error:
            raise ServerError(f"The server at {self.url} has no {path}: {error}") from None


def _call(url: str, access: Access, procedure: str, model: str = "", key: tuple[str, str] = ("", "")) -> Any:
    """Call a procedure of Triton's over gRPC; ``key`` is an entry of the metadata, by default that of ``access``."""
    import grpc  # type: ignore[import-untyped]
    from tritonclient.grpc import service_pb2
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    url, tls = read_url(url, "grpc", access.get("ca_cert", ""), access.get("client_cert", ""))
    options = channel_options(url)
    if api_key := access.get("api_key", ""):
        key = ("authorization", f"Bearer {api_key}")
    message = getattr(service_pb2, f"{procedure}Request")(**{"name": model} if model else {})
    opened = grpc.secure_channel(url, tls.credentials(), options) if tls else grpc.insecure_channel(url, options)
    with opened as channel:
        try:
            ask = getattr(GRPCInferenceServiceStub(channel), procedure)
            return ask(message, _SECONDS, metadata=(key,) if key[0] else ())
        except grpc.RpcError as error:
            raise ServerError(f"The server at {url} gives no {procedure}: {error.details()}") from None
