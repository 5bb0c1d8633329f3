"""How a service is to be run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError

RESTARTS_SECONDS = 600.0  # in which no more than ``max_restarts`` are made


@dataclass(frozen=True)
class Options:
    """Ports of 0 are any free ones. ``host`` is the address to listen at.

    ``grace`` is how many seconds requests under way have to finish once the service is told to stop. ``max_wait`` is
    how many seconds a request may have to wait before others are refused. ``max_request_mib`` bounds a request.
    ``model_memory_mib`` bounds each process of a model; 0 leaves it to the machine. ``load_seconds`` is how long all
    models may take to load, ``max_restarts`` how often the server may be started again within ten minutes. ``resends``
    says whether a request that was under way when its model died is sent again, once; it may run twice. ``pid_file`` is
    written, and held, while the service runs.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    grace: float = 30.0
    max_wait: float = 10.0
    max_request_mib: float = 64.0
    model_memory_mib: float = 0.0
    max_restarts: int = 10
    load_seconds: float = 600.0
    resends: bool = True
    pid_file: Path | None = None

    @property
    def most_bytes(self) -> int:
        """Of one request."""
        return int(self.max_request_mib * 2**20)

    def __post_init__(self) -> None:
        for name in ("grace", "max_wait", "max_request_mib", "load_seconds"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "Give more than 0.")
        for name in ("model_memory_mib", "max_restarts"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "Give 0 or more.")


def _check(name: str, value: float, is_right: bool, fix: str) -> None:
    if not is_right:
        raise InputError(f"--{name.replace('_', '-')} {value:g} is out of range.", fix)
