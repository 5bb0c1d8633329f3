"""A reader of a page, who types its commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

from shoal.serving.server.launch import find_ports


class Reader:
    """Types blocks into a shell in a clone; what serves keeps running until the next server or the end."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.ports: dict[str, int] = {}
        self.find_ports()
        self.server: subprocess.Popen[str] | None = None
        hidden = ("SHOAL_DATA_DIR", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment["PATH"] = f"{clone}/.venv/bin:{os.environ['PATH']}"

    def find_ports(self) -> None:
        """Find free ports, for the next server: what was free a minute ago another program may have by now."""
        self.ports = dict(zip(("8000", "8001", "8002"), find_ports(0, 0, 0), strict=True))

    def type(self, language: str, block: str) -> str:
        """Run one block; its standard output."""
        last = block.strip().split("\n")[-1]
        is_serving = last.startswith("shoal serve") and "--print" not in last
        if is_serving:
            self.find_ports()
        for port, free in self.ports.items():
            block = block.replace(port, str(free))
        if language == "python":
            return self.run(["python", "-c", block])
        asking = {"infer --url": "8001", "generate --url": "8001", "tokens --url": "8001", "copies --url": "8002"}
        for command, port in {**asking, "chat": "8001"}.items():
            asked = rf"shoal {command.split()[0]}\b(?!.*--local\b)"  # which asks no server
            block = re.sub(asked, f"shoal {command} 127.0.0.1:{self.ports[port]}", block)
        *before, last = block.strip().split("\n")
        if not is_serving:
            return self.run(["bash", "-ec", block])
        self.run(["bash", "-ec", "\n".join(before)])
        return self.serve(last)

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.clone, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, command: str) -> str:
        self.stop()
        flags = (
            f"--{kind}-port={self.ports[p]}" for kind, p in (("http", "8000"), ("grpc", "8001"), ("metrics", "8002"))
        )
        self.server = subprocess.Popen(
            [*command.split(), *flags], cwd=self.clone, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line.startswith("ready: "), line
        return line

    def stop(self) -> None:
        if self.server is not None:
            for _ in range(2):  # the second one ends it at once
                self.server.send_signal(signal.SIGINT)
            self.server.communicate(timeout=60)
            self.server = None
