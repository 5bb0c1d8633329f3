"""Limits, request ids, audit and metrics of a real service, and where the text of a key appears: nowhere."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shoal.clients.client.client import Client
from shoal.clients.keys import make_key
from shoal.errors import ShoalError
from shoal.serving.gateway.callers.key_file import KeyFile
from shoal.system.processes import processes
from tests.support.service import Service, make_repository, wait_until
from tests.support.speaking import write_speaking

X = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [3]}
BODY = json.dumps({"inputs": [X]}).encode()
FOLLOWED = 20.0  # seconds within which even a busy machine follows the file
_made = list[str]()  # all keys of this module
_numbers = itertools.count()


class Served(NamedTuple):
    """A service, its folder, the file of its keys, and a key for everything."""

    service: Service
    home: Path
    file: KeyFile
    key: str

    def audit(self, request_id: str) -> dict[str, Any]:
        """Return the only line of a request, once it is there."""
        found = list[dict[str, Any]]()

        def look() -> bool:
            entries = (json.loads(line) for line in (self.home / "audit").read_text().splitlines())
            found[:] = [entry for entry in entries if entry["request_id"] == request_id]
            return bool(found)

        assert wait_until(look), request_id
        assert len(found) == 1, found
        return found[0]

    def metric(self, line: str) -> float:
        _, text, _ = ask(self.service.metrics, "GET", "/metrics", self.key)
        return next((float(each.split()[-1]) for each in text.splitlines() if each.startswith(line)), 0.0)


def ask(
    at: str, method: str, path: str, key: str = "", body: bytes = b"", **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Return the status, the text and the headers (in lower case) of an HTTP answer."""
    host, port = at.split(":")
    given = {"Authorization": f"Bearer {key}"} if key else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request(method, path, body or None, given)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), {name.lower(): value for name, value in reply.getheaders()}


def infer(served: Served, key: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    return ask(served.service.http, "POST", "/v2/models/other/infer", key, BODY, **headers)


def message() -> Any:
    request = service_pb2.ModelInferRequest(model_name="other")
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.float32(3).tobytes())
    return request


def call(served: Served, key: str, request_id: str = "") -> tuple[str, str, dict[str, str]]:
    """Return the status, the words and the trailing metadata of an inference by gRPC."""
    given = {"authorization": key and f"Bearer {key}", "x-request-id": request_id}
    metadata = [(name, value) for name, value in given.items() if value]
    with grpc.insecure_channel(served.service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            _, done = stub.ModelInfer.with_call(message(), metadata=metadata)
        except grpc.RpcError as error:
            done = error
        return done.code().name, done.details() or "", dict(done.trailing_metadata())


def make(served: Served, name: str, **more: Any) -> str:
    """Make a key, and wait until the service has it."""
    key = served.file.new(name, **more)
    _made.append(key)
    assert wait_until(lambda: status(served, key) != 401, FOLLOWED)
    return key


def status(served: Served, key: str) -> int:
    """Return the status of a question, each from another address, so that none has too many wrong keys."""
    return ask(served.service.http, "GET", "/v2", key, X_Forwarded_For=f"10.9.0.{next(_numbers) % 256}")[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    repository = make_repository(home)
    write_speaking(repository)
    file = KeyFile(home / "keys.json")
    key = file.new("all", may=("infer", "list", "metrics"))
    _made.append(key)
    options = ("--keys", file.path, "--audit", home / "audit", "--log", home / "whole log")
    with Service(repository, home / "log", *options, "--trusted-proxy", "127.0.0.1") as service:
        yield Served(service, home, file, key)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_requests_a_minute(served: Served) -> None:
    key = make(served, "three", limits={"requests_per_minute": 3})
    left = []
    for _ in range(2):
        code, _, headers = infer(served, key)
        assert (code, headers["x-ratelimit-limit-requests"]) == (200, "3")
        left.append(headers["x-ratelimit-remaining-requests"])
    name, _, metadata = call(served, key)
    assert (name, [*left, metadata["x-ratelimit-remaining-requests"]]) == ("OK", ["2", "1", "0"])
    code, text, headers = infer(served, key, X_Request_Id="too-many")
    assert code == 429
    seconds = int(headers["retry-after"])
    assert 30 <= seconds <= 60
    assert 1000 * (seconds - 1) < int(headers["retry-after-ms"]) <= 1000 * seconds
    assert headers["x-ratelimit-remaining-requests"] == "0"
    words = f"Too many requests for the key three: its limit is 3 requests a minute. Try again in {seconds} s."
    assert json.loads(text) == {"error": words}
    name, details, metadata = call(served, key, "also-too-many")
    assert (name, details[:66]) == ("RESOURCE_EXHAUSTED", words[:66])
    assert 30 <= int(metadata["retry-after"]) <= 60
    assert metadata["x-request-id"] == "also-too-many"
    assert ask(served.service.http, "GET", "/v2", key)[0] == 200, "questions are not limited"
    assert infer(served, served.key)[0] == 200, "nor are other keys"
    lines = [served.audit(each) for each in ("too-many", "also-too-many")]
    assert [(line["key"], line["why"], line["status"]) for line in lines] == [
        ("three", "limit", 429), ("three", "limit", "RESOURCE_EXHAUSTED")
    ]  # fmt: skip
    assert served.metric('shoal_key_requests_total{key="three",outcome="refused"}') == 2
    assert served.metric('shoal_refusals_total{kind="limit"}') >= 2
    refusal = r"Too many requests for the key three: .* Try again in \d+ s\."
    with Client(served.service.grpc, api_key=key, timeout=5) as client, pytest.raises(ShoalError, match=refusal):
        client.infer("other", X=[[3.0]])


@pytest.mark.parametrize("path", ["/v2/models/other/infer", "/v2/models/other/generate", "/v1/models/other:predict"])
def test_a_body_is_not_read_for_nothing(path: str, served: Served) -> None:
    """Megabytes of a key that is over its limits are refused as soon as they begin, and small requests at their end."""
    key = make(served, f"over-{next(_numbers)}", limits={"requests_per_minute": 1})
    assert infer(served, key)[0] == 200
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
    host, port = served.service.http.split(":")
    for more in (b"Content-Length: 3000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n20000\r\n" + bytes(2**17)):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head.encode() + more)
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 429 "), answer
        assert b"Connection: close" in answer
        assert b"its limit is 1 requests a minute" in answer
    assert infer(served, key)[0] == 429
    assert infer(served, served.key)[0] == 200


def test_each_message_of_a_stream_is_a_request(served: Served) -> None:
    key = make(served, "stream", limits={"requests_per_minute": 2})
    with grpc.insecure_channel(served.service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = [("authorization", f"Bearer {key}"), ("x-request-id", "messages")]
        answers = list(stub.ModelStreamInfer(iter([message()] * 3), metadata=metadata))
    assert sorted(bool(answer.error_message) for answer in answers) == [False, False, True]
    assert any("its limit is 2 requests a minute" in answer.error_message for answer in answers)

    def lines() -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in (served.home / "audit").read_text().splitlines()]
        return [entry for entry in entries if entry["request_id"] == "messages"]

    assert wait_until(lambda: len(lines()) == 3)
    found = sorted((line["status"], line["model"], line["why"]) for line in lines())
    assert found == [("LIMIT", "other", "limit"), ("OK", "other", ""), ("OK", "other", "")]
    assert sum(line["bytes_sent"] > 0 < line["bytes_received"] for line in lines()) == 2


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tokens_a_minute(protocol: str, served: Served) -> None:
    name = f"tokens-{protocol}"
    key = make(served, name, limits={"tokens_per_minute": 20})
    if protocol == "http":
        generate = "/v2/models/speak/generate_stream"
        code, text, headers = ask(served.service.http, "POST", generate, key, b'{"COUNT": 20}', X_Request_Id="spoken")
        assert (code, text.count("data: ")) == (200, 20)
        assert headers["x-ratelimit-remaining-tokens"] == "12", "when the first of the answers came"
        line = served.audit("spoken")
        assert (line["input_tokens"], line["output_tokens"], line["model"]) == (7, 20, "speak")
    else:
        with Client(served.service.grpc, api_key=key, retries=0) as client:
            assert len(list(client.stream("speak", COUNT=[20]))) == 20
    url = served.service.grpc if protocol == "grpc" else served.service.http
    refusal = "its limit is 20 tokens a minute"
    with Client(url, protocol=protocol, api_key=key, retries=0) as client, pytest.raises(ShoalError, match=refusal):
        list(client.stream("speak", COUNT=[1]))
    assert served.metric(f'shoal_key_tokens_total{{key="{name}",kind="input"}}') == 7
    assert served.metric(f'shoal_key_tokens_total{{key="{name}",kind="output"}}') == 20


def test_clients_wait_for_requests_at_once(served: Served) -> None:
    key = make(served, "one", limits={"at_once": 1})
    (served.home / "other").write_text("0.2")
    with Client(served.service.grpc, api_key=key, retries=20) as client, ThreadPoolExecutor(3) as pool:
        client.infer("other", X=[[3.0]])
        found = [float(each["Y"].ravel()[0]) for each in pool.map(lambda _: client.infer("other", X=[[3.0]]), range(3))]
    (served.home / "other").unlink()
    assert found == [6.0] * 3
    assert served.metric('shoal_key_requests_total{key="one",outcome="refused"}') >= 2


def test_wrong_keys_of_one_address(served: Served) -> None:
    wrong = make_key("0" * 12)
    found = [ask(served.service.http, "GET", "/v2", wrong, X_Forwarded_For="10.1.1.1")[0] for _ in range(22)]
    assert found == [401] * 20 + [429] * 2
    code, text, headers = ask(served.service.http, "GET", "/v2", wrong, X_Forwarded_For="10.1.1.1")
    assert (code, "Too many requests for this server: they had wrong keys" in text) == (429, True)
    assert 30 <= int(headers["retry-after"]) <= 60
    assert ask(served.service.http, "GET", "/v2", wrong, X_Forwarded_For="10.1.1.2")[0] == 401
    assert ask(served.service.http, "GET", "/v2", served.key, X_Forwarded_For="10.1.1.1")[0] == 200


# --- ids and audit ---------------------------------------------------------------------------------------------------


def test_every_answer_has_an_id(served: Served) -> None:
    http_, metrics, key = served.service.http, served.service.metrics, served.key
    for at, method, path in (
        (http_, "GET", "/v2"), (http_, "GET", "/v2/health/live"), (http_, "GET", "/none"), (http_, "PUT", "/v2"),
        (http_, "POST", "/v2/models/other/infer"), (metrics, "GET", "/metrics"), (metrics, "HEAD", "/health/ready"),
    ):  # fmt: skip
        for given in (key, ""):
            assert len(ask(at, method, path, given)[2]["x-request-id"]) == 32
            assert ask(at, method, path, given, X_Request_Id="mine-1.2")[2]["x-request-id"] == "mine-1.2"
            assert len(ask(at, method, path, given, X_Request_Id="not one")[2]["x-request-id"]) == 32
    assert call(served, key, "mine-3")[2]["x-request-id"] == "mine-3"
    assert len(call(served, "")[2]["x-request-id"]) == 32
    with grpc.insecure_channel(served.service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(iter([]), metadata=[("authorization", f"Bearer {key}"), ("x-request-id", "s")])
        assert list(stream) == []
        assert ("x-request-id", "s") in [(each.key, each.value) for each in stream.trailing_metadata()]


def test_lines_of_the_audit(served: Served) -> None:
    expired = make(served, "old", span=timedelta(seconds=60))
    revoked = make(served, "gone")
    document = json.loads(served.file.path.read_text())
    for key in document["keys"]:
        if key["name"] == "old":
            key["secrets"][0]["expires"] = "2026-01-01T00:00:00Z"
    served.file.path.write_text(json.dumps(document))
    served.file.revoke("gone")
    assert wait_until(lambda: status(served, revoked) == status(served, expired) == 401, FOLLOWED)
    code, _, _ = infer(served, served.key, X_Request_Id="good", X_Forwarded_For="10.2.3.4")
    assert code == 200
    line = served.audit("good")
    assert line["milliseconds"] > 0
    assert line["bytes_sent"] > 100
    assert {name: line[name] for name in ("key", "address", "route", "model", "status", "bytes_received", "why")} == {
        "key": "all", "address": "10.2.3.4", "route": "Inference", "model": "other", "status": 200,
        "bytes_received": len(BODY), "why": "",
    }  # fmt: skip
    for name, key, expected in (
        ("a", "", ("", "no key")), ("b", make_key("0" * 12), ("", "unknown key")), ("c", "x", ("", "malformed key")),
        ("d", expired, ("old", "expired key")), ("e", revoked, ("gone", "revoked key")),
    ):  # fmt: skip
        assert infer(served, key, X_Request_Id=f"refused-{name}")[0] == 401
        line = served.audit(f"refused-{name}")
        assert (line["key"], line["why"], line["status"]) == (*expected, 401)
        assert call(served, key, f"called-{name}")[0] == "UNAUTHENTICATED"
        line = served.audit(f"called-{name}")
        assert (line["key"], line["why"], line["status"]) == (*expected, "UNAUTHENTICATED")
    assert "3" not in {json.dumps(value) for value in served.audit("good").values()}
    call(served, served.key, "called")
    line = served.audit("called")
    assert (line["model"], line["route"], line["status"]) == ("other", "Inference", "OK")
    assert line["bytes_sent"] > 10 < line["bytes_received"]


# --- the text of a key -----------------------------------------------------------------------------------------------


def test_a_key_appears_nowhere_but_with_its_client(served: Served) -> None:
    """Use a key in all ways, right and wrong, and look for it in all that the service and its client leave."""
    key, service = make(served, "canary", may=("infer", "list", "metrics")), served.service
    said = list[str]()
    for given in (key, key[:-1], f"{key}0", key.upper()):
        for method, path in (
            ("GET", "/v2"), ("POST", "/v2/models/other/infer"), ("GET", f"/v2/models/none?api_key={given}"),
            ("PUT", "/v2"), ("GET", "/none"),
        ):  # fmt: skip
            for name, value in (("Authorization", f"Bearer {given}"), ("Authorization", f"Basic {given}"),
                                ("X_Request_Id", given), ("api_key", given), ("X_Forwarded_For", given)):  # fmt: skip
                said.append(str(ask(service.http, method, path, **{name: value}, body=BODY)))
    ask(service.http, "GET", f"/v2/models/{key}/ready", key)  # the answer repeats what the client asked for
    ask(service.http, "GET", f"/{key}", key)
    ask(service.http, "POST", "/v2/models/other/infer", key, json.dumps({"id": key, "inputs": [X]}).encode())
    (served.home / "other").write_text("raise")
    for protocol, url in (("grpc", service.grpc), ("http", service.http)):
        for each in (key, f"{key[:-8]}{'0' * 8}", make_key("0" * 12)):
            try:
                with Client(url, protocol=protocol, api_key=each, retries=0) as client:
                    said.append(repr(client) + repr(vars(client)))
                    client.infer("other", X=[[3.0]])
            except ShoalError as error:
                said += [
                    repr(error),
                    "".join(traceback.TracebackException.from_exception(error, capture_locals=False).format()),
                ]
    (served.home / "other").unlink()
    said.append(ask(service.metrics, "GET", "/metrics", key)[1])
    said += [" ".join(process.arguments()) for process in processes()]
    said += [
        Path(f"/proc/{process.pid}/environ").read_bytes().decode("utf-8", "replace") for process in service.servers()
    ]
    service.stop()
    secret = key.split("_")[2]
    for text in said:
        assert secret[:40] not in text
    files = [path for folder in (served.home, Path("/dev/shm")) for path in folder.rglob("*") if path.is_file()]
    assert {served.home / "audit", served.home / "log", served.home / "whole log"} <= {*files}
    for file in files:
        if os.access(file, os.R_OK):
            content = file.read_bytes()
            for each in _made:
                assert each.split("_")[2][:40].encode() not in content, file
    assert "canary" in (served.home / "audit").read_text()
