"""Options of ``shoal serve``: what a client sees of a service with one value, and with another.

A line for each option: the two services, by name, and what is looked at. Services are shared; ``SERVICES`` has their
options. To add an option, give it to a service that no other entry's look is disturbed in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.clients.client.client import Client
from shoal.errors import ShoalError
from tests.support.counting import write_counting
from tests.support.options import Elsewhere
from tests.support.service import SHOAL, Service, make_repository, wait_until

pytestmark = pytest.mark.without_keys("its options say who may ask without keys")
SERVICES = {
    "plain": "",
    "other": "--allow-host gpu.example --host 127.0.0.2"
    " --http-port {ports[0]} --grpc-port {ports[1]} --metrics-port {ports[2]} --expose hidden"
    " --max-request-mib 0.01 --max-streams 1 --head-seconds 1 --body-seconds 1 --no-resend --grace 1"
    " --log {home}/log.jsonl --audit {home}/audit.jsonl --max-wait 0.01 --body-kib 1 --unread-seconds 1"
    " --alias nick=chain",
    "third": "--open --lenient --memory-mib 1 --client-share 0.02 --body-seconds 1",
}


@dataclass(frozen=True, eq=False)
class Running:
    """A service, the folder of its models, and the ports that were asked for."""

    service: Service
    home: Path
    ports: list[int]

    def post(self, path: str, body: bytes, **headers: str) -> str:
        """Return the status of an HTTP request, and the beginning of a refusal."""
        request = urllib.request.Request(f"http://{self.service.http}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return f"{reply.status}"
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()[:200]}"

    def is_closed(self, sent: bytes, seconds: float) -> bool:
        """Whether the service answers or closes a connection that stops in the middle of a request, in time."""
        host, port = self.service.http.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
            connection.settimeout(seconds)
            try:
                return connection.recv(1) is not None
            except TimeoutError:
                return False

    def infer(self, model: str, value: float = 3.0) -> str:
        """Return the names of a model's outputs, or why there are none."""
        with Client(self.service.grpc, retries=0, timeout=60) as client:
            try:
                return str(client.infer(model, X=[[value]]).keys())
            except ShoalError as error:
                return type(error).__name__


def look_at_port(name: str, place: int) -> Callable[[Running], Any]:
    return lambda s: int(getattr(s.service, name).split(":")[1]) == s.ports[place]


def look_at_waiting(s: Running) -> bool:
    """Whether all of many requests at once are answered."""
    (s.home / "other").write_text("0.05")
    with ThreadPoolExecutor(64) as pool:
        found = set(pool.map(lambda _: s.infer("other"), range(200)))
    (s.home / "other").unlink()
    return len(found) == 1


def look_at_streams(s: Running) -> list[str]:
    """Open several streams at once, some of which may wait for their turn; return the statuses of those refused."""
    body, (host, port) = json.dumps({"COUNT": 100, "DELAY": 0.2}).encode(), s.service.http.split(":")
    head = f"POST /v2/models/count/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as held:
        opened = [held.enter_context(closing(socket.create_connection((host, int(port))))) for _ in range(8)]
        for each in opened:
            each.sendall(head.encode() + body)
        time.sleep(2)
        found = []
        for each in opened:
            each.setblocking(False)
            with suppress(BlockingIOError):
                found.append(each.recv(12).decode())
    return [status for status in found if not status.endswith("200")]


def look_at_unread(s: Running) -> bool:
    """Whether a stream that is not read is still open after some seconds."""
    body = json.dumps({"COUNT": 10**7}).encode()
    host, port = s.service.http.split(":")
    head = f"POST /v2/models/count/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: s.service.metric("shoal_in_flight") == 1)
        return wait_until(lambda: s.service.metric("shoal_in_flight") == 0, 6)


def look_at_resending(s: Running) -> list[str]:
    """Kill the process of a model with two requests in flight; a single one would not be sent again."""
    (s.home / "other").write_text("2")
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(s.infer, "other", value) for value in (4.0, 5.0)]
        time.sleep(1)
        (s.home / "other").unlink()
        for stub in s.service.stubs():
            if any("other" in word for word in stub.arguments()):
                os.kill(stub.pid, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    s.service.wait(is_ready=True, seconds=60)
    return found


def look_at_grace(s: Running) -> str:
    """Stop the service with a request of 3 s in flight."""
    (s.home / "other").write_text("busy 3")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(s.infer, "other", 6.0)
        assert wait_until(lambda: s.service.metric("shoal_in_flight") == 1)
        s.service.process.terminate()
        return answer.result()


def look_at_start(arguments: str) -> Callable[[Running], Any]:
    """Start another service over the repository, which has a mistake or is slow to load."""

    @cache
    def look(s: Running) -> str:
        command = [*SHOAL, "serve", s.home / "wrong", "--http-port", 0, "--grpc-port", 0, "--metrics-port", 0]
        done = subprocess.run([*map(str, command), *arguments.split()], capture_output=True, text=True, timeout=90)
        return done.stdout + done.stderr.replace(str(s.home), "")

    return look


class Seen(NamedTuple):
    """Two services and what is looked at; or one, and two looks."""

    one: str
    two: str
    look: Callable[[Running], Any]
    other: Callable[[Running], Any] | None = None


NOT_CHECKED = look_at_start("--no-check")
POST = b"POST /v2/models/other/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n{"
TABLE: dict[str, Seen | Elsewhere] = {
    "serve --http-port": Seen("plain", "other", look_at_port("http", 0)),
    "serve --grpc-port": Seen("plain", "other", look_at_port("grpc", 1)),
    "serve --metrics-port": Seen("plain", "other", look_at_port("metrics", 2)),
    "serve --host": Seen("plain", "other", lambda s: s.service.grpc.split(":")[0]),
    "serve --open": Seen("plain", "third", lambda s: s.post("/v2/models/chain/infer", b"{}", Host="example.org")[:3]),
    "serve --keys": Elsewhere("slow/test_keys_served.py::test_only_health_answers_without_a_key"),
    "serve --tls-cert": Elsewhere("slow/test_tls_served.py::test_requests_and_streams"),
    "serve --tls-key": Elsewhere("unit/test_certificates.py::test_what_cannot_be_served_is_refused"),
    "serve --client-ca": Elsewhere("unit/test_certificates.py::test_authorities_of_clients"),
    "serve --allow-host": Seen(
        "plain", "other", lambda s: s.post("/v2/models/chain/infer", b"{}", Host="gpu.example")[:3]
    ),
    "serve --audit": Seen("plain", "other", lambda s: (s.home / "audit.jsonl").exists()),
    "serve --cors": Elsewhere("unit/test_cors.py::test_pages_of_the_origin_alone_may_read_answers"),
    "serve --expose": Seen("plain", "other", lambda s: s.infer("hidden")),
    "serve --alias": Seen(
        "plain",
        "other",
        lambda s: s.post(
            "/v1/models/nick:predict", b'{"instances": [{"X": 3}]}', **{"Content-Type": "application/json"}
        ),
    ),
    "serve --max-request-mib": Seen("plain", "other", lambda s: s.post("/v2/models/other/infer", b" " * 20_000)),
    "serve --memory-mib": Seen("plain", "third", lambda s: s.post("/v2/models/other/infer", b" " * 1_500_000)),
    "serve --model-memory-mib": Elsewhere(
        "unit/test_gateway_process_monitor.py::test_memory_of_a_process_and_its_children"
    ),
    "serve --trusted-proxy": Elsewhere("unit/test_limits.py::test_the_caller_behind_a_trusted_proxy"),
    "serve --max-streams": Seen("plain", "other", look_at_streams),
    "serve --client-share": Seen("plain", "third", look_at_streams),
    "serve --head-seconds": Seen("plain", "other", lambda s: s.is_closed(b"POST /v2", 4)),
    "serve --body-seconds": Seen("plain", "third", lambda s: s.is_closed(POST, 4)),
    "serve --body-kib": Seen("other", "third", lambda s: s.is_closed(POST + b" " * 6000, 4)),
    "serve --unread-seconds": Seen("plain", "other", look_at_unread),
    "serve --lenient": Seen(
        "plain", "third", lambda s: s.post("/v2/models/count/generate", b'{"COUNT": 1, "more": 2}')
    ),
    "serve --max-restarts": Elsewhere("slow/test_service.py::test_too_many_restarts_are_followed_by_pauses"),
    "serve --log": Seen("plain", "other", lambda s: (s.home / "log.jsonl").exists()),
    "serve --max-wait": Seen("plain", "other", look_at_waiting),
    "serve --task": Elsewhere("unit/test_recipes.py::test_a_folder_says_its_task"),
    "serve --name": Elsewhere("unit/test_recipes.py::test_a_file_is_a_model_of_its_name"),
    "serve --check": Seen("plain", "plain", look_at_start("--check"), NOT_CHECKED),
    "serve --load-seconds": Seen("plain", "plain", look_at_start("--no-check --load-seconds 0.1"), NOT_CHECKED),
    # These end a model, a server or the service: the last ones.
    "serve --resend": Seen("plain", "other", look_at_resending),
    "serve --grace": Seen("plain", "other", look_at_grace),
}


def free_ports() -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.2", 0))) for _ in range(3)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    found = {}
    with ExitStack() as held:
        for name, options in SERVICES.items():
            home, ports = tmp_path_factory.mktemp(name), free_ports()
            repository = make_repository(home)
            write_counting(repository)
            config = repository / "first" / "config.pbtxt"
            text = config.read_text()
            for copy in ("wrong/first", "hidden"):
                (home / copy / "1").mkdir(parents=True)
                (home / copy / "1" / "model.py").write_text((repository / "first" / "1" / "model.py").read_text())
            (home / "wrong" / "first" / "config.pbtxt").write_text(
                text.partition("model_warmup")[0].replace("dims: [ 1 ]", "dims: [ 0 ]", 1)
            )
            (home / "hidden" / "config.pbtxt").write_text(
                text.partition("model_warmup")[0].replace('"public"', '"private"')
            )
            (home / "hidden").rename(repository / "hidden")
            given = options.format(ports=ports, home=home).split()
            found[name] = Running(held.enter_context(Service(repository, home / "log", *given)), home, ports)
        yield found


@pytest.mark.parametrize("entry", [pytest.param(e, id=n) for n, e in TABLE.items() if isinstance(e, Seen)])
def test_two_values_give_two_results(entry: Seen, services: dict[str, Running]) -> None:
    one, two = entry.look(services[entry.one]), (entry.other or entry.look)(services[entry.two])
    assert one != two
