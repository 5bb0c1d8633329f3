"""Language models' speed: batching, what the pipelines add to the engine, and leaving.

The times are checked in `make verify`; in other runs, answers and counts.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config, write_config
from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import serve
from tests.conftest import Record, Scale
from tests.support.imports import add
from tests.support.llm import open_engine, token_inputs, tokens_of
from tests.support.once import ROOT
from tests.support.service import Service
from tests.support.vllm import ARGUMENTS, SPIN, find_vllm

PROMPT = "The cat sat on the mat, and watched the rain."
SLOTS = 16  # of llm-hf
LONG = 900  # tokens
ENGINE, PIPELINES = "llm-hf", ("llm", "llm_bls")
ENGINES = ("llm-static", "llm-hf", "tiny-onnx", "llm-vllm")
Ask: TypeAlias = Callable[[str, int], Iterator[int]]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with Client(service.grpc) as found:
        yield found


@pytest.fixture(scope="module")
def ask(client: Client, folder: Path) -> Ask:
    """The number of new tokens so far, with each answer; the engine gets the same tokens as a pipeline."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids

    def stream(model: str, new: int) -> Iterator[int]:
        if model != ENGINE:
            for piece in Llm(client, model).stream(PROMPT, max_tokens=new, min_tokens=new):
                yield piece.num_output_tokens
            return
        count = 0
        for answer in client.stream(ENGINE, token_inputs(ids, new)):
            count += answer["output_ids"].size
            yield count

    return stream


def mixed(number: int) -> list[tuple[list[int], int]]:
    """Prompts of 8 to 39 tokens, and 8, 16, 32 or 128 new tokens for each, in any order."""
    random = np.random.default_rng(0)
    asked = [(random.integers(4, 480, random.integers(8, 40)).tolist(), (8, 16, 32, 128)[i % 4]) for i in range(number)]
    random.shuffle(asked)
    return asked


@pytest.mark.verify
def test_continuous_batching_beats_static(record: Record, tmp_path: Path) -> None:
    """64 requests of 8 to 128 new tokens, 16 at a time, one compute thread each, in turns."""
    number, rounds = 64, 5
    weights = make_tiny(tmp_path / "large", hidden=512, layers=6)
    asked = mixed(number)
    rates: dict[str, list[float]] = {"static": [], "continuous": []}
    found: dict[str, list[list[int]]] = {}
    with ExitStack() as held, ThreadPoolExecutor(SLOTS) as callers:
        engines = {name: held.enter_context(open_engine(weights, batching=name)) for name in rates}
        for _ in range(rounds):
            for name, engine in engines.items():
                start = time.perf_counter()
                found[name] = list(callers.map(lambda a, e=engine: tokens_of(e.stream(token_inputs(*a))), asked))
                rates[name].append(sum(new for _, new in asked) / (time.perf_counter() - start))
                assert [len(tokens) for tokens in found[name]] == [new for _, new in asked]
    median = {name: statistics.median(each) for name, each in rates.items()}
    same = sum(a == b for a, b in zip(*found.values(), strict=True))
    assert same >= 0.9 * number  # two logits may be too near to tell
    gain = median["continuous"] / median["static"]
    record(
        "tokens per second, 16 requests at a time, 14.6 M parameters",
        **{name: round(rate, 1) for name, rate in median.items()}, gain=round(gain, 2), same=same, rounds=rounds,
    )  # fmt: skip
    assert gain >= 1.5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Every engine on the same weights, with 16 slots and one compute thread each, on one server."""
    place = tmp_path_factory.mktemp("engines")
    weights = make_tiny(place / "large", hidden=512, layers=6)
    own = place / "own" / "models"
    add(own.parent, weights, "tiny-onnx", task="generate")
    static = Path(shutil.copytree(ROOT / "models" / "llm-hf", own / "llm-static")) / "config.pbtxt"
    static.write_text(static.read_text(encoding="utf-8").replace('"llm-hf"', '"llm-static"'), encoding="utf-8")
    repository = compose(
        ENGINES, place / "repository", projects=[own.parent], weights=weights, environments={"llm-vllm": find_vllm()}
    )
    for name in ENGINES:
        message = read_config(repository / name).message
        message.parameters["threads"].string_value = "1"
        if name == "llm-static":
            message.parameters["batching"].string_value = "static"
        if name == "llm-vllm":
            message.parameters["engine_args"].string_value = ARGUMENTS
        write_config(message, repository / name / "config.pbtxt", comment="For a comparison.")
    with serve(repository) as server, Client(server.grpc_url) as found:
        yield found


@pytest.mark.verify
def test_engines_side_by_side(engines: Client, record: Record) -> None:
    """64 requests of 8 to 128 new tokens over gRPC, 16 at a time, in turns."""
    number, rounds = 64, 5
    asked = mixed(number)
    rates: dict[str, list[float]] = {name: [] for name in ENGINES}
    found: dict[str, list[list[int]]] = {}
    with ThreadPoolExecutor(SLOTS) as callers:
        for _ in range(rounds):
            for name, each in rates.items():
                time.sleep(SPIN)
                start = time.perf_counter()
                found[name] = list(callers.map(lambda a, n=name: tokens_of(engines.stream(n, token_inputs(*a))), asked))
                each.append(sum(new for _, new in asked) / (time.perf_counter() - start))
                assert [len(tokens) for tokens in found[name]] == [new for _, new in asked]
    for name, tokens in found.items():  # two logits may be too near to tell
        assert sum(a == b for a, b in zip(tokens, found["llm-static"], strict=True)) >= 0.9 * number, name
    median = {name: statistics.median(each) for name, each in rates.items()}
    record(
        "tokens per second of each engine, 16 requests at a time, 14.6 M parameters",
        **{name: round(rate, 1) for name, rate in median.items()}, rounds=rounds,
    )  # fmt: skip
    lengths = [new for _, new in asked]
    assert max(median.values()) / median["llm-static"] >= 0.8 * max(lengths) / statistics.mean(lengths)


def first_tokens(ask: Ask, model: str, number: int) -> list[float]:
    """Ms to the first token of requests that are sent at once."""
    barrier = threading.Barrier(number)

    def one(_: int) -> float:
        barrier.wait()
        start, first, count = time.perf_counter(), 0.0, 0
        for count in ask(model, 8):
            first = first or (time.perf_counter() - start if count else 0.0)
        assert count == 8
        return 1000 * first

    with ThreadPoolExecutor(number) as callers:
        return list(callers.map(one, range(number)))


@pytest.mark.parametrize(("number", "most"), [(1, 10.0), (16, 40.0)])
def test_time_that_pipelines_add_to_the_first_token(
    number: int, most: float, ask: Ask, scale: Scale, record: Record
) -> None:
    rounds, repeats = scale(1, 5), scale(1, 20 if number == 1 else 5)
    times: dict[str, list[float]] = {model: [] for model in (ENGINE, *PIPELINES)}
    for _ in range(rounds):
        found: dict[str, list[float]] = {model: [] for model in times}
        for _ in range(repeats):  # each in turns: a busy moment of the machine meets all of them
            for model, each in found.items():
                each += first_tokens(ask, model, number)
        for model, each in found.items():
            times[model].append(statistics.median(each))
    median = {model: statistics.median(found) for model, found in times.items()}
    record(
        f"ms to the first token, {number} at once",
        **{model: round(ms, 1) for model, ms in median.items()}, rounds=rounds,
    )  # fmt: skip
    if rounds > 1:
        for model in PIPELINES:
            assert median[model] - median[ENGINE] <= most


def test_time_that_pipelines_add_per_token(ask: Ask, scale: Scale, record: Record) -> None:
    """Milliseconds per token of all streams, 16 at a time, in turns."""
    count, rounds = scale(20, 100), scale(1, 5)
    costs: dict[str, list[float]] = {model: [] for model in (ENGINE, *PIPELINES)}
    with ThreadPoolExecutor(16) as callers:
        for _ in range(rounds):
            for model, found in costs.items():
                start = time.perf_counter()
                assert list(callers.map(lambda _, m=model: [*ask(m, count)][-1], range(16))) == [count] * 16
                found.append(1000 * (time.perf_counter() - start) / (16 * count))
    median = {model: statistics.median(found) for model, found in costs.items()}
    record("ms per token, 16 streams", **{model: round(ms, 3) for model, ms in median.items()}, rounds=rounds)
    if rounds > 1:
        for model in PIPELINES:
            assert median[model] - median[ENGINE] <= 0.5


@pytest.mark.parametrize("model", PIPELINES)
def test_a_client_that_leaves_frees_its_slot(model: str, ask: Ask, scale: Scale, record: Record) -> None:
    """All slots are taken; a request that waits begins once a client of the pipeline has left."""
    seconds: list[float] = []

    def begin() -> float:
        stream = ask(ENGINE, 2)
        assert next(stream) >= 1
        now = time.perf_counter()
        assert list(stream)[-1:] in ([], [2])
        return now

    for _ in range(scale(1, 5)):
        with ThreadPoolExecutor(1) as caller, ExitStack() as held:
            streams: list[Any] = [ask(each, LONG) for each in [ENGINE] * (SLOTS - 1) + [model]]
            for stream in streams:
                held.callback(stream.close)
                assert 1 <= next(stream) < LONG
            waiting = caller.submit(begin)
            time.sleep(0.3)
            assert not waiting.done()
            left = time.perf_counter()
            streams[-1].close()
            seconds.append(waiting.result(5) - left)
    record(f"seconds until a slot is free after a client of {model} left", median=round(statistics.median(seconds), 3),
           most=round(max(seconds), 3), rounds=len(seconds))  # fmt: skip
    if len(seconds) > 1:
        assert statistics.median(seconds) <= 0.2
