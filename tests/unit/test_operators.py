"""Pages for operators, asked at the wrong port."""

from __future__ import annotations

import socket
import threading

import pytest

from shoal.clients.client.operators import _say_place, read_states
from shoal.errors import ServerError


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"\0\0\0 no http\r\n", "does not speak HTTP, as a port of gRPC does not"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "answered HTTP 404: this is not its metrics address"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", "does not tell the states of models"),
    ],
)
def test_a_port_that_is_not_for_metrics(sent: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(sent)

        answering = threading.Thread(target=answer)
        answering.start()
        url = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            ServerError, match=rf"^The server at {url} {says}\. .*Give its metrics address, such as \S+:8002"
        ) as error:
            read_states(url)
        tls = f"It may speak TLS: shoal status https://{url} --ca-cert FILE. Otherwise: Give"
        assert error.value.fix.startswith(tls) == ("gRPC" in says)
        answering.join()


@pytest.mark.parametrize(
    "sent", [b'HTTP/1.0 200 OK\r\n\r\n{"ready": true}', b"HTTP/1.0 403 Forbidden\r\n\r\n"], ids=["states", "metrics"]
)
def test_a_key_that_may_read_metrics_is_made(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(sent)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ServerError) as error:
            read_states(f"127.0.0.1:{server.getsockname()[1]}")
        answering.join()
    command = "shoal keys new operator --may metrics --file KEYS > key; then give it: --api-key-file key"
    assert error.value.fix.endswith(f"Make one in the file of shoal serve --keys: {command}")


def test_an_address_that_is_refused_is_not_advised() -> None:
    assert _say_place("gpu-1:8002").startswith("Give its metrics address, such as gpu-1:8003, which")
    assert _say_place("gpu-1:8000").startswith("Give its metrics address, such as gpu-1:8002, which")


def test_no_service_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ServerError) as error:
        read_states(url)
    assert error.value.what == f"No Triton answers at {url} (connection refused)."
    assert error.value.fix.startswith("Start one: shoal serve MODEL. Give its metrics address, such as 127.0.0.1:8002")
