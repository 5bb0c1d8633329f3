"""Web pages of other machines do not reach a service on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from shoal.serving.gateway.http.listener import PageGuard
from shoal.serving.gateway.http.routes import find_status
from shoal.serving.gateway.refusals import RefusedError

OURS = "Host", "127.0.0.1:8000"


def ask(
    headers: Sequence[tuple[str, str]], method: str = "GET", path: str = "/v2", allowed: Sequence[str] = ()
) -> tuple[int, str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="answered")

    async def run() -> web.StreamResponse:
        return await PageGuard(allowed)(make_mocked_request(method, path, CIMultiDict(headers)), answer)

    try:
        response = asyncio.run(run())
    except RefusedError as refused:
        return find_status(refused), refused.client_message
    assert isinstance(response, web.Response)
    return response.status, str(response.text)


@pytest.mark.parametrize(
    "headers",
    [
        [OURS], [("Host", "localhost")], [("Host", "LOCALHOST:1")], [("Host", "[::1]:8000")], [("Host", "127.8.9.1")],
        [OURS, ("Origin", "http://localhost:8000")], [OURS, ("Origin", "http://127.0.0.1:3000")],
        [OURS, ("Sec-Fetch-Site", "same-origin")], [OURS, ("Sec-Fetch-Site", "none")],
        [OURS, ("Content-Type", "application/x-www-form-urlencoded")],
    ],
)  # fmt: skip
def test_who_is_on_this_machine_is_answered(headers: list[tuple[str, str]]) -> None:
    assert ask(headers) == (200, "answered")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ([("Host", "evil.example")], "Host 'evil.example'"),
        ([("Host", "evil.example:8000")], "Host"),
        ([("Host", "localhost.evil.example")], "Host"),
        ([("Host", "127.0.0.1.evil.example")], "Host"),
        ([("Host", "localhost@evil.example")], "Host"),
        ([("Host", "me@localhost")], "Host"),
        ([("Host", "localhost/x")], "Host"),
        ([("Host", "localhost?x")], "Host"),
        ([("Host", "10.0.0.1")], "Host"),
        ([("Host", "0.0.0.0:8000")], "Host"),
        ([("Host", "")], "Host"),
        ([OURS, OURS], "Host '127.0.0.1:8000, 127.0.0.1:8000'"),
        ([OURS, ("Host", "evil.example")], "Host"),
        ([OURS, ("Origin", "http://evil.example")], "Origin 'http://evil.example'"),
        ([OURS, ("Origin", "null")], "Origin 'null'"),
        ([OURS, ("Origin", "http://localhost.evil.example")], "Origin"),
        ([OURS, ("Origin", "http://localhost:8000@evil.example")], "Origin"),
        ([OURS, ("Origin", "file://")], "Origin"),
        ([OURS, ("Origin", "http://localhost"), ("Origin", "http://evil.example")], "Origin"),
        ([OURS, ("Sec-Fetch-Site", "cross-site")], "Origin"),
        ([OURS, ("Origin", "http://localhost"), ("Sec-Fetch-Site", "Cross-Site")], "Origin"),
    ],
)
def test_foreign_pages_are_refused(headers: list[tuple[str, str]], what: str, method: str) -> None:
    status, text = ask(headers, method)
    assert status == 403
    assert text.startswith(what)


def test_a_foreign_name_in_the_target_is_refused() -> None:
    assert ask([OURS], path="http://evil.example/v2")[0] == 403
    assert ask([("Host", "localhost")], path="http://localhost/v2")[0] == 200


def test_a_host_that_is_allowed() -> None:
    for host in ("gpu-1.example", "GPU-1.example:8000", "gpu-1.example."):
        assert ask([("Host", host), ("Origin", f"https://{host}")], allowed=["Gpu-1.example"])[0] == 200
    for host in ("gpu-2.example", "x.gpu-1.example", "gpu-1.example/x", "gpu-1.example?", "gpu-1.example#"):
        assert ask([("Host", host)], allowed=["gpu-1.example"])[0] == 403
    assert ask([("Host", "gpu-1.example"), ("Origin", "http://evil.example")], allowed=["gpu-1.example"])[0] == 403
