"""Answers in pieces: the same in Triton (alone, in an ensemble, through BLS), in this process and under the fake."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.clients.client.client import Client
from shoal.errors import ShoalError
from shoal.serving.server.launch import Server
from tests.conftest import Record, Scale
from tests.support.counting import write_counting
from tests.support.service import Service
from tests.support.streams import MODELS, ask, expected


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counting(tmp_path_factory.mktemp("counting") / "repository")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with shoal.serve(repository) as running:
        yield running


@pytest.fixture(scope="module")
def service(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(repository, tmp_path_factory.mktemp("service") / "log") as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def client(server: Server, service: Service, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Triton itself over gRPC; over HTTP, where Triton 24.10 loses answers, the service."""
    url = server.grpc_url if request.param == "grpc" else service.http
    with Client(url, protocol=request.param) as found:
        yield found


@pytest.mark.parametrize("model", MODELS)
def test_every_host_gives_the_same_answers(model: str, client: Client, repository: Path, scale: Scale) -> None:
    output, _ = MODELS[model]
    counts = random.Random(0).choices(range(51), k=scale(80, 200))

    def read(answers: Any) -> list[int]:
        return [answer[output].item() for answer in answers]

    with ThreadPoolExecutor(64) as callers, shoal.load(repository / model) as pipeline:
        right = [expected(model, count) for count in counts]
        assert list(callers.map(lambda count: read(client.stream(model, ask(count))), counts)) == right
        assert list(callers.map(lambda count: read(pipeline.stream(**ask(count))), counts)) == right


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("given", "words"), [("FAIL_AT", "It failed at 3."), ("WRONG_AT", "Output NUMBER has shape")])
def test_an_error_after_answers(given: str, words: str, model: str, client: Client) -> None:
    output, first = MODELS[model]
    found: list[int] = []
    start = time.monotonic()
    answers = client.stream(model, ask(9, DELAY=0.02, **{given: 3}))
    with pytest.raises(ShoalError, match=words):
        found.extend(answer[output].item() for answer in answers)
    assert time.monotonic() - start < 5
    assert found == list(range(first, first + 3))
    assert len(list(client.stream(model, ask(4)))) == len(expected(model, 4))


def test_time_per_answer(server: Server, scale: Scale, record: Record) -> None:
    """Milliseconds per answer at 16 streams, in turns."""
    count, rounds = scale(100, 1000), scale(1, 5)
    cost: dict[str, list[float]] = {model: [] for model in MODELS}
    with Client(server.grpc_url) as client, ThreadPoolExecutor(16) as callers:
        for _ in range(rounds):
            for model, costs in cost.items():
                start = time.perf_counter()
                answers = list(callers.map(lambda _, m=model: len(list(client.stream(m, ask(count)))), range(16)))
                assert answers == [len(expected(model, count))] * 16
                costs.append((time.perf_counter() - start) * 1000 / sum(answers))
    median = {model: statistics.median(costs) for model, costs in cost.items()}
    record("ms per answer, 16 streams", **{model: round(ms, 3) for model, ms in median.items()}, rounds=rounds)
    if rounds > 1:
        assert median["count_bls"] - median["engine"] <= 0.5
        assert median["count_all"] - median["engine"] <= 0.2


def test_many_that_wait_for_their_first_answer(server: Server) -> None:
    """A request takes one of the calling model's threads until BLS has answered it; Triton's default is 32."""
    with Client(server.grpc_url) as client, ThreadPoolExecutor(80) as callers:
        answers = callers.map(lambda _: len(list(client.stream("count_bls", ask(2, DELAY=0.5)))), range(80))
        assert set(answers) == {2}
