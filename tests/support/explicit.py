"""A Triton whose repository changes under it: what it says of each model that it is asked to load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from shoal.serving.server.launch import Server
from shoal.serving.server.runtime import find_runtime

SECONDS = 60  # for one model


class Explicit(Server):
    """A Triton in explicit mode: it loads models on request."""

    def _flags(self, ports: tuple[int, int, int]) -> list[str]:
        flags = [flag for flag in super()._flags(ports) if "exit-on-error" not in flag and "restricted" not in flag]
        return [flag.replace("control-mode=none", "control-mode=explicit") for flag in flags]

    def load(self, model: str) -> str:
        """Load ``model``; what Triton says where it does not, empty where it does."""
        start = self.log.stat().st_size
        with InferenceServerClient(self.grpc_url) as client:
            try:
                client.load_model(model, client_timeout=SECONDS)
            except InferenceServerException as refusal:
                with self.log.open("rb") as log:
                    log.seek(start)
                    return f"{refusal}\n{log.read().decode('utf-8', 'replace')}"
        return ""

    def unload(self, model: str) -> None:
        with InferenceServerClient(self.grpc_url) as client, suppress(InferenceServerException):
            client.unload_model(model, unload_dependents=True, client_timeout=SECONDS)

    def refill(self, source: Path) -> None:
        """Put the models of ``source`` in place of what the repository holds."""
        for path in self.repository.iterdir():
            shutil.rmtree(path)
        shutil.copytree(source, self.repository, dirs_exist_ok=True, symlinks=True)


@contextmanager
def explicit(repository: Path) -> Iterator[Explicit]:
    server = Explicit(repository, find_runtime())
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop(0)  # at once
