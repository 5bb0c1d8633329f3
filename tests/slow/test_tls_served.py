"""TLS of a real service: the three ports, certificates of clients, handshakes by half, and rotation under callers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.client.copies import read_metrics
from shoal.errors import ServerError, ShoalError
from shoal.serving.gateway.callers.key_file import KeyFile
from tests.support.counting import write_counting
from tests.support.pairs import make_pair
from tests.support.service import Service, make_repository, wait_until

SCHEMES = {"grpc": "grpcs", "http": "https"}
SECONDS = 10.0  # within which a change of files is followed; 2 s on a machine that is not busy


class Served(NamedTuple):
    """A service with keys and TLS, a folder of certificates, and a key.

    ``served.crt`` and ``served.key`` are the service's, ``all.crt`` trusts the pairs ``one`` and ``two``, and
    ``own.pem`` is a client's certificate with its key.
    """

    service: Service
    folder: Path
    key: str

    def url(self, protocol: str) -> str:
        return f"{SCHEMES[protocol]}://{self.service.grpc if protocol == 'grpc' else self.service.http}"

    def client(self, protocol: str, **options: Any) -> Client:
        given = {"ca_cert": self.folder / "all.crt", "client_cert": self.folder / "own.pem", "api_key": self.key}
        return Client(self.url(protocol), protocol=protocol, **{**given, **options})

    def put(self, name: str) -> None:
        """Replace the service's pair, one file after the other."""
        for end in ("crt", "key"):
            shutil.copy(self.folder / f"{name}.{end}", self.folder / "new")
            (self.folder / "new").replace(self.folder / f"served.{end}")

    def names(self) -> list[str]:
        """Return the names in the certificates that the three ports show now."""
        context = ssl.create_default_context(cafile=self.folder / "all.crt")
        context.load_cert_chain(self.folder / "own.pem")
        context.set_alpn_protocols(["h2", "http/1.1"])
        found = []
        for address in (self.service.http, self.service.grpc, self.service.metrics):
            host, port = address.split(":")
            with (
                socket.create_connection((host, int(port)), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=host) as secure,
            ):
                subject: Any = (secure.getpeercert() or {})["subject"]
                found.append(subject[0][0][1])
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    repository = make_repository(home)
    write_counting(repository)
    pairs = [make_pair(home, name) for name in ("one", "two", "own")]
    (home / "all.crt").write_bytes(pairs[0][0].read_bytes() + pairs[1][0].read_bytes())
    (home / "own.pem").write_bytes(pairs[2][0].read_bytes() + pairs[2][1].read_bytes())
    for end in ("crt", "key"):
        shutil.copy(home / f"one.{end}", home / f"served.{end}")
    file = KeyFile(home / "keys.json")
    key = file.new("all", may=("infer", "list", "metrics"))
    tls = ["--tls-cert", home / "served.crt", "--tls-key", home / "served.key", "--client-ca", home / "own.crt"]
    with Service(repository, home / "log", "--keys", file.path, *tls, "--head-seconds", 2) as service:
        yield Served(service, home, key)


@pytest.mark.parametrize("protocol", SCHEMES)
def test_requests_and_streams(protocol: str, served: Served) -> None:
    with served.client(protocol) as client:
        assert client.infer("chain", X=[[3.0]])["Z"] == 12
        assert len(list(client.stream("count", COUNT=[3], DELAY=[0.01]))) == 3
    with served.client(protocol, api_key="") as client, pytest.raises(ServerError, match="wants a key"):
        client.infer("chain", X=[[3.0]])
    untrusted = pytest.raises(ServerError, match=r"No secure connection to the server at .* was made: self.signed")
    with served.client(protocol, ca_cert=served.folder / "own.crt") as client, untrusted:
        client.infer("chain", X=[[3.0]])
    with served.client(protocol, client_cert="", retries=0) as client, pytest.raises(ServerError):
        client.infer("chain", X=[[3.0]])
    address = served.url(protocol).partition("://")[2]
    with Client(address, protocol=protocol, retries=0) as client, pytest.raises(ServerError):
        client.infer("chain", X=[[3.0]])


def test_commands_and_metrics(served: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(served.key)
    files = ["--ca-cert", str(served.folder / "all.crt"), "--client-cert", str(served.folder / "own.pem")]
    for protocol in SCHEMES:
        given = ["--url", served.url(protocol), "--protocol", protocol, "--api-key-file", str(tmp_path / "key"), *files]
        done = CliRunner().invoke(app, ["infer", *given, "--model", "chain", "X=3", "--json"])
        assert json.loads(done.output)[0]["Z" if "Z" in done.output else "z"] == 12, done.exception
    curl = ["infer", "--curl", "--url", served.url("http"), *files, "--model", "chain", "X=3"]
    done = CliRunner().invoke(app, curl, env={"SHOAL_API_KEY": served.key})
    assert done.output.startswith(f"curl {served.url('http')}/v2/models/chain/infer ")
    assert done.output.endswith(f" --cacert {files[1]} --cert {files[3]}\n")
    metrics = f"https://{served.service.metrics}"
    assert read_metrics(metrics, served.key, files[1], files[3]) is not None
    with pytest.raises(ServerError, match=r"No secure connection to the server at .*certificate.*--ca-cert"):
        read_metrics(metrics, served.key)


def test_half_a_handshake_ends(served: Served) -> None:
    for address in (served.service.http, served.service.grpc, served.service.metrics):
        host, port = address.split(":")
        with ExitStack() as held:
            halves = [held.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
            for half in halves:
                half.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a client's first message
                half.settimeout(60)
            for half in halves:
                try:
                    while half.recv(100):  # an alert
                        pass
                except ConnectionResetError:
                    pass
    assert served.names() == ["one"] * 3


class Caller(threading.Thread):
    """Asks again and again, over a new connection after every third answer; notes failures."""

    def __init__(self, served: Served, protocol: str) -> None:
        super().__init__()
        self._served, self._protocol = served, protocol
        self.failures, self.num_answers, self.slowest = list[str](), 0, 0.0
        self.is_stopped = threading.Event()

    def run(self) -> None:
        while not self.is_stopped.is_set():
            with self._served.client(self._protocol, retries=0) as client:
                for _ in range(3):
                    start = time.monotonic()
                    try:
                        assert client.infer("other", X=[[3.0]])["Y"] == 6
                    except (ShoalError, AssertionError) as error:
                        self.failures.append(str(error))
                        time.sleep(0.05)
                    self.num_answers += 1
                    self.slowest = max(self.slowest, time.monotonic() - start)


def test_rotation_under_callers(served: Served) -> None:
    seconds = float(os.environ.get("SHOAL_ROTATION_SECONDS", "4"))
    callers = [Caller(served, protocol) for protocol in SCHEMES for _ in range(8)]
    for caller in callers:
        caller.start()
    delays = []
    try:
        for name in ("two", "one"):
            time.sleep(seconds / 2)
            served.put(name)
            start = time.monotonic()
            assert wait_until(lambda name=name: served.names() == [name] * 3, SECONDS)  # type: ignore[misc]
            delays.append(time.monotonic() - start)
            time.sleep(seconds / 2)
    finally:
        for caller in callers:
            caller.is_stopped.set()
        for caller in callers:
            caller.join()
    assert [failure for caller in callers for failure in caller.failures] == []
    assert all(caller.num_answers > 5 for caller in callers)


def test_a_broken_pair_is_not_taken(served: Served) -> None:
    def said() -> list[str]:
        return [entry["message"] for entry in served.service.entries() if entry["level"] == "error"]

    shutil.copy(served.folder / "two.crt", served.folder / "served.crt")
    assert wait_until(lambda: len(said()) == 1, SECONDS)
    assert "The certificate stays as it was: " in said()[0]
    assert "the key is another certificate's" in said()[0]
    assert served.names() == ["one"] * 3
    served.put("two")
    assert wait_until(lambda: served.names() == ["two"] * 3, SECONDS)
    served.put("one")
    assert wait_until(lambda: served.names() == ["one"] * 3, SECONDS)
