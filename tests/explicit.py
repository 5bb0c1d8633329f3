"""A Triton whose repository changes under it: what it says of each model that it is asked to load."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from shoal.serving.runtime import find_runtime
from shoal.serving.server import Server, find_ports


class Explicit(Server):
    """It loads what it is told to."""

    def _flags(self, ports: tuple[int, int, int]) -> list[str]:
        flags = [flag for flag in super()._flags(ports) if "exit-on-error" not in flag and "restricted" not in flag]
        return [flag.replace("control-mode=none", "control-mode=explicit") for flag in flags]

    def load(self, model: str) -> str:
        """Load ``model``; what Triton says where it does not, empty where it does."""
        start = self.log.stat().st_size
        refusal = self._ask(f"models/{quote(model)}/load")
        with self.log.open("rb") as log:
            log.seek(start)
            told = log.read().decode("utf-8", "replace")
        return f"{refusal}\n{told}" if refusal else ""

    def unload(self, model: str) -> None:
        self._ask(f"models/{quote(model)}/unload", {"parameters": {"unload_dependents": True}})

    def _ask(self, path: str, body: object = None) -> str:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://{self.http_url}/v2/repository/{path}", data=data, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20):
                return ""
        except urllib.error.HTTPError as error:
            return error.read().decode("utf-8", "replace")

    def refill(self, source: Path) -> None:
        """Put the models of ``source`` in place of what the repository holds."""
        for path in self.repository.iterdir():
            shutil.rmtree(path)
        shutil.copytree(source, self.repository, dirs_exist_ok=True, symlinks=True)


@contextmanager
def explicit(repository: Path) -> Iterator[Explicit]:
    server = Explicit(repository, find_runtime(), find_ports(0, 0, 0), None)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
