"""Answers in pieces, by each of the four ways to a real server."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.client import Client
from shoal.errors import InputError
from shoal.serving.server.launch import Server, find_ports
from tests.support.commands import Shoal
from tests.support.ways import WAYS, Relay, connect, num_files, numbers, url_of, wait_for

DECOUPLED = r"^counts answers in pieces\. Use client\.stream\(\.\.\.\), on the command line: shoal infer --stream$"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(way: str, server: Server) -> Iterator[Any]:
    """A client of the shared server."""
    with connect(way, url_of(server, way)) as client:
        yield client


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 50])
def test_answers_come_in_order(ask: Any, count: int) -> None:
    answers = list(ask.stream("counts", COUNT=[count], SIZE=[0], request_id="mine"))
    assert [answer["NUMBER"].tolist() for answer in answers] == [[[number]] for number in range(count)]
    assert [answer["TEXT"].tolist() for answer in answers] == [[[b"%d" % number]] for number in range(count)]
    for answer in answers:
        assert list(answer) == ["NUMBER", "TEXT"]
        assert answer["NUMBER"].dtype == np.int32
        assert not answer["NUMBER"].flags.writeable
        assert (answer.model, answer.version, answer.request_id, answer.parameters) == ("counts", "1", "mine", {})


def test_some_outputs_may_be_asked_for(ask: Any) -> None:
    assert [list(answer) for answer in ask.stream("counts", {"COUNT": [2]}, outputs=["TEXT"])] == [["TEXT"], ["TEXT"]]
    with pytest.raises(InputError, match=r"There is no output NOPE\. Outputs: NUMBER, TEXT\."):
        list(ask.stream("counts", COUNT=[2], outputs=["NOPE"]))


def test_answers_arrive_one_by_one(ask: Any) -> None:
    start, came = time.monotonic(), []
    for _ in ask.stream("counts", COUNT=[4], DELAY=[0.2], parameters={"a": "x"}, timeout=0.5):
        came.append(time.monotonic() - start)
    assert came[0] < came[-1] - 0.4
    assert came[-1] > 0.55, "longer than the time-out, which counts to each answer"


def test_a_model_that_answers_once_gives_one(ask: Any) -> None:
    (answer,) = ask.stream("flat", {"A": [1.0, 2.0], "timeout": [3.0]})
    assert answer["Y"].tolist() == [1, 2, 3]
    assert [answer["Y"].tolist() for answer in ask.stream("slow", X=[0.0])] == [[[0]]]
    text = "Éva: 'a \"cat\" 😀'\n"
    whole = ask.infer("ensemble_all", excerpt=[text])
    (answer,) = ask.stream("ensemble_all", excerpt=[text])
    assert list(answer) == list(whole)
    assert all(np.allclose(answer[name], whole[name], rtol=1e-6) for name in whole)


def test_rows_and_shapes(ask: Any) -> None:
    """HTTP carries flat lists without shapes, which the declarations give back."""
    (row,) = ask.stream("cuml", input__0=np.eye(1, 207, dtype=np.float32))
    assert row["output__0"].shape == (1, 1)
    (rows,) = ask.stream("cuml", input__0=np.eye(2, 207, dtype=np.float32))
    assert rows["output__0"].shape == (2, 1)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_many_threads(server: Server, protocol: str) -> None:
    counts = [random.Random(0).randrange(12) for _ in range(200)]
    with Client(url_of(server, protocol), protocol=protocol) as client, ThreadPoolExecutor(64) as callers:
        before = num_files(), threading.active_count()
        got = callers.map(
            lambda at: numbers(client.stream("counts", COUNT=[counts[at]], BASE=[1000 * at])), range(len(counts))
        )
        assert list(got) == [[1000 * at + number for number in range(count)] for at, count in enumerate(counts)]
    wait_for(lambda: threading.active_count() <= before[1] and num_files() <= before[0])


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_many_in_a_loop(server: Server, protocol: str) -> None:
    counts = [random.Random(0).randrange(12) for _ in range(200)]

    async def run() -> list[list[int]]:
        limit = asyncio.Semaphore(64)
        async with AsyncClient(url_of(server, protocol), protocol=protocol) as client:

            async def one(at: int) -> list[int]:
                async with limit, client.stream("counts", COUNT=[counts[at]], BASE=[1000 * at]) as replies:
                    return [int(answer["NUMBER"].item()) async for answer in replies]

            return await asyncio.gather(*map(one, range(len(counts))))

    assert asyncio.run(run()) == [[1000 * at + number for number in range(count)] for at, count in enumerate(counts)]


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 3])
def test_errors_come_after_the_answers_before_them(ask: Any, at: int) -> None:
    replies = ask.stream("counts", COUNT=[3], FAIL=[at])
    assert numbers(next(replies) for _ in range(at)) == list(range(at))
    with pytest.raises(InputError, match=rf"^It failed at {at}\.$"):
        next(replies)
    assert list(replies) == [], "it is over"


def test_refused_streams(ask: Any, way: str) -> None:
    with pytest.raises(InputError, match=DECOUPLED):
        ask.infer("counts", COUNT=[1])
    for model, inputs, message in [
        ("counts", {"NOPE": [1]}, "There is no input NOPE. Inputs: COUNT"),
        ("counts", {}, "The input COUNT is missing"),
        ("nope", {"COUNT": [1]}, f"The server at {url} has no model nope" if (url := ask.url) else ""),
        ("slow", {"X": [[1.0, 2.0]]}, "Input X has shape"),
        ("counts", {"COUNT": [1] * 5}, "The request has 5 rows; "),
    ]:
        with pytest.raises(InputError, match=message):
            list(ask.stream(model, inputs))
    for option in ("timeout", "between"):
        with pytest.raises(InputError, match=f"^{option} is 0; it must be a number of seconds above 0"):
            list(ask.stream("counts", COUNT=[1], **{option: 0}))
    if way.startswith("grpc"):
        with pytest.raises(InputError, match=r"The request has 5 rows; counts takes at most 4\. Send them"):
            list(ask.stream("counts", COUNT=[1] * 5))


def test_a_server_that_comes_late_is_waited_for(server: Server, way: str) -> None:
    with connect(way, url_of(server, way)) as known:
        known.describe("counts")
        described = dict(known._flows._described)
    port = find_ports(0, 0, 0)[0]
    relays: list[Relay] = []
    timer = threading.Timer(0.4, lambda: relays.append(Relay(url_of(server, way), port)))
    timer.start()
    try:
        with connect(way, f"127.0.0.1:{port}", retries=10, timeout=10) as client:
            client._flows._described.update(described)  # so that the stream is what finds no server
            assert numbers(client.stream("counts", COUNT=[3])) == [0, 1, 2]
    finally:
        timer.join()
        relays[0].close()


# --- the command line --------------------------------------------------------------------------------------------


def test_infer_prints_answers_as_they_come(shoal: Shoal, server: Server) -> None:
    command = ["infer", "--stream", "--model", "tells", "COUNT=3", "--url"]
    assert shoal(*command, server.grpc_url) == "0 1 2 \n"
    assert shoal(*command, server.http_url, "--protocol", "http", "--json").splitlines() == [
        '{"text": "0 "}', '{"text": "1 "}', '{"text": "2 "}'
    ]  # fmt: skip
    lines = shoal("infer", "--stream", "--model", "counts", "COUNT=2", "--url", server.grpc_url, "--set", "SIZE=0")
    assert [json.loads(line) for line in lines.splitlines()] == [{"number": 0, "text": "0"}, {"number": 1, "text": "1"}]
    for arguments, message in [
        (("COUNT=2", "FAIL=1"), r"It failed at 1\."),
        (("COUNT=[1,2]",), "--stream takes one row; there are 2"),
        ((), "--stream takes one row"),
        (("COUNT=2", "--output", "a.csv"), "--stream and --output exclude each other"),
        (("--input", "a.csv"), "--stream and --input exclude each other"),
        (("COUNT=2", "--curl"), "--stream and --curl exclude each other"),
    ]:
        with pytest.raises(InputError, match=message):
            shoal("infer", "--stream", "--model", "counts", "--url", server.grpc_url, *arguments)
