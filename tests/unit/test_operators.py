"""Pages for operators, asked at the wrong port."""

from __future__ import annotations

import socket
import threading

import pytest

from shoal.clients.client.operators import read_states
from shoal.errors import ServerError


def test_a_port_that_does_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"\0\0\0 no http\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ServerError, match=r"No Triton answers at \S+ .* Give its metrics address"):
            read_states(f"127.0.0.1:{server.getsockname()[1]}")
        answering.join()
