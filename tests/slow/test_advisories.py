"""Advisories against the embedded Triton, tried through the service: those of the table in ``docs/keys.md``."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from shoal.clients.client.client import Client
from tests.support.service import Service, make_repository

X = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [3]}
BODY = json.dumps({"inputs": [X]}).encode()
INFER = "/v2/models/chain/infer"
NUM_CHUNKS = 1_000_000  # of a byte each end Triton 24.10


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("home")
    with Service(make_repository(home), home / "log") as found:
        yield found


@pytest.fixture(autouse=True)
def same_server(service: Service) -> Iterator[None]:
    """Check that the same process of Triton answers as before."""
    before = [server.pid for server in service.servers()]
    yield
    assert [server.pid for server in service.servers()] == before
    with Client(service.grpc) as client:
        assert client.infer("chain", X=[[3.0]])["Z"] == 12


def ask(at: str, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    host, port = at.split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request(method, path, body or None)
        reply = connection.getresponse()
        return reply.status, reply.read().decode("utf-8", "replace")


def test_a_million_chunks_become_one_body(service: Service) -> None:
    content = BODY.replace(b"[3]", b"[" + b" " * NUM_CHUNKS + b"3]")
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    host, port = service.http.split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n")
        answer = connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    assert b'"data":[12.0]' in answer


@pytest.mark.parametrize("path", [
    "/ping", "/invocations", "/models", "/models/chain/invoke", "/models/chain", "/predict", "/health/x",
    "/v2/models/chain/infer/../../../repository/index", "//v2/models/chain/infer",
])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_other_doors_are_not_there(method: str, path: str, service: Service) -> None:
    for body in (b"", BODY):
        status, text = ask(service.http, method, path, body)
        assert (status, "There is no path" in text) == (404, True)


@pytest.mark.parametrize("name", [
    "..%2F..%2Fetc", "%2e%2e", "..", "...", "chain%00", "chain;id", "$(id)", "a" * 5000, "-chain", "chain%2Fversions",
])  # fmt: skip
def test_names_of_models_reach_no_path(name: str, service: Service) -> None:
    for method, act, body in (("POST", "infer", BODY), ("GET", "config", b""), ("GET", "ready", b"")):
        status, text = ask(service.http, method, f"/v2/models/{name}/{act}", body)
        assert status in (400, 404)
        assert "/tmp/" not in text
    for act in ("load", "unload"):
        status, text = ask(service.http, "POST", f"/v2/repository/models/{name}/{act}", b'{"parameters": {}}')
        assert (status, "Model control is closed" in text) == (403, True)


@pytest.mark.parametrize("more", [
    {"shared_memory_region": "r", "shared_memory_byte_size": 4},
    {"shared_memory_region": "shoal_1_x_region", "shared_memory_byte_size": 4, "shared_memory_offset": 2**62},
])  # fmt: skip
def test_regions_of_shared_memory_are_closed(more: dict[str, object], service: Service) -> None:
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "parameters": more}]}
    status, text = ask(service.http, "POST", INFER, json.dumps(body).encode())
    assert (status, "hared memory is closed" in text) == (403, True)
    for memory in ("systemsharedmemory", "cudasharedmemory"):
        for act in ("status", "region/r/register", "region/r/status", "unregister"):
            for method in ("GET", "POST"):
                status, text = ask(service.http, method, f"/v2/{memory}/{act}", b"{}")
                assert (status, "Shared memory is closed" in text) == (403, True)


def test_bodies_that_are_large_or_deep(service: Service) -> None:
    deep = b'{"inputs":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert ask(service.http, "POST", INFER, deep)[0] == 400
    host, port = service.http.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


def test_the_key_of_triton_is_not_passed_on(service: Service) -> None:
    """A client that has read Triton's own key cannot use it through the service."""
    arguments = " ".join(service.servers()[0].arguments())
    key = arguments.split("admin-key=")[1].split()[0]
    host, port = service.http.split(":")
    for path, method in (("/v2/repository/models/chain/unload", "POST"), ("/v2/systemsharedmemory/status", "GET")):
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            connection.request(method, path, headers={"admin-key": key, "triton-grpc-protocol-admin-key": key})
            assert connection.getresponse().status == 403
