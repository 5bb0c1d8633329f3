"""Answers in pieces, by each of the four ways to a real server."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.client.aio import AsyncClient
from shoal.client.client import Client
from shoal.errors import InputError, ServerError
from shoal.server.launch import Server, find_ports
from tests.served.test_client import num_files
from tests.support.commands import Shoal
from tests.support.ways import WAYS, Relay, connect, url_of

DECOUPLED = r"^counts answers in pieces\. Use client\.stream\(\.\.\.\), on the command line: shoal infer --stream$"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(way: str, server: Server) -> Iterator[Any]:
    """A client of the shared server."""
    with connect(way, url_of(server, way)) as client:
        yield client


def numbers(replies: Any) -> list[int]:
    return [int(answer["NUMBER"].item()) for answer in replies]


def num_left(client: Any, model: str = "counts") -> int:
    """How many clients the model has seen leave."""
    (answer,) = client.stream(model, COUNT=[-1])
    return int(answer["TEXT"].item())


def wait_for(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


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


def test_each_answer_comes_as_it_is_made(ask: Any) -> None:
    start, came = time.monotonic(), []
    for _ in ask.stream("counts", COUNT=[4], DELAY=[0.2], parameters={"a": "x"}, timeout=0.5):
        came.append(time.monotonic() - start)
    assert came[0] < 0.2
    assert 0.55 < came[-1] < 1.5, "longer than the time-out, which counts to each answer"


def test_a_model_that_answers_once_gives_one(ask: Any) -> None:
    (answer,) = ask.stream("flat", {"A": [1.0, 2.0], "timeout": [3.0]})
    assert answer["Y"].tolist() == [1, 2, 3]
    assert [answer["Y"].tolist() for answer in ask.stream("slow", X=[0.0])] == [[[0]]]
    text = "Éva: 'a \"cat\" 😀'\n"
    whole = ask.infer("ensemble_all", excerpt=[text])
    (answer,) = ask.stream("ensemble_all", excerpt=[text])
    assert list(answer) == list(whole)
    assert all(np.allclose(answer[name], whole[name], rtol=1e-6) for name in whole)


def test_rows_and_shapes(ask: Any, way: str) -> None:
    """HTTP carries flat lists, without shapes."""
    (row,) = ask.stream("cuml", input__0=np.eye(1, 207, dtype=np.float32))
    assert row["output__0"].shape == (1, 1)
    if way.startswith("grpc"):
        (rows,) = ask.stream("cuml", input__0=np.eye(2, 207, dtype=np.float32))
        assert rows["output__0"].shape == (2, 1)
    else:
        with pytest.raises(InputError, match=r"The request has 2 rows; a stream over HTTP takes one\. Use gRPC"):
            list(ask.stream("cuml", input__0=np.eye(2, 207, dtype=np.float32)))


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


def test_a_caller_that_does_not_read_holds_nothing(ask: Any) -> None:
    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    replies = ask.stream("counts", COUNT=[100], SIZE=[2**20])
    next(replies)
    before = memory()
    time.sleep(0.3)
    assert numbers([next(replies) for _ in range(3)]) == [1, 2, 3]
    assert memory() - before < 40 * 2**20, "of 100 MiB"
    assert numbers(replies) == list(range(4, 100))


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 3])
def test_errors_come_after_the_answers_before_them(ask: Any, at: int) -> None:
    replies = ask.stream("counts", COUNT=[3], FAIL=[at])
    assert numbers(next(replies) for _ in range(at)) == list(range(at))
    with pytest.raises(InputError, match=rf"^It failed at {at}\.$"):
        next(replies)
    assert list(replies) == [], "it is over"


def test_what_is_refused(ask: Any, way: str) -> None:
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


def test_answers_that_come_late(ask: Any) -> None:
    start = time.monotonic()
    with pytest.raises(ServerError) as error:
        list(ask.stream("counts", COUNT=[2], FIRST=[1.0], timeout=0.2))
    assert str(error.value) == f"The server at {ask.url} did not answer within 0.2 s. Give it longer: timeout=0.4"
    replies = ask.stream("counts", COUNT=[2], FIRST=[0.3], DELAY=[1.0], timeout=5, between=0.2)
    next(replies)
    with pytest.raises(ServerError) as error:
        next(replies)
    assert (
        str(error.value) == f"The server at {ask.url} sent no further answer within 0.2 s. Give it longer: between=0.4"
    )
    assert time.monotonic() - start < 2
    slow = ask.stream("counts", COUNT=[2], between=0.1)
    next(slow)
    time.sleep(0.3)
    assert numbers(slow) == [1], "the caller's own time does not count"


def test_connections_that_break(server: Server, way: str) -> None:
    relay = Relay(url_of(server, way))
    with relay, connect(way, relay.url, retries=0) as client:
        replies = client.stream("counts", COUNT=[9], DELAY=[0.1])
        next(replies)
        relay.close()
        with pytest.raises(
            ServerError, match=f"^The server at {relay.url} went away in the middle of a stream .* ask "
        ):
            list(replies)
        with pytest.raises(ServerError, match=f"^No Triton answers at {relay.url}"):
            list(client.stream("counts", COUNT=[9]))


def test_a_server_that_comes_late_is_waited_for(server: Server, way: str) -> None:
    with connect(way, url_of(server, way)) as known:
        known.inputs("counts")
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


# --- leaving -----------------------------------------------------------------------------------------------------


def test_the_model_sees_a_client_leave(ask: Any, way: str) -> None:
    before = num_left(ask)
    replies = ask.stream("counts", COUNT=[500], DELAY=[0.02])
    assert numbers([next(replies) for _ in range(5)]) == list(range(5))
    replies.close()
    start = time.monotonic()
    wait_for(lambda: num_left(ask) == before + 1)
    assert time.monotonic() - start < 0.5
    assert list(replies) == []
    replies.close()
    for _ in ask.stream("counts", COUNT=[500], DELAY=[0.02]):
        break
    if way.endswith("async"):
        gc.collect()
    wait_for(lambda: num_left(ask) == before + 2)
    at_last = ask.stream("counts", COUNT=[3])
    assert numbers([next(at_last) for _ in range(3)]) == [0, 1, 2]
    at_last.close()
    unread = ask.stream("counts", COUNT=[3])
    unread.close()
    assert list(unread) == []
    assert num_left(ask) == before + 2
    assert numbers(ask.stream("counts", COUNT=[3])) == [0, 1, 2]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("count", [0, 2])
def test_another_thread_may_cancel(server: Server, protocol: str, count: int) -> None:
    """Before the first answer, too. Over HTTP, Triton 24.10 notices that when it sends one."""
    with Client(url_of(server, protocol), protocol=protocol) as client:
        before, start = num_left(client), time.monotonic()
        with client.stream("counts", COUNT=[9], FIRST=[0 if count else 0.5], DELAY=[0.5 if count else 0.1]) as replies:
            timer = threading.Timer(0.2, replies.cancel)
            timer.start()
            assert len(list(replies)) == (1 if count else 0)
            assert time.monotonic() - start < 0.45
            timer.join()
        wait_for(lambda: num_left(client) == before + 1)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tasks_may_cancel(server: Server, protocol: str) -> None:
    async def run() -> None:
        async with AsyncClient(url_of(server, protocol), protocol=protocol) as client:

            async def left() -> int:
                (number,) = [answer["NUMBER"].item() async for answer in client.stream("counts", COUNT=[-1])]
                return int(number)

            async def read_for_a_while() -> None:
                async with asyncio.timeout(0.2), client.stream("counts", COUNT=[9], DELAY=[0.5]) as replies:
                    async for _ in replies:
                        pass

            before = await left()
            replies = client.stream("counts", COUNT=[9], DELAY=[0.5])
            asyncio.get_running_loop().call_later(0.2, replies.cancel)
            assert len([answer async for answer in replies]) == 1
            with pytest.raises(TimeoutError):
                await read_for_a_while()
            for _ in range(100):
                if await left() == before + 2:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError

    asyncio.run(run())


def test_a_closed_client_ends_its_streams(server: Server, way: str) -> None:
    with connect(way, url_of(server, way)) as client:
        replies = client.stream("counts", COUNT=[500], DELAY=[0.02])
        next(replies)
        client.close()
        with pytest.raises(InputError, match=r"^This client is closed\. Make another\.$"):
            next(replies)


# --- the command line --------------------------------------------------------------------------------------------


def test_infer_prints_answers_as_they_come(shoal: Shoal, server: Server) -> None:
    told = ["infer", "--stream", "--model", "tells", "COUNT=3", "--url"]
    assert shoal(*told, server.grpc_url) == "0 1 2 \n"
    assert shoal(*told, server.http_url, "--protocol", "http", "--json").splitlines() == [
        '{"text": "0 "}', '{"text": "1 "}', '{"text": "2 "}'
    ]  # fmt: skip
    lines = shoal("infer", "--stream", "--model", "counts", "COUNT=2", "--url", server.grpc_url, "--set", "SIZE=0")
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"number": 0, "text": "0"},
        {"number": 1, "text": "1"},
    ]
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


def test_an_interrupt_leaves(server: Server) -> None:
    command = [sys.executable, "-m", "shoal", "infer", "--stream", "--model", "tells", "--url", server.grpc_url]
    with Client(server.grpc_url) as client:
        before = num_left(client, "tells")
        running = subprocess.Popen(
            [*command, "COUNT=500", "DELAY=0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert running.stdout is not None
        assert running.stdout.read(2) == b"0 "
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=10)
        assert (running.returncode, said) == (130, b"")
        wait_for(lambda: num_left(client, "tells") == before + 1)
