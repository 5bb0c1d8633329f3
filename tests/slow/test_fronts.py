"""The front doors of ``shoal serve`` pass on what Triton understands, and only that."""

from __future__ import annotations

import gzip
import json
import queue
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http
from tritonclient.utils import InferenceServerException

import shoal
from tests.support.fronts import ask
from tests.support.service import Service, make_repository

REQUEST = {"id": "my-request", "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [3.0]}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fronts")
    make_repository(folder)
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    with Service(home / "repository", home / "log", "--max-request-mib", 1, "--max-restarts", 100) as running:
        yield running


def raw(service: Service, text: str) -> str:
    """Send exactly these bytes, and return the answer."""
    host, port = service.http.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()


def test_requests_without_a_model_get_the_default_configuration(service: Service) -> None:
    for protocol in ("grpc", "http"):
        with shoal.Client(getattr(service, protocol), protocol=protocol) as client:
            assert client.default_model() == "chain"
    assert json.loads(ask(service, "/v2/models//config")[2])["name"] == "chain"
    assert ask(service, "/v2/models//infer", b"{}")[0] == 404


def test_tritons_own_paths(service: Service) -> None:
    assert ask(service, "/v2/health/live")[0] == 200
    assert ask(service, "/v2/health/ready")[0] == ask(service, "/health")[0] == 200
    assert ask(service, "/v2/models/chain/ready")[0] == 200
    assert ask(service, "/v2/models/nobody/ready")[0] == 400
    assert json.loads(ask(service, "/v2")[2])["name"] == "triton"
    assert json.loads(ask(service, "/v2/models/chain")[2])["platform"] == "ensemble"
    status, headers, content = ask(service, "/v2/models/chain/infer", json.dumps(REQUEST).encode())
    assert (status, headers["Content-Type"]) == (200, "application/json")
    answer = json.loads(content)
    assert answer["id"] == "my-request"
    assert answer["outputs"][0]["data"] == [12.0]
    assert json.loads(ask(service, "/v2/models/chain/generate", b'{"X": 3.0}')[2])["Z"] == 12.0
    assert ask(service, "/v2/models/other%20one/infer", json.dumps(REQUEST).encode())[0] in (400, 404)
    assert ask(service, "/v2", method="HEAD")[0] == 405


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_http_client_of_triton(service: Service, algorithm: str, is_binary: bool) -> None:
    with triton_http.InferenceServerClient(service.http) as client:
        given = triton_http.InferInput("X", [1, 1], "FP32")
        given.set_data_from_numpy(np.full((1, 1), 3, np.float32), binary_data=is_binary)
        output = triton_http.InferRequestedOutput("Z", binary_data=is_binary)
        answer = client.infer(
            "chain", [given], outputs=[output], request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )  # fmt: skip
        assert answer.as_numpy("Z").tolist() == [[12.0]]


def test_grpc_client_of_triton(service: Service) -> None:
    with triton_grpc.InferenceServerClient(service.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("chain")
        assert not client.is_model_ready("nobody")
        assert client.get_model_metadata("chain").platform == "ensemble"
        given = triton_grpc.InferInput("X", [1, 1], "FP32")
        given.set_data_from_numpy(np.full((1, 1), 3, np.float32))
        answer = client.infer("chain", [given], compression_algorithm="gzip", client_timeout=10)
        assert answer.as_numpy("Z").tolist() == [[12.0]]
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result))
        for value in range(5):
            given.set_data_from_numpy(np.full((1, 1), value, np.float32))
            client.async_stream_infer("chain", [given])
        assert sorted(answers.get(timeout=10).as_numpy("Z").item() for _ in range(5)) == [0, 4, 8, 12, 16]
        client.async_stream_infer("nobody", [given])
        assert "unknown model" in str(answers.get(timeout=10))
        client.stop_stream()
        with pytest.raises(InferenceServerException, match=r"Model control is closed to clients of this server"):
            client.unload_model("chain")


def test_errors_are_tritons_without_traces(service: Service, home: Path) -> None:
    status, _, content = ask(service, "/v2/models/chain/infer", b'{"inputs": []}')
    assert status == 400
    assert "expected 1 inputs but got 0" in json.loads(content)["error"]
    assert ask(service, "/v2/models/nobody/infer", json.dumps(REQUEST).encode())[0] in (400, 404)
    (home / "other").write_text("raise", encoding="utf-8")
    try:
        status, _, content = ask(service, "/v2/models/other/infer", json.dumps(REQUEST).encode())
    finally:
        (home / "other").unlink()
    assert status == 500
    message = json.loads(content)["error"]
    assert "RuntimeError" in message
    assert str(home) not in message
    assert "At:" not in message
    failed = [entry for entry in service.entries() if entry.get("request_id") == "my-request"]
    assert failed
    assert failed[-1]["model"] == "other"
    service.wait(is_ready=True, seconds=15)


def test_too_large(service: Service) -> None:
    body = json.dumps({**REQUEST, "id": "x" * 2**20}).encode()
    status, _, content = ask(service, "/v2/models/chain/infer", body)
    assert status == 413
    assert "larger than 1048576 bytes" in json.loads(content)["error"]
    bomb = gzip.compress(body)
    assert len(bomb) < 10_000
    assert ask(service, "/v2/models/chain/infer", bomb, Content_Encoding="gzip")[0] == 413
    chunked = (chunk for chunk in (body[:1000], body[1000:]))
    assert ask(service, "/v2/models/chain/infer", chunked)[0] == 413
    assert service.is_ready()


@pytest.mark.parametrize(
    "text",
    [
        "CONNECT @{other} HTTP/1.1\nHost: localhost\n\n",
        "CONNECT {other} HTTP/1.1\nHost: localhost\n\n",
        "GET http://{other}/nothing HTTP/1.1\nHost: {other}\nConnection: close\n\n",
        "GET @{other}/ HTTP/1.1\nHost: localhost\nConnection: close\n\n",
        "TRACE / HTTP/1.1\nHost: localhost\nConnection: close\n\n",
        "GET \\evil HTTP/1.1\nHost: localhost\nConnection: close\n\n",
    ],
)
def test_no_other_server_is_asked(service: Service, text: str) -> None:
    """The other one would answer ready, or note that it was asked."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.5)
        answer = raw(service, text.format(other=f"127.0.0.1:{other.getsockname()[1]}"))
        with pytest.raises(TimeoutError):
            other.accept()
    assert not answer or re.match(r"HTTP/1.[01] 4", answer)
    assert "Traceback" not in answer
    assert not [entry for entry in service.entries() if "exception" in entry]


@pytest.mark.without_keys("with keys, pages of all hosts may ask")
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/models/chain/infer", "/v2/models/chain/generate", "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}])
def test_web_pages_of_others_are_refused(service: Service, headers: dict[str, str], method: str, path: str) -> None:
    """On the ports for clients and for operators, whatever is asked."""
    health = {"/v2/models/chain/infer": "/metrics", "/v2/models/chain/generate": "/health/live"}.get(path, path)
    for address, asked in ((service.http, path), (service.metrics, health)):
        request = urllib.request.Request(f"http://{address}{asked}", b"{}", headers, method=method)
        with pytest.raises(urllib.error.HTTPError, match="403") as caught:
            urllib.request.urlopen(request, timeout=20)
        assert "is not on this machine" in json.loads(caught.value.read())["error"]
    for path in ("/v1", "/v1/models", "/v1/nothing", "/v1/messages", "/v1/messages/batches"):
        request = urllib.request.Request(f"http://{service.http}{path}", None, headers, method=method)
        with pytest.raises(urllib.error.HTTPError, match="403") as caught:
            urllib.request.urlopen(request, timeout=20)
        found = json.loads(caught.value.read())
        assert "is not on this machine" in found["error"]["message"]
        is_anthropic = "messages" in path
        assert found["error"]["type"] == "permission_error"
        assert found.get("type") == ("error" if is_anthropic else None)
        assert found["error"].get("code") == (None if is_anthropic else "permission_denied")


def test_pages_of_this_machine_and_forms_are_answered(service: Service) -> None:
    """The content type is what curl sends by default, and what the pages' own lines send."""
    for headers in ({}, {"Origin": f"http://{service.http}", "Sec_Fetch_Site": "same-origin"}, {"Host": "localhost:1"}):
        form = "application/x-www-form-urlencoded"
        status, _, content = ask(service, "/v2/models/chain/generate", b'{"X": 3}', Content_Type=form, **headers)
        assert (status, json.loads(content)["Z"]) == (200, 12.0)
    host, port = service.http.split(":")
    for head, status in (("HTTP/1.0", b"200"), ("HTTP/1.0\r\nHost: localhost\r\nHost: localhost", b"40")):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"GET /v2/health/live {head}\r\n\r\n".encode())
            assert connection.recv(12).split()[1].startswith(status)


def test_behind_a_proxy_any_host_is_answered(home: Path) -> None:
    with Service(home / "repository", home / "log3", "--open") as service:
        for headers in ({"Host": "example.org"}, {"Origin": "https://example.org"}):
            assert ask(service, "/v2/health/live", None, None, **headers)[0] == 200


def test_long_batches_are_not_a_fault(service: Service, home: Path) -> None:
    """Requests behind them wait, canaries too; nothing is restarted."""
    before = service.metric("shoal_restarts_total")
    (home / "first").write_text("busy 7", encoding="utf-8")
    try:
        with shoal.Client(service.grpc, retries=0) as client:
            assert client.infer("chain", X=[[3.0]])["Z"][0, 0] == 12
    finally:
        (home / "first").unlink()
    assert service.metric("shoal_restarts_total") == before
    service.wait(is_ready=True, seconds=30)
    assert service.metric("shoal_restarts_total") == before


@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("br", b"x", 415, "Use gzip or deflate"),
        ("gzip", b"xyz", 400, "is not gzip"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400, "does not end"),
        ("deflate", b"\xff", 400, "is not deflate"),
    ],
)
def test_encodings_that_cannot_be_read(service: Service, encoding: str, body: bytes, status: int, words: str) -> None:
    found, headers, content = ask(service, "/v2/models/chain/infer", body, Content_Encoding=encoding)
    assert (found, headers["Server"], headers["X-Content-Type-Options"]) == (status, "shoal", "nosniff")
    assert words in json.loads(content)["error"]


@pytest.mark.parametrize(
    ("path", "method", "status", "words"),
    [
        ("/v2/repository/models/chain/unload", "POST", 403, "Model control is closed"),
        ("/v2/systemsharedmemory/status", "GET", 403, "Shared memory is closed"),
        ("/v2/models/chain/trace/setting", "GET", 403, "is closed"),
        ("/v2/logging", "POST", 403, "Logging is closed"),
        ("/v2/models/chain/infer", "GET", 405, "Use POST"),
        ("/metrics", "GET", 404, "no path"),
        ("/v2/models/chain/../other/infer", "POST", 404, "no path"),
    ],
)
def test_interfaces_closed_to_clients(service: Service, path: str, method: str, status: int, words: str) -> None:
    found, _, content = ask(service, path, method=method)
    assert found == status
    assert words in json.loads(content)["error"]


def test_files_are_the_services_own(home: Path) -> None:
    log = home / "own.log"
    with Service(home / "repository", home / "log2", "--log", log) as running:
        regions = [Path("/dev/shm") / name for name in running.regions()]
        assert regions
        for path in (log, *regions):
            assert path.stat().st_mode & 0o077 == 0, path
