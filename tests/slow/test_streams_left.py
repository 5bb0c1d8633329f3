"""Clients that leave in the middle of a stream, by each of the four ways to a service.

Not to Triton itself: 24.10 can crash when a stream is abandoned.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.client import Client
from shoal.errors import InputError, ServerError
from tests.support.counts import write_counts
from tests.support.service import Service
from tests.support.ways import WAYS, Relay, connect, numbers, url_of, wait_for

_BASES = itertools.count(1000, 1000)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("counts")
    write_counts(folder / "repository")
    with Service(folder / "repository", folder / "log") as service:
        yield SimpleNamespace(grpc_url=service.grpc, http_url=service.http)


@pytest.fixture
def ask(way: str, server: Any) -> Iterator[Any]:
    with connect(way, url_of(server, way)) as client:
        yield client


def num_left(client: Any, base: int, model: str = "counts") -> int:
    """Return the number of clients with this BASE that the model has seen leave; each test has its own BASE."""
    (answer,) = list(client.stream(model, COUNT=[-1], BASE=[base]))
    return int(answer["TEXT"].item())


def own_base() -> int:
    return next(_BASES)


def test_a_caller_that_does_not_read_holds_nothing(ask: Any) -> None:
    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    replies = ask.stream("counts", COUNT=[100], SIZE=[2**20])
    next(replies)
    before = memory()
    time.sleep(0.3)
    assert numbers([next(replies) for _ in range(3)]) == [1, 2, 3]
    assert memory() - before < 40 * 2**20, "of 100 MiB"
    replies.close()


def test_answers_that_come_late(ask: Any) -> None:
    start = time.monotonic()
    with pytest.raises(ServerError) as error:
        list(ask.stream("counts", COUNT=[2], FIRST=[9.0], timeout=0.2))
    assert str(error.value) == f"The server at {ask.url} did not answer within 0.2 s. Give it longer: timeout=0.4"
    replies = ask.stream("counts", COUNT=[2], FIRST=[0.3], DELAY=[9.0], timeout=5, between=0.2)
    next(replies)
    with pytest.raises(ServerError) as error:
        next(replies)
    assert (
        str(error.value) == f"The server at {ask.url} sent no further answer within 0.2 s. Give it longer: between=0.4"
    )
    assert time.monotonic() - start < 5
    slow = ask.stream("counts", COUNT=[2], between=0.5)
    next(slow)
    time.sleep(0.8)
    assert numbers(slow) == [1], "the caller's own time does not count"


def test_connections_that_break(server: Any, way: str) -> None:
    relay = Relay(url_of(server, way))
    with relay, connect(way, relay.url, retries=0) as client:
        replies = client.stream("counts", COUNT=[100], DELAY=[0.1])
        next(replies)
        relay.close()
        with pytest.raises(
            ServerError, match=f"^The connection to the server at {relay.url} broke during a stream .* ask "
        ):
            list(replies)
        with pytest.raises(ServerError, match=f"^No Triton answers at {relay.url}"):
            list(client.stream("counts", COUNT=[9]))


def test_the_model_sees_a_client_leave(ask: Any, way: str) -> None:
    base = own_base()
    replies = ask.stream("counts", COUNT=[500], DELAY=[0.02], BASE=[base])
    assert numbers([next(replies) for _ in range(5)]) == list(range(base, base + 5))
    replies.close()
    start = time.monotonic()
    wait_for(lambda: num_left(ask, base) == 1)
    assert time.monotonic() - start < 2
    assert list(replies) == []
    replies.close()
    for _ in ask.stream("counts", COUNT=[500], DELAY=[0.02], BASE=[base]):
        break
    if way.endswith("async"):
        gc.collect()
    wait_for(lambda: num_left(ask, base) == 2)
    at_last = ask.stream("counts", COUNT=[3])
    assert numbers([next(at_last) for _ in range(3)]) == [0, 1, 2]
    at_last.close()
    unread = ask.stream("counts", COUNT=[3])
    unread.close()
    assert list(unread) == []
    assert num_left(ask, base) == 2
    assert numbers(ask.stream("counts", COUNT=[3])) == [0, 1, 2]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("count", [0, 2])
def test_another_thread_may_cancel(server: Any, protocol: str, count: int) -> None:
    """Before the first answer, too. Over HTTP, Triton 24.10 notices that when it sends one."""
    with Client(url_of(server, protocol), protocol=protocol) as client:
        base, start = own_base(), time.monotonic()
        first, delay = (0, 0.5) if count else (0.5, 0.1)
        with client.stream("counts", COUNT=[9], FIRST=[first], DELAY=[delay], BASE=[base]) as replies:
            timer = threading.Timer(0.2, replies.cancel)
            timer.start()
            assert len(list(replies)) == (1 if count else 0)
            assert time.monotonic() - start < 0.45
            timer.join()
        wait_for(lambda: num_left(client, base) == 1)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tasks_may_cancel(server: Any, protocol: str) -> None:
    base = own_base()

    async def run() -> None:
        async with AsyncClient(url_of(server, protocol), protocol=protocol) as client:

            async def left() -> int:
                replies = client.stream("counts", COUNT=[-1], BASE=[base])
                (number,) = [answer["NUMBER"].item() async for answer in replies]
                return int(number)

            async def read_for_a_while() -> None:
                async with (
                    asyncio.timeout(0.2),
                    client.stream("counts", COUNT=[9], DELAY=[0.5], BASE=[base]) as replies,
                ):
                    async for _ in replies:
                        pass

            replies = client.stream("counts", COUNT=[9], DELAY=[0.5], BASE=[base])
            asyncio.get_running_loop().call_later(0.2, replies.cancel)
            assert len([answer async for answer in replies]) == 1
            with pytest.raises(TimeoutError):
                await read_for_a_while()
            for _ in range(100):
                if await left() == 2:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError

    asyncio.run(run())


def test_a_closed_client_ends_its_streams(server: Any, way: str) -> None:
    with connect(way, url_of(server, way)) as client:
        replies = client.stream("counts", COUNT=[500], DELAY=[0.02])
        next(replies)
        client.close()
        with pytest.raises(InputError, match=r"^This client is closed\. Make another client\.$"):
            next(replies)


def test_an_interrupt_leaves(server: Any) -> None:
    command = [sys.executable, "-m", "shoal", "infer", "--stream", "--model", "tells", "--url", server.grpc_url]
    with Client(server.grpc_url) as client:
        running = subprocess.Popen(
            [*command, "COUNT=500", "DELAY=0.05"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        assert running.stdout is not None
        assert running.stdout.read(2) == b"0 "
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
        assert (running.returncode, said) == (130, b"")
        wait_for(lambda: num_left(client, 0, "tells") == 1)
