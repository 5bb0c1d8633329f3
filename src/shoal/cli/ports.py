"""Ports of ``shoal serve`` that were not given, and would be those that were."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

import typer

from shoal.serving.gateway.options import Options


def move_ports(context: typer.Context, options: Options) -> Options:
    """Move the ports that were not given away from those that were, to the next free ones."""
    names = ("http_port", "grpc_port", "metrics_port")
    sources = {name: context.get_parameter_source(name) for name in names}
    free = [name for name, source in sources.items() if source and source.name == "DEFAULT"]
    taken = {getattr(options, name) for name in names if name not in free}
    if moved := [name for name in free if getattr(options, name) in taken]:
        taken |= {getattr(options, name) for name in free}
        for name in moved:
            port = next(port for port in range(8003, 2**16) if port not in taken and _is_free(options.host, port))
            taken.add(port)
            context.params[name] = port
    return replace(options, **{name: context.params[name] for name in moved})


def _is_free(host: str, port: int) -> bool:
    """Whether a port can be bound, or cannot for another reason than that it is taken, which the start reports."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
