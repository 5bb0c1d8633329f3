"""Options of a service."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from shoal.errors import InputError
from shoal.gateway.limits import Limits, check_option

RESTARTS_SECONDS = 600.0  # in which ``max_restarts`` are made without a pause


@dataclass(frozen=True)
class Options:
    """Options of a service. Ports of 0 are any free ones; a ``host`` other than loopback needs ``is_open``.

    ``exposed`` are models open to clients beside ensembles and public models. ``grace`` is how many seconds requests in
    flight have to finish once the service is stopped. Requests that would wait longer than ``max_wait`` seconds are
    refused. ``limits`` bound what clients may hold. ``model_memory_mib`` bounds each process of a model; 0 is no limit.
    ``load_seconds`` is how long all models may take to load, ``max_restarts`` how many faults within ten minutes are
    followed by another server without a pause. ``resends`` says whether a request in flight when its model died is
    resent, once; it may run twice.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    grace: float = 30.0
    max_wait: float = 10.0
    model_memory_mib: float = 0.0
    max_restarts: int = 10
    load_seconds: float = 600.0
    resends: bool = True
    is_open: bool = False
    exposed: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("grace", "max_wait", "load_seconds"):
            check_option(name, getattr(self, name), getattr(self, name) > 0, "Give more than 0.")
        for name in ("model_memory_mib", "max_restarts"):
            check_option(name, getattr(self, name), getattr(self, name) >= 0, "Give 0 or more.")
        if not (self.is_open or _is_loopback(self.host)):
            raise InputError(
                f"--host {self.host} would let in everyone who reaches this machine: there are no keys yet.",
                "Give --open as well if a proxy or a firewall decides who that is.",
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
