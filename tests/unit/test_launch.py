"""Ports of a server, before it is started."""

from __future__ import annotations

import socket

import pytest

from shoal.cli.ports import _is_free
from shoal.errors import SetupError
from shoal.serving.server.launch import find_ports


def test_ports_that_cannot_be_used() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = rf"Port {port} cannot be used: Address already in use\. Stop what .* another: --grpc-port PORT$"
        with pytest.raises(SetupError, match=message):
            find_ports(0, port, 0)
        assert not _is_free("127.0.0.1", port)
        assert _is_free("192.0.2.1", port)  # which find_ports refuses for another reason
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            message = rf"^Ports {port}, {other.getsockname()[1]} cannot .* --http-port PORT --metrics-port PORT$"
            with pytest.raises(SetupError, match=message):
                find_ports(port, 0, other.getsockname()[1])
    with pytest.raises(SetupError, match=r"^--grpc-port and --metrics-port are both 7\. Give each a port of its own"):
        find_ports(0, 7, 7)
    with pytest.raises(SetupError, match=r"^--metrics-port 80000 is no port\. Give 1 to 65535, or 0"):
        find_ports(0, 0, 80000)
    with pytest.raises(SetupError, match=r"192\.0\.2\.1 is no address of this machine: give one with --host\."):
        find_ports(0, 0, 0, host="192.0.2.1")
