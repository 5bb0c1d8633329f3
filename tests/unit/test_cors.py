"""Web pages of another origin: which may read answers, and that their browsers' questions need no key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shoal.errors import InputError
from shoal.serving.gateway.callers.accounts import Account
from shoal.serving.gateway.callers.key_file import KeyLimits
from shoal.serving.gateway.fronts import make_app
from shoal.serving.gateway.options import Options
from shoal.serving.gateway.v2.http_front import HttpFront
from tests.support.gates import make_gate
from tests.support.keys import World, bearer

PAGE = "https://app.example.com"
OTHERS = ["https://app.example.com.evil.org", "https://APP.example.com", "http://app.example.com", "null", ""]


def test_pages_of_the_origin_alone_may_read_answers(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def look(cors: str, origin: str) -> list[tuple[int, str, str]]:
        """Return a preflight, a request without a key, and one with it: status, allowed origin and methods."""
        gate = make_gate()
        gate.callers.keys = world.ring()
        given = {"Origin": origin} if origin else {}
        asked = {**given, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with TestClient(TestServer(make_app(gate, HttpFront(gate, {}).routes, cors))) as client:
            replies = [
                await client.options("/v2/models/plain/infer", headers=asked),
                await client.post("/v2/models/plain/infer", headers=given),
                await client.get("/v2/models/unheard/ready", headers={**given, "Authorization": bearer(world.key)}),
            ]
        assert all(reply.headers.get("Vary", "") == ("Origin" if cors else "") for reply in replies)
        assert all(reply.headers["X-Request-Id"] for reply in replies)
        origin_, methods = "Access-Control-Allow-Origin", "Access-Control-Allow-Methods"
        return [(reply.status, reply.headers.get(origin_, ""), reply.headers.get(methods, "")) for reply in replies]

    assert asyncio.run(look(PAGE, PAGE)) == [(204, PAGE, "GET, POST"), (401, PAGE, ""), (400, PAGE, "")]
    for origin in OTHERS:
        assert asyncio.run(look(PAGE, origin)) == [(405, "", ""), (401, "", ""), (400, "", "")]
    assert asyncio.run(look("", PAGE)) == [(405, "", ""), (401, "", ""), (400, "", "")]


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("authorization,content-type,x-stainless-arch,x-stainless-lang", True),
        ("anthropic-version, x-api-key, anthropic-dangerous-direct-browser-access", True),
        ("openai-organization", True),
        ("", True),
        ("a\tb", False),
        ("x" * 65, False),
        (", ".join(["a"] * 65), False),
    ],
)
def test_pages_may_use_the_clients_of_others(asked: str, allowed: bool) -> None:
    """Those of OpenAI and Anthropic send headers of their own, and read what is left of a key's limits."""

    async def look() -> tuple[set[str], str, str]:
        async with TestClient(TestServer(make_app(gate := make_gate(), HttpFront(gate, {}).routes, PAGE))) as client:
            given = {"Origin": PAGE, "Access-Control-Request-Headers": asked}
            reply = await client.options("/v1/chat/completions", headers=given)
            plain = await client.options("/v1/chat/completions", headers={"Origin": PAGE})
        name = "Access-Control-Allow-Headers"
        names = {each.strip().lower() for each in reply.headers[name].split(",")}
        return names, plain.headers[name].lower(), reply.headers["Access-Control-Expose-Headers"].lower()

    names, usual, exposed = asyncio.run(look())
    wanted = {each.strip() for each in f"{usual},{asked if allowed and asked else ''}".split(",")} - {""}
    assert names == wanted
    limits = Account("a", KeyLimits(requests_per_minute=5, tokens_per_minute=5, at_once=5), lambda: 0.0).headers()
    assert {name for name, _ in limits} | {"x-request-id", "retry-after"} <= {*exposed.split(", ")}


@pytest.mark.parametrize("origin", ["*", "app.example.com", f"{PAGE}/", f"{PAGE}/page", "null", f"{PAGE} {PAGE}"])
def test_what_is_not_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(InputError, match=r"is not an origin\. Give one: https://app\.example\.com"):
        Options(cors=origin, is_open=True)


CLOSED = [
    "/v2/repository/models/plain/unload", "/v2/systemsharedmemory/status", "/v2/models/plain/trace/setting",
    "/v2/logging", "/v2/models/plain/load",
]  # fmt: skip


@pytest.mark.parametrize("path", CLOSED)
def test_closed_interfaces_ask_for_a_key(path: str, tmp_path: Path) -> None:
    """Without keys, and to a client with one, they say that they are closed."""
    world = World(tmp_path)

    async def look(keys: bool, key: str = "") -> tuple[int, str]:
        gate = make_gate()
        gate.callers.keys = world.ring() if keys else None
        async with TestClient(TestServer(make_app(gate, HttpFront(gate, {}).routes))) as client:
            reply = await client.post(path, headers={"Authorization": key} if key else {})
        return reply.status, reply.headers.get("WWW-Authenticate", "")

    assert asyncio.run(look(True)) == asyncio.run(look(True, "Bearer x")) == (401, "Bearer")
    assert asyncio.run(look(True, bearer(world.key))) == asyncio.run(look(False)) == (403, "")


def test_without_keys_pages_are_refused_anyway(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--cors has no effect without --keys"):
        Options(cors=PAGE)
    assert Options(cors=PAGE, keys=tmp_path).cors == PAGE
    assert Options(cors="http://a:80", is_open=True).cors == "http://a:80"
