"""Keys of clients: their form, their file, the door, and the file's changes while the service runs."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.client import Client
from shoal.clients.client.failures import Peer, explain, grpc_failure, http_failure
from shoal.clients.keys import check_key, hash_key, make_key, read_id
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.serving.gateway.callers.callers import Scope
from shoal.serving.gateway.callers.key_file import KeyFile, read_span
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.http.routes import Route
from shoal.serving.gateway.v1.front import ApiFront
from shoal.serving.gateway.v2.grpc_front import GrpcFront
from shoal.serving.gateway.v2.http_front import HttpFront
from tests.support.gates import ask, make_gate
from tests.support.keys import NOW, World, bad_keys, bearer, edit, make_path
from tests.support.virtual_time import run


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# --- form and file ---------------------------------------------------------------------------------------------------


def test_the_form_of_a_key() -> None:
    key = make_key("0123456789ab")
    assert read_id(key) == "0123456789ab"
    assert check_key(f" {key}\n") == key
    assert check_key("sk-another-server's") == "sk-another-server's"
    assert len({make_key("0" * 12) for _ in range(9)}) == 9
    for at in range(len(key)):  # one wrong character is found anywhere
        wrong = key[:at] + ("1" if key[at] == "0" else "0") + key[at + 1 :]
        assert read_id(wrong) == ""
    for wrong in (key[:-1], "", "two words", "schlüssel"):
        with pytest.raises(InputError, match="damaged or has a typing error") as caught:
            check_key(wrong)
        assert not wrong or wrong not in str(caught.value)


def test_the_file_has_digests_alone_and_is_its_owners(world: World) -> None:
    text = world.file.path.read_text()
    assert world.key not in text
    assert world.key.split("_")[2] not in text
    assert hash_key(world.key) in text
    assert stat.S_IMODE(world.file.path.stat().st_mode) == 0o600
    assert [path.name for path in world.file.path.parent.iterdir()] == ["keys.json"]


def test_rotation_and_revocation(world: World) -> None:
    inode = world.file.path.stat().st_ino
    second = world.file.rotate("team", timedelta(hours=24))
    assert world.file.path.stat().st_ino != inode, "the file was written over"
    assert read_id(second) == read_id(world.key)
    ring = world.ring()

    def are_valid() -> list[bool]:
        return [ring.find("1.2.3.4", [bearer(key)]).is_known for key in (world.key, second)]

    assert are_valid() == [True, True]
    world.now += timedelta(hours=24)
    assert are_valid() == [False, True]
    world.file.rotate("team", timedelta(0))
    assert len(world.file.read()[0].secrets) == 1, "what has expired is removed"
    world.file.revoke("team")
    assert world.file.read() == []


def test_a_rotated_key_is_valid_for_as_long_as_the_last_one(world: World) -> None:
    world.file.new("month", span=timedelta(days=30))
    world.now += timedelta(days=10)
    world.file.rotate("month", timedelta(days=90))
    old, new = world.file.read()[1].secrets
    assert (old.expires, new.expires) == (NOW + timedelta(days=30), NOW + timedelta(days=40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.new("team"), "has a key team already. Replace it: shoal keys rotate team --file /"),
        (lambda f: f.new("two words"), "'two words' is not a name"),
        (lambda f: f.new("a", models=["a b"]), "--models 'a b' is not a pattern"),
        (lambda f: f.new("a", may=["infre"]), "--may 'infre' is not known. Did you mean"),
        (lambda f: f.new("a", span=timedelta(0)), "--expires 0 makes a key that is never valid"),
        (lambda f: f.revoke("tame"), "has no key 'tame'. Did you mean"),
        (lambda f: f.rotate("tame", timedelta(1)), "has no key 'tame'"),
        (lambda _: read_span("--overlap", "24"), "--overlap '24' is not a time. Give a number and s, m, h or d"),
        (lambda f: KeyFile(f.path.with_name("x")).revoke("team"), "There is no file"),
        (lambda f: KeyFile(f.path.parent).read(), "cannot be read: Is a directory"),
    ],
)
def test_wrong_changes_are_refused(change: Callable[[KeyFile], Any], message: str, world: World) -> None:
    before = world.file.path.read_bytes()
    with pytest.raises(ShoalError, match=message.replace("?", r"\?")):
        change(world.file)
    assert world.file.path.read_bytes() == before


DAMAGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "name twice": (lambda d: d["keys"].append({**d["keys"][0], "id": "0" * 12}), "the name team twice"),
    "id twice": (lambda d: d["keys"].append({**d["keys"][0], "name": "b"}), "it has the id"),
    "unknown field": (
        lambda d: d["keys"][0].update(limit=3),
        "the key.* has an unknown field 'limit'|a key has an unknown",
    ),
    "unknown top": (lambda d: d.update(more=1), "unknown field 'more'"),
    "missing": (lambda d: d["keys"][0].pop("may"), "lacks the field 'may'"),
    "act": (lambda d: d["keys"][0].update(may=["all"]), "may something else than infer, list, metrics"),
    "pattern": (lambda d: d["keys"][0].update(models=[1]), "wrong name, id, or pattern"),
    "no secret": (lambda d: d["keys"][0].update(secrets=[]), "no secret"),
    "digest": (lambda d: d["keys"][0]["secrets"][0].update(sha256="x"), "wrong digest"),
    "time": (lambda d: d["keys"][0]["secrets"][0].update(expires="tomorrow"), "the time 'tomorrow'"),
    "local time": (lambda d: d["keys"][0]["secrets"][0].update(expires="2027-01-01T00:00:00"), "which is not like"),
    "type": (lambda d: d["keys"][0].update(name=3), "wrong 'name'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str, world: World) -> None:
    change, message = DAMAGED[name]
    edit(world.file.path, change)
    with pytest.raises(ArtifactError, match=message):
        world.ring()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"keys": [', "it is not JSON to its end"), ("", "it is not JSON"), ("[]", "the file is not an object"),
        ('{"keys": [], "keys": []}', "it has a field twice"), ('{"keys": [7]}', "a key is not an object"),
    ],
)  # fmt: skip
def test_half_a_file_is_refused(text: str, message: str, world: World) -> None:
    world.file.path.write_text(text)
    with pytest.raises(ArtifactError, match=f"is not a file of keys: {message}"):
        world.ring()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_can_read_is_refused(mode: int, world: World) -> None:
    world.file.path.chmod(mode)
    with pytest.raises(InputError, match=rf"mode {mode:04o}\)\. chmod 600"):
        world.ring()


# --- the door --------------------------------------------------------------------------------------------------------


class FakeContext:
    """A gRPC call with some ``authorization`` entries."""

    def __init__(self, given: list[str]) -> None:
        self._given, self.ended = given, ("", "")

    def peer(self) -> str:
        return "ipv4:10.0.0.9:4711"

    def invocation_metadata(self) -> Any:
        return tuple(("authorization", value) for value in self._given)

    def set_trailing_metadata(self, found: Any) -> None:
        self.trailing = dict(found)

    async def abort(self, code: Any, words: str) -> None:
        self.ended = code.name, words
        raise asyncio.CancelledError

    async def read(self) -> bytes:
        return b""

    def done(self) -> bool:
        return False


async def ask_http(gate: Gate, routes: Any, path: str, method: str, given: list[str]) -> web.Response:
    from aiohttp.test_utils import make_mocked_request
    from multidict import CIMultiDict

    from shoal.serving.gateway.http.routes import HttpRoutes

    app = HttpRoutes(gate, routes, lambda _: AssertionError()).app  # type: ignore[arg-type,return-value]
    request = make_mocked_request(method, path, CIMultiDict([("Authorization", value) for value in given]))
    return await (await app.router.resolve(request)).handler(request)  # type: ignore[return-value]


def test_every_route_refuses_every_bad_key_in_the_same_words(world: World, caplog: pytest.LogCaptureFixture) -> None:
    given, ring = bad_keys(world), world.ring()

    async def work() -> None:
        gate = make_gate()
        gate.callers.keys = ring
        said, num_open = set(), 0
        for routes in (HttpFront(gate, {}).routes, ApiFront(gate, {}, {}).routes, Health(gate, {}).routes):
            for route in routes:
                if "[\\s\\S]" in route.path:  # what other servers have
                    continue
                for values in given:
                    method = route.method.split(",")[0]
                    response = await ask_http(gate, routes, make_path(route.path), method, values)
                    if route.scope is Scope.OPEN:
                        assert response.status == 200, (route, values)
                        assert "plain" not in str(response.text), "models are not for everybody"
                        num_open += 1
                        continue
                    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer"), (route, values)
                    error = json.loads(str(response.text))["error"]
                    said.add(error if isinstance(error, str) else error["message"])
        front = GrpcFront(gate, {})
        scopes = {route.path: route.scope for route in (*front.routes, front._stream_route)}
        for path in (*scopes, "/made.Up/Method"):
            for values in given:
                context = FakeContext(values)
                handler = front.service(SimpleNamespace(method=path))
                answering = (handler.stream_unary or handler.stream_stream)(None, context)
                if scopes.get(path) is Scope.OPEN:
                    await answering
                    num_open += 1
                    continue
                with pytest.raises(asyncio.CancelledError):
                    await answering
                assert context.ended[0] == "UNAUTHENTICATED", (path, values)
                said.add(context.ended[1])
        assert said == {"A valid key is needed: Authorization: Bearer KEY"}
        assert num_open == 10 * len(given)

    run(work())
    assert world.key not in caplog.text
    assert "shoal_" not in caplog.text


@pytest.mark.parametrize(
    ("may", "allowed"),
    [
        (["infer"], {Scope.OPEN, Scope.HEALTH, Scope.INFER}),
        (["list"], {Scope.OPEN, Scope.HEALTH, Scope.READ}),
        (["metrics"], {Scope.OPEN, Scope.HEALTH, Scope.METRICS}),
    ],
)
def test_a_key_may_do_what_it_was_made_for(may: list[str], allowed: set[Scope], world: World) -> None:
    key = world.file.new("narrow", ["pl*"], may)
    caller = world.ring().find("1.2.3.4", [f"bearer {key}"])
    assert (caller.id, caller.scopes, caller.models) == (read_id(key), frozenset(allowed), frozenset({"plain"}))
    assert key.split("_")[2] not in repr(caller)
    assert caller.digest not in repr(caller)

    async def work() -> None:
        gate = make_gate()
        gate.callers.keys = world.ring()
        for routes in (HttpFront(gate, {}).routes, ApiFront(gate, {}, {}).routes, Health(gate, {}).routes):
            for route in routes:
                if route.scope not in allowed:
                    response = await ask_http(
                        gate, routes, make_path(route.path), route.method.split(",")[0], [bearer(key)]
                    )
                    assert response.status == 403, route
                    assert f"needs the right {route.scope.value}" in str(response.text)

    run(work())


@pytest.mark.parametrize("path", ["/v2/models/both/infer", "/v2/models/unheard/infer", "/v2/models/llm/infer"])
def test_other_models_are_closed_whether_they_exist_or_not(path: str, world: World) -> None:
    key = world.file.new("narrow", ["plain"])

    async def work() -> None:
        gate = make_gate()
        gate.callers.keys = world.ring()
        response = await ask_http(gate, HttpFront(gate, {}).routes, path, "POST", [bearer(key)])
        assert response.status == 403
        model = path.split("/")[3]
        assert json.loads(str(response.text))["error"] == f"This key is not for the model '{model}'. Models: plain."

    run(work())


def test_without_keys_the_header_is_not_looked_at() -> None:
    async def work() -> None:
        gate = make_gate()
        routes = HttpFront(gate, {}).routes
        assert (await ask(routes, "GET", "/v2/health/live", gate, Authorization="Basic x")).status == 200
        assert gate.callers.find("1.2.3.4", (), ["Basic x"]).is_known

    run(work())


def test_a_key_that_is_revoked_during_a_request_gets_no_answer(world: World) -> None:
    async def work() -> None:
        gate = make_gate()
        gate.callers.keys = ring = world.ring()

        async def answer(*_: Any) -> web.Response:
            world.file.revoke("team")
            await ring.look()
            return web.Response(text="secret")

        routes = [Route("Slow", Scope.READ, "/slow", answer, "GET")]
        response = await ask_http(gate, routes, "/slow", "GET", [bearer(world.key)])
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert response.text == '{"error": "A valid key is needed: Authorization: Bearer KEY"}'

    run(work())


# --- following the file ----------------------------------------------------------------------------------------------


def test_the_file_is_followed_and_what_a_revoked_key_has_open_ends(world: World) -> None:
    other = world.file.new("other")

    async def work() -> None:
        gate = make_gate()
        ring = gate.callers.keys = world.ring()
        following = asyncio.create_task(ring.follow(gate.callers.end_invalid))
        callers = [gate.callers.find("1.2.3.4", (), [bearer(key)]) for key in (world.key, other)]
        ended = list[str]()
        with (
            gate.callers.watch(callers[0], lambda: ended.append("team")),
            gate.callers.watch(callers[1], lambda: ended.append("other")),
        ):
            await asyncio.sleep(5)
            assert ended == []
            world.file.revoke("team")
            await asyncio.sleep(2)
            assert ended == ["team"]
            assert not gate.callers.find("1.2.3.4", (), [bearer(world.key)]).is_known
            world.file.rotate("other", timedelta(minutes=1))
            await asyncio.sleep(2)
            assert ended == ["team"]
            world.now += timedelta(minutes=1)  # the old secret expires
            await asyncio.sleep(2)
            assert ended == ["team", "other"]
        assert not gate.callers._watched
        following.cancel()

    run(work())


@pytest.mark.parametrize("way", ["half", "removed", "readable"])
def test_a_damaged_file_leaves_the_keys_and_is_told_each_minute(
    way: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    path, text = world.file.path, world.file.path.read_bytes()
    damage: dict[str, Callable[[], Any]] = {
        "half": lambda: path.write_bytes(text[:50]),
        "removed": path.unlink,
        "readable": lambda: path.chmod(0o644),
    }

    async def work() -> None:
        gate = make_gate()
        ring = gate.callers.keys = world.ring()
        health = Health(gate, {})

        async def look(seconds: int) -> None:
            for _ in range(seconds):
                world.now += timedelta(seconds=1)
                await ring.look()

        damage[way]()
        await look(2)
        assert "shoal_keys_damaged 1.0" in health._own()
        assert ring.find("1.2.3.4", [bearer(world.key)]).is_known
        await look(150)
        told = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 3
        assert "The keys stay as they were" in told[0].getMessage()
        path.write_bytes(text)
        path.chmod(0o600)
        await look(2)
        assert "shoal_keys_damaged 0.0" in health._own()

    run(work())


def test_a_pattern_without_a_model_is_warned_of(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.file.new("typo", ["plane*"])
    world.ring()
    assert "The key typo may use plane*, and no model has such a name." in caplog.text


# --- clients -------------------------------------------------------------------------------------------------------


def test_a_client_says_what_to_give() -> None:
    call, server = Call(Method.INFER, "m", {}), Peer("here:1", "grpc", 1.0)
    for failure in (grpc_failure("UNAUTHENTICATED", "A valid key is needed"), http_failure(401, b"{}")):
        assert "wants a key" in str(explain(failure, call, server))
        assert "--api-key-file FILE, or SHOAL_API_KEY; in Python api_key=..." in str(explain(failure, call, server))
    closed = explain(grpc_failure("PERMISSION_DENIED", "This key is not for the model 'a'."), call, server)
    assert str(closed) == "The server at here:1 does not allow this: This key is not for the model 'a'."
    with pytest.raises(InputError, match="damaged or has a typing error"):
        Client(api_key="shoal_wrong")
    with Client(api_key=make_key("0" * 12)) as client:
        assert "shoal_" not in repr(client._options)
