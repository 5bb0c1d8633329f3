"""Keys of a real service: the three ports, models, rotation and revocation under callers, streams, and the log."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.client.copies import read_metrics
from shoal.clients.client.failures import RestrictedError
from shoal.clients.keys import make_key
from shoal.errors import ServerError, ShoalError
from shoal.serving.gateway.callers.callers import Scope
from shoal.serving.gateway.callers.key_file import KeyFile
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.v1.front import ApiFront
from shoal.serving.gateway.v2.http_front import HttpFront
from tests.conftest import Scale
from tests.support.counting import write_counting
from tests.support.gates import make_gate
from tests.support.keys import make_path
from tests.support.service import Service, make_repository, wait_until

PATIENCE = 10.0  # seconds within which a busy machine follows a change of the file; 2 s otherwise
PROXY = ("--trusted-proxy", "127.0.0.1")
_keys = list[str]()  # all keys of this module, which no log may have


class Served(NamedTuple):
    """A service, the file of its keys, and a key for everything."""

    service: Service
    file: KeyFile
    key: str


def note(key: str) -> str:
    _keys.append(key)
    return key


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    repository = make_repository(home)
    write_counting(repository)
    file = KeyFile(home / "keys.json")
    key = note(file.new("all", may=("infer", "list", "metrics")))
    with Service(repository, home / "log", "--keys", file.path, "--host", "0.0.0.0", *PROXY) as service:
        http, grpc_, metrics = (f"127.0.0.1:{at.split(':')[1]}" for at in (service.http, service.grpc, service.metrics))
        service.http, service.grpc, service.metrics = http, grpc_, metrics
        yield Served(service, file, key)
        service.stop()
        log = (home / "log").read_text()
        for each in _keys:
            assert each not in log
            assert each.split("_")[2] not in log


def other_address() -> str:
    """Return an address that has sent no wrong keys yet: of one address, only 20 a minute are looked at."""
    return f"10.{random.randrange(256)}.{random.randrange(256)}.{random.randrange(256)}"


def is_known(served: Served, key: str) -> bool:
    return ask(served.service.http, "/v2", [f"Bearer {key}"])[0] == 200


def ask(at: str, path: str, given: list[str], body: bytes | None = None) -> tuple[int, str, str]:
    """Return an HTTP answer's status, text and WWW-Authenticate."""
    request = urllib.request.Request(f"http://{at}{path}", body, {"X-Forwarded-For": other_address()})
    for value in given:
        request.add_header("Authorization", value)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode(), ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers.get("WWW-Authenticate", "")


def test_only_health_answers_without_a_key(served: Served) -> None:
    service, key = served.service, served.key
    bad = [
        [],
        ["Bearer"],
        [f"Basic {key}"],
        [f"Bearer {key}0"],
        [f"Bearer {key[:-1]}"],
        [f"Bearer {make_key('0' * 12)}"],
    ]
    paths: list[tuple[str, str, bytes | None]]
    paths = [(service.http, path, None) for path in ("/v2", "/v2/models/chain", "/v2/models/chain/ready")]
    paths += [(service.http, "/v2/models/chain/infer", b"{}"), (service.http, "/v2/repository/index", b"")]
    paths += [(service.metrics, "/metrics", None)]
    for given in bad:
        found = {ask(at, path, given, body) for at, path, body in paths}
        assert found == {(401, '{"error": "A valid key is needed: Authorization: Bearer KEY"}', "Bearer")}
        for at, path in ((service.http, "/v2/health/live"), (service.metrics, "/health/ready")):
            assert ask(at, path, given)[0] == 200
    assert ask(service.metrics, "/health/ready", []) == (200, '{"ready": true}', "")
    assert ask(service.http, "/v2", [f"Bearer {key}"])[0] == 200
    metrics = ask(service.metrics, "/metrics", [f"Bearer {key}"])[1]
    assert "shoal_keys_damaged 0.0" in metrics
    assert 'shoal_refusals_total{kind="key"} 0.0' not in metrics


def write_in_ways(method: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the method, the target and the host of a request, plain and written in ways that a check may not expect."""
    host = "localhost"
    yield method, path, host
    yield method, f"http://localhost{path}", host
    yield method, f"/{path}", host
    yield method, path.replace("/", "%2F"), host
    yield method, f"/%{ord(path[1]):02x}{path[2:]}", host
    yield method, f"/v2/health/live/../../..{path}", host
    yield method, f"{path}?/v2/health/live", host
    for end in ("/v2/health/live", "?", "#"):
        yield method, path, f"localhost{end}"
    for other in ("HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW"):
        yield other, path, host


def send_raw(at: str, head: str) -> int:
    """Send a request whose head is taken as it is; return the status of the answer."""
    address, _, port = at.rpartition(":")
    with socket.create_connection((address, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        return int(connection.makefile("rb").readline().split()[1])


def test_no_way_to_write_a_request_gets_past_the_keys(served: Served) -> None:
    """Every route of the two HTTP ports, taken from the routers, in every way, with each kind of wrong key."""
    service, key, gate = served.service, served.key, make_gate()
    bad = ["", f"Basic {key}", f"Bearer {key}0", f"Bearer {key[:-1]}", f"Bearer {make_key('0' * 12)}", f"Bearer  {key}"]
    fronts = ((service.http, [*HttpFront(gate, {}).routes, *ApiFront(gate, {}, {}).routes]),
              (service.metrics, Health(gate, {}).routes))  # fmt: skip
    num_routes, found = 0, Counter[int]()
    for at, routes in fronts:
        for route in routes:
            if route.scope is Scope.OPEN:
                continue
            num_routes += 1
            path = make_path(route.path)
            for number, (method, target, host) in enumerate(write_in_ways(route.method.split(",")[0], path)):
                given = bad if number < 7 else bad[:2]
                for value in given:
                    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"X-Forwarded-For: {other_address()}"]
                    status = send_raw(at, "\r\n".join([*lines, *([f"Authorization: {value}"] if value else [])]))
                    found[status] += 1
                    assert status in (400, 401, 403, 404, 405, 413), (status, lines, value)
    assert num_routes > 25
    assert found[401] > sum(found.values()) / 4, found


def test_grpc_wants_a_key_too(served: Served) -> None:
    key = served.key
    twice = [("authorization", f"Bearer {key}")] * 2
    with grpc.insecure_channel(served.service.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
        assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        for metadata in ([], twice, [("authorization", f"Basic {key}")], [("authorization", f"Bearer {key}0")]):
            for method, request in (
                ("ServerMetadata", service_pb2.ServerMetadataRequest()),
                ("ModelReady", service_pb2.ModelReadyRequest(name="chain")),
                ("ModelInfer", service_pb2.ModelInferRequest(model_name="chain")),
                ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest()),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    getattr(stub, method)(request, metadata=[*metadata, ("x-forwarded-for", other_address())])
                assert caught.value.code().name == "UNAUTHENTICATED", method
                assert caught.value.details() == "A valid key is needed: Authorization: Bearer KEY"
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.ModelStreamInfer(iter([]), metadata=[*metadata, ("x-forwarded-for", other_address())]))
            assert caught.value.code().name == "UNAUTHENTICATED"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_key_for_some_models(protocol: str, served: Served, tmp_path: Path) -> None:
    key = note(served.file.new(f"chain-{protocol}", ["ch*"]))
    url = served.service.grpc if protocol == "grpc" else served.service.http
    assert wait_until(lambda: is_known(served, key), PATIENCE)
    with Client(url, protocol=protocol, api_key=key) as client:
        assert client.infer("chain", X=[[3.0]])["Z"] == 12
        assert client.is_ready("chain")
        for model in ("other", "unheard"):
            with pytest.raises(RestrictedError, match=rf"This key is not for the model '{model}'\. Models: chain\."):
                client.infer(model, X=[[3.0]])
        assert client.default_model() == "chain"
    (tmp_path / "key").write_text(f"{key}\n")
    line = ["infer", "--url", url, "--protocol", protocol, "--model", "chain", "X=3", "--json"]
    done = CliRunner().invoke(app, [*line, "--api-key-file", str(tmp_path / "key")])
    assert done.exit_code == 0, done.output
    assert "12" in done.output
    refused = CliRunner().invoke(app, line)
    assert "wants a key" in str(refused.exception)
    index = json.loads(ask(served.service.http, "/v2/repository/index", [f"Bearer {key}"], b"")[1])
    assert [entry["name"] for entry in index] == ["chain"]
    with pytest.raises(ServerError, match=r"answered HTTP 403\. It needs a key that may read metrics\."):
        read_metrics(served.service.metrics, key)
    assert read_metrics(served.service.metrics, served.key) is not None


class Caller(threading.Thread):
    """Asks again and again, with the key that it has; notes failures, and when the last answer came."""

    def __init__(self, service: Service, protocol: str, key: str) -> None:
        super().__init__()
        url = service.grpc if protocol == "grpc" else service.http
        self._make = partial(Client, url, protocol=protocol, retries=0)
        self.key, self.failures, self.num_answers, self.last = key, list[str](), 0, 0.0
        self.is_stopped = threading.Event()

    def run(self) -> None:
        key, client = self.key, self._make(api_key=self.key)
        while not self.is_stopped.is_set():
            if key != self.key:
                client.close()
                key, client = self.key, self._make(api_key=self.key)
            try:
                client.infer("other", X=[[3.0]])
                self.num_answers, self.last = self.num_answers + 1, time.monotonic()
            except ShoalError as error:
                self.failures.append(str(error))
                time.sleep(0.05)
        client.close()


def test_rotation_and_revocation_under_callers(served: Served, scale: Scale) -> None:
    first = note(served.file.new("turning"))
    assert wait_until(lambda: is_known(served, first), PATIENCE)
    callers = [Caller(served.service, protocol, first) for protocol in ("grpc", "http") for _ in range(8)]
    for caller in callers:
        caller.start()
    for _ in range(scale(1, full=2)):
        time.sleep(1)
        second = note(served.file.rotate("turning", timedelta(seconds=1.2 * PATIENCE)))
        assert wait_until(lambda key=second: is_known(served, key), PATIENCE)  # type: ignore[misc]
        for caller in callers:
            caller.key = second
        time.sleep(1.2 * PATIENCE)  # the first one has expired
        assert not is_known(served, first)
        first = second
    assert [caller.failures for caller in callers] == [[]] * 16
    assert all(caller.num_answers > 20 for caller in callers)
    served.file.revoke("turning")
    revoked = time.monotonic()

    def num_refused() -> int:
        return sum("wants a key" in failure for caller in callers for failure in caller.failures)

    assert wait_until(lambda: num_refused() >= 20, PATIENCE)
    time.sleep(1)
    for caller in callers:
        caller.is_stopped.set()
    for caller in callers:
        caller.join()
    assert all(caller.last - revoked < PATIENCE for caller in callers)
    assert num_refused() <= 20 + len(callers), "those that were in flight are refused at their end"
    failures = [failure for caller in callers for failure in caller.failures]
    others = {each for each in failures if "wants a key" not in each and "they had wrong keys" not in each}
    assert not others


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_streams_of_a_revoked_key_end(protocol: str, served: Served) -> None:
    key = note(served.file.new(f"stream-{protocol}"))
    assert wait_until(lambda: is_known(served, key), PATIENCE)
    url = served.service.grpc if protocol == "grpc" else served.service.http
    with Client(url, protocol=protocol, api_key=key) as client:
        answers = iter(client.stream("count", COUNT=[10000], DELAY=[0.1]))
        next(answers)
        served.file.revoke(f"stream-{protocol}")
        revoked = time.monotonic()
        with pytest.raises(ServerError, match=r"wants a key|broke during a stream"):
            list(answers)
        assert time.monotonic() - revoked < PATIENCE


def test_a_damaged_file_leaves_the_keys(served: Served) -> None:
    text, path = served.file.path.read_bytes(), served.file.path

    def is_damaged() -> bool:
        return "shoal_keys_damaged 1.0" in ask(served.service.metrics, "/metrics", [f"Bearer {served.key}"])[1]

    path.write_bytes(text[:40])
    try:
        assert wait_until(is_damaged, PATIENCE)
        with Client(served.service.grpc, api_key=served.key) as client:
            assert client.infer("chain", X=[[3.0]])["Z"] == 12
    finally:
        path.write_bytes(text)
    assert wait_until(lambda: not is_damaged(), PATIENCE)
    assert any("The keys stay as they were" in entry["message"] for entry in served.service.entries())
