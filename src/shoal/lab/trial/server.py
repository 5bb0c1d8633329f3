"""A Triton that loads and answers for a trial: it starts without models, and is asked in streams."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.failures import grpc_failure, stream_failure
from shoal.clients.client.grpc_transport import channel_options, to_grpc
from shoal.serving.server.launch import DIRECT, Server
from shoal.serving.server.runtime import Runtime
from shoal.system.processes import processes

_END_SECONDS = 0.3  # for a crash that follows an answer


class TrialServer(Server):
    """A Triton that loads models of several repositories when it is asked to."""

    def __init__(self, repositories: Sequence[Path], runtime: Runtime) -> None:
        self._others = repositories[1:]
        super().__init__(repositories[0], runtime)

    def _flags(self, ports: tuple[int, int, int]) -> list[str]:
        flags = [flag.replace("control-mode=none", "control-mode=explicit") for flag in super()._flags(ports)]
        return [*flags, *(f"--model-repository={each}" for each in self._others)]

    @property
    def backends(self) -> set[str]:
        """Names of the backends that the server has."""
        return {path.name for path in self._backends.iterdir()}

    def kill_model(self, name: str) -> None:
        """Kill the processes of all instances of a model, which may use the processor for ever."""
        instances = {argument for each in processes() if each.group == self.pid for argument in each.arguments()[-2:-1]}
        for instance in instances:
            if re.fullmatch(rf"{re.escape(name)}_\d+_\d+", instance):
                self.kill_instance(instance)

    def has_ended(self) -> bool:
        """Whether Triton has ended, after a moment in which it may do so."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self._process.poll() is not None

    def log_bytes(self) -> int:
        """Size of the log up to now."""
        return self.log.stat().st_size

    def read_log(self, start: int) -> str:
        """Return the log from a position on."""
        with self.log.open("rb") as log:
            log.seek(start)
            return log.read().decode("utf-8", "replace")

    def load(self, name: str, seconds: float) -> str:
        """Load a model. Return what Triton says if the model does not load, with its traceback.

        Raises:
            TimeoutError: the model was not loaded within ``seconds``.
            OSError, HTTPException: Triton has ended.
        """
        url = f"http://{self.http_url}/v2/repository/models/{quote(name)}/load"
        request = urllib.request.Request(url, b"{}", {"admin-key": self.admin_key})
        try:
            with DIRECT.open(request, timeout=seconds):
                return ""
        except urllib.error.HTTPError as refusal:
            return str(json.loads(refusal.read())["error"])

    def ask(self, calls: Sequence[Call], seconds: float) -> list[Any]:
        """Send requests at once, and return the messages of all their answers; the last one of a stream may be empty.

        Raises:
            CallError: an answer is an error, or the requests were not answered within ``seconds``.
        """
        with grpc.insecure_channel(self.grpc_url, options=channel_options(self.grpc_url)) as channel:
            stub, messages = GRPCInferenceServiceStub(channel), [to_grpc(call).message for call in calls]
            try:
                if calls[0].method is Method.INFER:
                    futures = [stub.ModelInfer.future(message, timeout=seconds) for message in messages]
                    return [future.result() for future in futures]
                replies = list(stub.ModelStreamInfer(iter(messages), timeout=seconds))
            except grpc.RpcError as error:
                raise grpc_failure(error.code().name, error.details() or "") from None
        for reply in replies:
            if reply.error_message:
                raise stream_failure(reply.error_message)
        return [reply.infer_response for reply in replies]
