"""Requests and answers of a client, over each of the four ways to a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest

from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.calls import Answer
from shoal.clients.client.client import Client
from shoal.clients.client.failures import CallError
from shoal.clients.client.grpc_transport import ChannelPool
from shoal.clients.local import Pipeline
from shoal.errors import InputError
from shoal.serving.server.launch import Server
from tests.support.ways import WAYS, connect, num_files, url_of

OUTPUTS = ("SCORE", "BERT_SCORE", "FOREST_SCORE")


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    """A client of the shared server."""
    with connect(request.param, url_of(server, request.param)) as client:
        yield client


# --- what goes out and comes back --------------------------------------------------------------------------------


def test_answers_are_read_only_mappings(ask: Any, pipeline: Pipeline) -> None:
    answer = ask.infer("ensemble_all", excerpt=["A cat.", "A dog."], request_id="mine")
    expected = pipeline(excerpt=["A cat.", "A dog."])
    assert isinstance(answer, Answer)
    assert tuple(answer) == OUTPUTS  # in the model's order
    assert all(np.array_equal(answer[name], expected[name]) for name in OUTPUTS)
    assert (answer.model, answer.version, answer.request_id, answer.parameters) == ("ensemble_all", "1", "mine", {})
    assert repr(answer).startswith("Answer(ensemble_all, version 1: SCORE float32 [2, 1], BERT_SCORE")
    with pytest.raises(ValueError, match="read-only"):
        answer["SCORE"][0] = 1
    with pytest.raises(AttributeError):
        answer.model = "another"  # type: ignore[misc]


def test_some_outputs_may_be_asked_for(ask: Any) -> None:
    every = ask.infer("ensemble_all", excerpt=["A cat."])
    for names in (["SCORE"], ["FOREST_SCORE", "BERT_SCORE"], ("SCORE", "SCORE")):
        some = ask.infer("ensemble_all", excerpt=["A cat."], outputs=names)
        assert list(some) == list(dict.fromkeys(names))
        assert all(some[name] == every[name] for name in some)
    with pytest.raises(InputError, match=r"There is no output NOPE\. Outputs: SCORE, BERT_SCORE, FOREST_SCORE\."):
        ask.infer("ensemble_all", excerpt=["A cat."], outputs=["SCORE", "NOPE"])
    with pytest.raises(InputError, match="outputs is a single string, 'SCORE'"):
        ask.infer("ensemble_all", excerpt=["A cat."], outputs="SCORE")


def test_inputs_come_by_mapping_or_keyword(ask: Any) -> None:
    by_both = ask.infer("ensemble_all", {"excerpt": ["A cat."]}, BERT_WEIGHT=np.array([[1]], np.float32))
    assert by_both["SCORE"] == by_both["BERT_SCORE"]
    with pytest.raises(InputError, match=r"The input excerpt is given twice\. Give it in the mapping or by keyword"):
        ask.infer("ensemble_all", {"excerpt": ["A cat."]}, excerpt=["A cat."])


def test_model_metadata(ask: Any) -> None:
    described = ask.describe("ensemble_all")
    assert [(spec.name, spec.dtype, spec.dims) for spec in described.inputs] == [
        ("excerpt", "TYPE_STRING", (1,)),
        ("BERT_WEIGHT", "TYPE_FP32", (1,)),
    ]
    assert [spec.name for spec in described.outputs] == list(OUTPUTS)
    assert described.max_batch_size == 512
    assert ask.is_ready("ensemble_all")
    assert not ask.is_ready("nope")


def test_parameters_go_along(ask: Any) -> None:
    ask.infer("ensemble_all", excerpt=["A cat."], parameters={"a": "x", "b": 1, "c": True, "d": 0.5})
    for parameters, message in [
        ({"priority": 1}, "The parameter priority is reserved by Triton"),
        ({"a": None}, "The parameter a is None"),
        ({"a": 2**63}, "The parameter a is 9223372036854775808"),
    ]:
        with pytest.raises(InputError, match=message):
            ask.infer("ensemble_all", excerpt=["A cat."], parameters=parameters)


def test_proxies_are_not_used_for_this_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for way in WAYS:
        with connect(way, url_of(server, way), retries=0) as client:
            assert client.is_ready("ensemble_all")


def test_addresses_may_name_their_protocol(server: Server) -> None:
    for protocol, url in (("grpc", server.grpc_url), ("http", server.http_url + "/")):
        with Client(f"{protocol}://{url}", protocol=protocol) as client:
            assert client.url == url.strip("/")
            assert client.is_ready("ensemble_all")


# --- values that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("127.0.0.1:8001", {"timeout": 0}, "timeout is 0; it must be a number of seconds above 0."),
        ("127.0.0.1:8001", {"timeout": float("nan")}, "timeout is nan;"),
        ("127.0.0.1:8001", {"timeout": float("inf")}, "timeout is inf;"),
        ("127.0.0.1:8001", {"concurrency": 0}, "concurrency is 0; it must be a whole number, 1 or more."),
        ("127.0.0.1:8001", {"retries": -1}, "retries is -1; it must be a whole number, 0 or more."),
        ("127.0.0.1:8001", {"retries": 1.5}, "retries is 1.5;"),
        ("127.0.0.1:8001", {"protocol": "smoke"}, "Unknown protocol 'smoke'. Known: grpc, http."),
        ("http://127.0.0.1:8000", {}, "http://127.0.0.1:8000 names the protocol http; this client speaks grpc"),
        ("grpcs://a.example:443", {"protocol": "http"}, "grpcs://a.example:443 names the protocol grpcs; this client"),
        ("127.0.0.1", {}, "'127.0.0.1' is not HOST:PORT. Triton's port for grpc is 8001: 127.0.0.1:8001"),
        (":", {"protocol": "http"}, "':' is not HOST:PORT. Triton's port for http is 8000"),
        ("::1:8001", {}, "'::1:8001' is not HOST:PORT"),
        ("a:65536", {}, "'a:65536' is not HOST:PORT"),
        ("a:8000/v2", {"protocol": "http"}, "'a:8000/v2' is not HOST:PORT"),
    ],
)
def test_values_that_cannot_be_used_are_named(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Client(url, **options)
    assert str(error.value).startswith(message)


def test_without_an_address_it_is_this_machine_at_the_protocols_port() -> None:
    for protocol, url in (("grpc", "127.0.0.1:8001"), ("http", "127.0.0.1:8000")):
        with Client(protocol=protocol) as client:
            assert client.url == url


def test_a_requests_own_time_is_checked(client: Client) -> None:
    with pytest.raises(InputError, match="timeout is -1;"):
        client.infer("ensemble_all", excerpt=["a"], timeout=-1)


# --- requests that are too long ----------------------------------------------------------------------------------


def test_long_requests_are_split_and_answered_in_order(ask: Any) -> None:
    features = np.random.default_rng(0).normal(size=(1300, 207)).astype(np.float32)
    answer = ask.infer("cuml", input__0=features, request_id="long")
    singles = np.concatenate(
        [ask.infer("cuml", input__0=features[k : k + 100])["output__0"] for k in range(0, 1300, 100)]
    )
    assert np.array_equal(answer["output__0"], singles)
    assert answer.request_id == "long"
    assert not answer["output__0"].flags.writeable


def test_errors_of_parts_name_the_callers_rows(ask: Any) -> None:
    weights = [0.5] * 600
    weights[550] = 1.5
    with pytest.raises(InputError) as error:
        ask.infer("ensemble_all", excerpt=["a"] * 600, BERT_WEIGHT=weights, request_id="it] ")
    assert str(error.value) == "BERT_WEIGHT[550] is 1.5; it must lie between 0 and 1. Leave it out for the default."


def test_models_that_do_not_batch_get_one_request(ask: Any) -> None:
    """Also where only asking tells: their dimensions are free, and no two need be the same."""
    assert ask.describe("flat").max_batch_size == 0
    for a, b in (([1.0, 2.0], [3.0]), ([1.0], [3.0]), ([1.0] * 1000, [2.0])):
        assert ask.infer("flat", {"A": a, "timeout": b})["Y"].tolist() == a + b


def test_parts_that_do_not_fit_together_are_said(ask: Any) -> None:
    assert ask.infer("wide", X=[3, 3, 3])["Y"].shape == (3, 3)
    message = r"The request was split, and output Y came as \[rows, 2\] and \[rows, 3\]\. Send at most 2 rows at a time"
    with pytest.raises(InputError, match=message):
        ask.infer("wide", X=[1, 2, 3])
    with pytest.raises(
        InputError, match="The request was split, and output Y does not have one row per row of its part"
    ):
        ask.infer("one_row", X=[1, 2, 3])


def test_ambiguous_model_names_are_refused(ask: Any) -> None:
    """This server keeps the list of its models to itself."""
    with pytest.raises(InputError, match=r"does not allow this: .* Which model is meant\? Name it, as in --model NAME"):
        ask.default_model()


# --- threads and loops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_threads_share_a_client_and_leave_nothing(server: Server, protocol: str) -> None:
    features = np.eye(16, 207, dtype=np.float32)
    with Client(url_of(server, protocol), protocol=protocol) as client:
        expected = client.infer("cuml", input__0=features)["output__0"]
        for _ in range(2):
            before = num_files(), threading.active_count()
            with ThreadPoolExecutor(16) as callers:
                got = list(
                    callers.map(lambda k: client.infer("cuml", input__0=features[k : k + 1])["output__0"][0], range(16))
                )
            assert np.array_equal(got, expected)
    assert (num_files(), threading.active_count()) <= before
    with pytest.raises(InputError, match=r"This client is closed\. Make another"):
        client.is_ready("cuml")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_many_requests_share_a_loop(server: Server, protocol: str) -> None:
    features = np.eye(64, 207, dtype=np.float32)

    async def run() -> list[Any]:
        async with AsyncClient(url_of(server, protocol), protocol=protocol) as client:
            return await asyncio.gather(*(client.infer("cuml", input__0=row[None]) for row in features))

    with Client(server.grpc_url) as client:
        expected = client.infer("cuml", input__0=features)["output__0"]
    assert np.array_equal([answer["output__0"][0] for answer in asyncio.run(run())], expected)


def test_an_async_client_belongs_to_its_loop(server: Server) -> None:
    client = AsyncClient(server.grpc_url)
    with asyncio.Runner() as mine, asyncio.Runner() as another:
        assert mine.run(client.is_ready("cuml"))
        with pytest.raises(InputError, match="This client belongs to another event loop"):
            another.run(client.is_ready("cuml"))
        mine.run(client.close())
        with pytest.raises(InputError, match="This client is closed"):
            mine.run(client.is_ready("cuml"))


def test_no_request_follows_another_into_a_dead_connection() -> None:
    opened: list[Any] = []

    def open_channel(url: str, options: Any) -> Any:
        opened.append(grpc.insecure_channel(url, options))
        return opened[-1]

    class BrokenError(grpc.RpcError):  # type: ignore[misc]
        code, details = (lambda self: grpc.StatusCode.UNAVAILABLE), (lambda self: "Socket closed")

    pool = ChannelPool("127.0.0.1:9", open_channel)
    with pool.channel():
        assert pool.unused() == [], "nothing broke yet"
        with pytest.raises(CallError), pool.channel():
            raise BrokenError
        with pool.channel() as third:
            assert third.raw is opened[1]
        assert pool.unused() == [], "the first request is still on it"
    assert pool.unused() == [opened[0]]
    assert pool.unused() == [], "told once"
    assert pool.close() == [opened[1]]
    with pytest.raises(CallError), pool.channel():
        raise BrokenError
    assert len(opened) == 2, "what is closed opens no more"
    for channel in opened:
        channel.close()
