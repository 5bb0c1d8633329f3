"""Messages of a client that gets no answer: the same over both protocols and in this process."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.client import Client
from shoal.clients.client.failures import SECURE, Kind, grpc_failure, strip
from shoal.clients.local import Pipeline
from shoal.errors import InputError, ServerError, ShoalError
from shoal.serving.server.launch import Server, find_ports
from tests.conftest import as_bytes
from tests.support.ways import WAYS, Relay, answering, connect, failure, url_of

FLOATS = np.full((2, 1), 0.5, np.float32)


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"excerpt": as_bytes(["a"]), "N": FLOATS[:1]}, "There is no input N. Inputs: excerpt, BERT_WEIGHT."),
        ({"BERT_WEIGHT": FLOATS}, "The input excerpt is missing. Give excerpt=[...]."),
        ({}, "The input excerpt is missing. Give excerpt=[...]."),
        (
            {"excerpt": as_bytes(["a", "b"]), "BERT_WEIGHT": FLOATS.astype(np.int64)},
            'Input BERT_WEIGHT has dtype int64, expected float32 (TYPE_FP32). Convert it: array.astype("float32")',
        ),
        ({"excerpt": as_bytes(["a", "b"]).T}, "Input excerpt has shape [1, 2], expected [rows, 1]."),
        (
            {"excerpt": as_bytes(["a", "b", "c"]), "BERT_WEIGHT": FLOATS},
            "The inputs have different numbers of rows: excerpt 3, BERT_WEIGHT 2. Give one value of each per row.",
        ),
        (
            {"excerpt": as_bytes(["a", "b"]), "BERT_WEIGHT": 3 * FLOATS},
            "BERT_WEIGHT[0] is 1.5; it must lie between 0 and 1. Leave it out for the default.",
        ),
    ],
)
def test_a_client_and_this_process_say_the_same(
    client: Client, pipeline: Pipeline, arrays: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        client.infer("ensemble_all", arrays)
    assert str(refused.value) == message
    with pytest.raises(InputError) as here:
        pipeline(**arrays)
    assert str(here.value) == message


def test_the_cores_refusals_are_handed_on(client: Client) -> None:
    """A server whose model was replaced refuses what the client has checked against the old one."""
    call = Call(Method.INFER, "ensemble_all", {"excerpt": as_bytes(["a"] * 513)})
    with pytest.raises(InputError, match=r"^inference request batch-size must be <= 512 for 'ensemble_all'$"):
        client._send(call)
    weights = {"excerpt": as_bytes(["a", "b"]), "BERT_WEIGHT": 3 * FLOATS}
    with pytest.raises(InputError, match=r"^BERT_WEIGHT\[10\] is 1\.5;"):  # of a part that begins with row 10
        client._send(Call(Method.INFER, "ensemble_all", weights, first_row=10))


def test_outputs_and_models_that_are_not_there(client: Client) -> None:
    with pytest.raises(InputError, match=r"^There is no output N\. Outputs: SCORE, BERT_SCORE, FOREST_SCORE\.$"):
        client.infer("ensemble_all", excerpt=["a"], outputs=["N"])
    for name in ("nope", "a/b", "ensemble_all/versions/7"):
        with pytest.raises(InputError, match=f"^The server at {client.url} has no model {name}. Name a model of its"):
            client.infer(name, excerpt=["a"])
    with pytest.raises(InputError, match="The model has no name"):
        client.infer("", excerpt=["a"])
    with pytest.raises(InputError, match=r"^There is no input text\. Inputs: excerpt, BERT_WEIGHT\.$"):
        client.infer("ensemble_all", text=["a"])
    with pytest.raises(InputError, match=r"^The request has no rows\."):
        client.infer("ensemble_all", excerpt=[])


def test_prefixes_of_core_are_stripped() -> None:
    nested = "in ensemble 'a', in ensemble 'b', [request id: x] y] excerpt[0] is bad."
    assert strip(nested, "x] y") == "excerpt[0] is bad."
    assert strip("[request id: <id_unknown>] in ensemble 'a', no", "") == "no"


# --- no answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_no_server_at_the_address(way: str) -> None:
    url = f"127.0.0.1:{find_ports(0, 0, 0)[0]}"
    start = time.monotonic()
    expected = f"No Triton answers at {url} (connection refused). Start one: shoal serve REPOSITORY; "
    expected += "or give the address of one: --url HOST:PORT"
    assert failure(way, url, retries=2) == expected
    assert 0.1 < time.monotonic() - start < 5
    assert failure(way, "no-such-host.invalid:80").startswith("No Triton answers at no-such-host.invalid:80 (")


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_comes_late_is_waited_for(server: Server, way: str) -> None:
    port = find_ports(0, 0, 0)[0]
    relays: list[Relay] = []
    timer = threading.Timer(0.4, lambda: relays.append(Relay(url_of(server, way), port)))
    timer.start()
    try:
        with connect(way, f"127.0.0.1:{port}", retries=10, timeout=10) as client:
            assert client.infer("slow", X=[0.0])["Y"] == 0
    finally:
        timer.join()
        relays[0].close()


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_connection_is_repeated_on_request_only(server: Server, way: str) -> None:
    with Relay(url_of(server, way)) as relay:
        for is_repeatable in (False, True):
            with connect(way, relay.url, is_repeatable=is_repeatable) as client:
                client.infer("slow", X=[0.0])
                relay.cut = 1
                if is_repeatable:
                    assert client.infer("slow", X=[0.0])["Y"] == 0
                else:
                    with pytest.raises(ServerError) as error:
                        client.infer("slow", X=[0.0])
                    assert str(error.value).startswith(
                        f"The connection to the server at {relay.url} broke during a request (connection closed)."
                    )
                assert relay.cut == 0
                assert client.infer("slow", X=[0.0])["Y"] == 0  # the next one finds another connection


@pytest.mark.parametrize("way", WAYS)
def test_answers_that_come_late(server: Server, way: str) -> None:
    url = url_of(server, way)
    start = time.monotonic()
    said = failure(way, url, inputs={"X": [1.0]}, timeout=0.3)
    assert said == f"The server at {url} did not answer within 0.3 s. Give it longer: timeout=0.6"
    assert time.monotonic() - start < 0.9
    with connect(way, url, retries=10) as client:
        assert client.infer("slow", X=[0.0], timeout=10)["Y"] == 0


@pytest.mark.parametrize("way", WAYS)
def test_servers_that_say_nothing_or_little_by_little(way: str) -> None:
    over = threading.Event()

    def trickle(connection: socket.socket) -> None:
        for letter in b"HTTP/1.1 200 OK\r\n" + b"X: Y\r\n" * 9:
            if over.wait(0.1):
                return
            connection.sendall(bytes([letter]))

    for behave in (lambda _: over.wait(5), *([trickle] if way.startswith("http") else [])):
        over.clear()
        with answering(behave) as url:
            start = time.monotonic()
            assert failure(way, url, timeout=0.5).startswith(f"The server at {url} did not answer within 0.5 s.")
            assert time.monotonic() - start < 1.5
            over.set()


# --- another answer than Triton's --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_other_protocols_port(server: Server, way: str) -> None:
    url, other = (server.http_url, "http") if way.startswith("grpc") else (server.grpc_url, "grpc")
    said = failure(way, url)
    assert said.startswith(f"The server at {url} is not a Triton that speaks {way.split('-')[0]} (")
    secure = f"{SECURE[way.split('-')[0]]}://{url}"
    assert said.endswith(
        f"; for its {other} port: --protocol {other}, in Python protocol='{other}'; with TLS: {secure}"
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<html",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_no_triton(way: str, answer: bytes) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):
            pass

    with answering(behave) as url:
        said = failure(way, url, timeout=5)
    assert said.startswith(f"The server at {url} is not a Triton that speaks {way.split('-')[0]} (")


# --- Triton's own trouble ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_full_queues_are_tried_again(server: Server, protocol: str) -> None:
    url = url_of(server, protocol)

    def ask(retries: int) -> Any:
        with Client(url, protocol=protocol, retries=retries) as client:
            try:
                return float(client.infer("slow", X=[0.15])["Y"][0, 0])
            except ShoalError as error:
                return str(error)

    with ThreadPoolExecutor(8) as callers:
        once, often = (list(callers.map(ask, [retries] * 8)) for retries in (0, 30))
    busy = f"The server at {url} is busy: the queue of slow is full. Send fewer requests at a time, or try more often"
    assert any(str(words).startswith(busy) for words in once)
    assert often == [pytest.approx(0.15)] * 8


def test_unknown_statuses_are_passed_on() -> None:
    assert grpc_failure("UNAVAILABLE", "something new").kind is Kind.FAILED
    assert grpc_failure("UNAVAILABLE", "").kind is Kind.NOT_TRITON
    assert grpc_failure("UNAVAILABLE", "GOAWAY received").kind is Kind.CONNECTION_LOST
