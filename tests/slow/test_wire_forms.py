"""Requests in other forms than usual, over bare sockets: none gets more than the same request in its plain form."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import grpc  # type: ignore[import-untyped]
import pytest

from shoal.serving.gateway.callers.callers import Scope
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.http.routes import Route
from shoal.serving.gateway.v2.grpc_front import GrpcFront
from shoal.serving.gateway.v2.http_front import HttpFront
from tests.support.gates import make_gate
from tests.support.keys import World, bad_keys, bearer, make_path
from tests.support.service import Service, make_repository
from tests.support.virtual_time import run

REFUSALS = {401, 403, 404, 405, 413}
UNREADABLE = 400  # the HTTP library's, for what is not HTTP
CLOSED = 0  # the connection, without an answer
HOST = "localhost"
PROXY = ("--trusted-proxy", "127.0.0.1")
# How a path is written in a request's first line, and the Host. A path that is open to all is hidden in some.
WAYS = {
    "plain": ("{path}", HOST),
    "absolute": (f"http://{HOST}{{path}}", HOST),
    "two slashes": ("/{path}", HOST),
    "coded slash": ("%2F{rest}", HOST),
    "coded letters": ("/{coded}", HOST),
    "dots": ("{open}/../../..{path}", HOST),
    "Host with a slash": ("{path}", f"{HOST}{{open}}?"),
    "Host with a question mark": ("{path}", f"{HOST}?{{open}}"),
    "Host with a hash": ("{path}", f"{HOST}#{{open}}"),
}
OTHER_METHODS = ("HEAD", "OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "PATCH", "BREW", "get", "post")


class Served(NamedTuple):
    """A service with keys, keys that are bad, and one that may do nothing but read the model ``chain``."""

    service: Service
    bad: list[list[str]]
    narrow: str

    def ports(self) -> list[tuple[str, list[Route], str]]:
        """Return the addresses of HTTP ports, with their routes and a path that is open to all."""
        http, metrics = self.service.http, self.service.metrics
        return [(http, http_routes, "/v2/health/live"), (metrics, metrics_routes, "/health/live")]


# Each request comes from an address of its own: after some wrong keys, an address gets another refusal.
addresses = (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}" for number in itertools.count(1))
http_routes: list[Route] = []
metrics_routes: list[Route] = []
grpc_routes: list[Route] = []


def find_routes() -> None:
    """Take the routes from the fronts themselves."""

    async def work() -> None:
        gate = make_gate()
        front = GrpcFront(gate, {})
        http_routes[:], metrics_routes[:] = HttpFront(gate, {}).routes, Health(gate, {}).routes
        grpc_routes[:] = [*front.routes, front._stream_route]

    run(work())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    find_routes()
    home = tmp_path_factory.mktemp("home")
    world = World(home)
    world.now = datetime(2026, 1, 1, tzinfo=UTC)  # so that a key has expired
    narrow = world.file.new("narrow", ["chain"], ["list"])
    bad = [given for given in bad_keys(world) if given != [f"{bearer(world.key)} "]]  # HTTP removes the space
    with Service(make_repository(home), home / "log", "--keys", world.file.path, *PROXY) as service:
        yield Served(service, bad, narrow)


def send(address: str, method: str, target: str, host: str, given: list[str]) -> int:
    """Return the status of a request that is written as given; ``CLOSED`` for none."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *(f"Authorization: {value}" for value in given)]
    lines += [f"X-Forwarded-For: {next(addresses)}", "Content-Length: 2", "Connection: close", "", "{}"]
    name, port = address.split(":")
    with socket.create_connection((name, int(port)), timeout=30) as connection:
        try:
            connection.sendall("\r\n".join(lines).encode())
            first = connection.makefile("rb").readline()
        except ConnectionError:
            return CLOSED
    return int(first.split()[1]) if first else CLOSED


def write(way: str, path: str, open_path: str) -> tuple[str, str]:
    """Return the target and the Host of a request for a path, written in one of the ways."""
    coded = "".join(f"%{ord(letter):x}" if letter != "/" else letter for letter in path[1:])
    values = {"path": path, "rest": path[1:], "coded": coded, "open": open_path}
    target, host = WAYS[way]
    return target.format(**values), host.format(**values)


@pytest.mark.parametrize("way", WAYS)
def test_no_route_answers_a_bad_key(way: str, served: Served) -> None:
    assert len(served.bad) >= 14
    num_asked = 0
    for address, routes, open_path in served.ports():
        for route in routes:
            method = route.method.split(",")[0]
            target, host = write(way, make_path(route.path).replace("plain", "chain"), open_path)
            for given in served.bad:
                status, is_open = send(address, method, target, host, given), route.scope is Scope.OPEN
                allowed = REFUSALS | ({200} if is_open else set()) | ({UNREADABLE} if way != "plain" else set())
                assert status in allowed, (route.path, given)
                if way == "plain":
                    assert status == (200 if is_open else 401), (route.path, given)
                num_asked += 1
    assert num_asked == (len(http_routes) + len(metrics_routes)) * len(served.bad)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_get_no_more(method: str, served: Served) -> None:
    for given in ([], [bearer(served.narrow)]):
        for address, routes, open_path in served.ports():
            for route in routes:
                if method in route.method:
                    continue
                for way in WAYS:
                    target, host = write(way, make_path(route.path).replace("plain", "chain"), open_path)
                    status = send(address, method, target, host, given)
                    assert status in {*REFUSALS, UNREADABLE, CLOSED}, (route.path, way)
            assert send(address, method, "*", HOST, given) in {*REFUSALS, UNREADABLE, CLOSED}


@pytest.mark.parametrize("way", WAYS)
def test_a_narrow_key_gets_no_more_in_another_form(way: str, served: Served) -> None:
    given = [bearer(served.narrow)]
    for address, routes, open_path in served.ports():
        for route in routes:
            method, path = route.method.split(",")[0], make_path(route.path)
            for model in ("chain", "other"):
                target, host = write(way, path.replace("plain", model), open_path)
                status = send(address, method, target, host, given)
                is_named = "plain" not in path or model == "chain"
                is_allowed = route.scope is Scope.OPEN or (route.scope in (Scope.HEALTH, Scope.READ) and is_named)
                assert status in {*REFUSALS, UNREADABLE, *([200] if is_allowed else [])}, (route.path, model)
                if way == "plain":
                    assert (status == 200) == is_allowed, (route.path, model, status)


GRPC_WAYS = {
    "plain": ("{path}", HOST),
    "absolute": (f"http://{HOST}{{path}}", HOST),
    "two slashes": ("/{path}", HOST),
    "coded slash": ("%2F{rest}", HOST),
    "coded letters": ("/{coded}", HOST),
    "dots": ("/grpc.health.v1.Health/Check/../..{path}", HOST),
    "authority with a slash": ("{path}", f"{HOST}/grpc.health.v1.Health/Check?"),
    "authority with a question mark": ("{path}", f"{HOST}?"),
    "authority with a hash": ("{path}", f"{HOST}#"),
}
GRPC_REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "NOT_FOUND"}
# grpc's own client and server, for what is no path or no authority
GRPC_UNREADABLE = {"INTERNAL", "UNAVAILABLE", "UNKNOWN"}


@pytest.mark.parametrize("way", GRPC_WAYS)
def test_no_method_answers_a_bad_key(way: str, served: Served) -> None:
    form, authority = GRPC_WAYS[way]
    options = [("grpc.default_authority", authority), ("grpc.use_local_subchannel_pool", 1)]
    num_asked = 0
    with grpc.insecure_channel(served.service.grpc, options=options) as channel:
        for route in grpc_routes:
            coded = "".join(f"%{ord(letter):x}" if letter != "/" else letter for letter in route.path[1:])
            ask = channel.stream_stream(form.format(path=route.path, rest=route.path[1:], coded=coded))
            for given in served.bad:
                metadata = [("authorization", value) for value in given if value.isascii()]
                metadata.append(("x-forwarded-for", next(addresses)))
                try:
                    list(ask(iter([b""]), metadata=metadata, timeout=30))
                except grpc.RpcError as error:
                    code = error.code().name
                else:
                    code = "OK"
                allowed = GRPC_REFUSALS | ({"OK"} if route.scope is Scope.OPEN else set())
                assert code in allowed | (GRPC_UNREADABLE if way != "plain" else set()), (route.path, given)
                if way == "plain":
                    assert code == ("OK" if route.scope is Scope.OPEN else "UNAUTHENTICATED"), (route.path, given)
                num_asked += 1
    assert num_asked == len(grpc_routes) * len(served.bad)


def test_a_route_without_a_scope_keeps_the_service_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shoal.serving.gateway.options import Options
    from shoal.serving.gateway.run import run_service

    whole = HttpFront.__init__

    def plant(self: HttpFront, *given: object) -> None:
        whole(self, *given)  # type: ignore[arg-type]
        Route("Planted", None, "/planted", self._answer_live, "GET")  # type: ignore[arg-type]

    monkeypatch.setattr(HttpFront, "__init__", plant)
    options = Options(http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(TypeError, match=r"The route Planted \(/planted\) has no scope: nobody may use it\."):
        run_service(make_repository(tmp_path), options, lambda *_: None)
