"""Web pages of another origin: which may read answers, and that their browsers' questions need no key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shoal.errors import InputError
from shoal.gateway.options import Options
from shoal.gateway.v2.http_front import HttpFront
from tests.unit.test_gateway_routes import make_gate
from tests.unit.test_keys import World, bearer

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
        async with TestClient(TestServer(HttpFront(gate, {}, cors=cors).app)) as client:
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


@pytest.mark.parametrize("origin", ["*", "app.example.com", f"{PAGE}/", f"{PAGE}/page", "null", f"{PAGE} {PAGE}"])
def test_what_is_not_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(InputError, match=r"is not an origin\. Give one: https://app\.example\.com"):
        Options(cors=origin, is_open=True)


def test_without_keys_pages_are_refused_anyway(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--cors has no effect without --keys"):
        Options(cors=PAGE)
    assert Options(cors=PAGE, keys=tmp_path).cors == PAGE
    assert Options(cors="http://a:80", is_open=True).cors == "http://a:80"
