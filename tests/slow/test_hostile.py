"""Nothing that a client sends or does stops the service: requests, deadlines, and clients that leave."""

from __future__ import annotations

import json
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

import shoal
from tests.conftest import Scale
from tests.support.fronts import ask
from tests.support.planted import write
from tests.support.service import INFER, STREAM, Callers, Service, make_repository, wait_until
from tests.support.watchdog import Watchdog

# Ends its process for one value, answers all others; takes BYTES too, and rows of any length.
KILLER = """
import os

from shoal.kit.component.base import Component


class Killer(Component):
    def run(self, batch):
        for value in batch["X"].ravel():
            if value < 0:
                os.kill(os.getpid(), 9)
        return {"Y": batch["X"] * 2}


TritonPythonModel = Killer.for_triton()
"""
KILLER_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "public" value { string_value: "true" } }
"""
# Gives its texts back, of which there may be none.
ECHO = """
from shoal.kit.component.base import Component


class Echo(Component):
    def run(self, batch):
        return {"Y": batch["X"]}


TritonPythonModel = Echo.for_triton()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    repository = make_repository(folder)
    write(repository / "killer" / "config.pbtxt", KILLER_CONFIG)
    write(repository / "killer" / "1" / "model.py", KILLER)
    write(repository / "echo" / "config.pbtxt", KILLER_CONFIG.replace("TYPE_FP32", "TYPE_STRING"))
    write(repository / "echo" / "1" / "model.py", ECHO)
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    with Service(home / "repository", home / "log") as running:
        yield running


def message(value: float = 3.0, model: str = "chain", shape: tuple[int, ...] = (1, 1), **fields: Any) -> Any:
    """A request for inference, as gRPC's message."""
    request = service_pb2.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="X", datatype="FP32", shape=shape)
    request.raw_input_contents.append(np.float32(value).tobytes())
    return request


def stub(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        INFER, service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
    )


def pids(service: Service) -> set[int]:
    return {process.pid for process in (*service.servers(), *service.stubs())}


def is_right(service: Service) -> bool:
    """Whether the known request has its answer, over both protocols."""
    with shoal.Client(service.grpc, retries=0) as client, shoal.Client(service.http, protocol="http") as other:
        return all(each.infer("chain", X=[[3.0]])["Z"].item() == 12.0 for each in (client, other))


# --- what Triton does not survive -----------------------------------------------------------------------------------


def lies(seed: int) -> Iterator[tuple[str, dict[str, str], bytes]]:
    """Path, headers and body of requests whose shapes overflow, whose sizes lie, or which are nested deeply."""
    chance = random.Random(seed)
    large = [2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, -1, -(2**61)]
    while True:
        model = chance.choice(["chain", "first", "second", "other", "killer"])
        path, headers = f"/v2/models/{model}/infer", {}
        shape: list[Any] = [1, *(chance.choice([0, 1, 2, 8, *large]) for _ in range(chance.randint(1, 4)))]
        if not any(abs(dim) > 8 for dim in shape):
            shape.append(chance.choice(large))
        datatype = chance.choice(["FP32", "INT64", "BYTES", "BOOL", "FP64"])
        entry: dict[str, Any] = {"name": "X", "datatype": datatype, "shape": shape}
        kind, binary = chance.choice(["binary", "json", "nested", "twice", "generate"]), b""
        if kind == "binary":
            binary = bytes(chance.choice([0, 0, 4, 8]))
            entry["parameters"] = {"binary_data_size": chance.choice([0, len(binary), 2**31, 2**32, 2**64 - 1])}
        else:
            entry["data"] = [1.0]
        body = json.dumps({"inputs": [entry]})
        if kind == "nested":
            depth = chance.choice([65, 1000, 40_000, 200_000])
            body = body.replace("[1.0]", "[" * depth + "1.0" + "]" * depth)
        if kind == "twice":  # of equal keys Triton takes the first
            body = body.replace('"data"', '"shape": [1, 1], "data"')
        if kind == "generate":
            path = f"/v2/models/{model}/generate"
            depth = chance.choice([65, 40_000, 200_000])
            body = '{"X": ' + "[" * depth + "3.0" + "]" * depth + "}"
        if kind == "binary":
            headers["Inference-Header-Content-Length"] = str(len(body))
        yield path, headers, body.encode() + binary


def lying_messages(seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    large = [2**31, 2**61, 2**62, 2**63 - 1, -1]
    while True:
        model = chance.choice(["chain", "first", "second", "other", "killer"])
        request = message(model=model, shape=(1, chance.choice(large), chance.choice([0, 1, 8, *large])))
        if chance.random() < 0.3:
            del request.raw_input_contents[:]
            request.inputs[0].contents.fp32_contents.append(1.0)
        elif chance.random() < 0.5:
            request.raw_input_contents[0] = b""
        content = request.SerializeToString()
        yield (
            content
            if chance.random() < 0.8
            else content + service_pb2.ModelInferRequest(model_name="killer").SerializeToString()
        )


def test_requests_that_triton_does_not_survive(service: Service, scale: Scale) -> None:
    before = pids(service)
    posts, calls = lies(1), lying_messages(2)
    with grpc.insecure_channel(service.grpc) as channel:
        call = channel.unary_unary(INFER)
        for number in range(scale(60, full=1000)):
            path, headers, body = next(posts)
            status, _, content = ask(service, path, body, **{n.replace("-", "_"): v for n, v in headers.items()})
            assert status in (200, 400)
            if b'"shape": [1, 1]' not in body:  # which is the one that counts
                assert (status, list(json.loads(content))) == (400, ["error"]), (path, body[:300], content)
            with pytest.raises(grpc.RpcError) as caught:
                call(next(calls), timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
            if number % 20 == 0:
                assert is_right(service)
    assert is_right(service)
    assert pids(service) == before


TEXT, NONE = b"\1\0\0\0a", b""
CLASSIFIED: list[tuple[str, str, list[int], Any, bytes, Any]] = [  # model, datatype, shape, data, as bytes, how many
    ("echo", "BYTES", [1, 1], ["a"], TEXT, 1),
    ("echo", "BYTES", [1, 0], [], NONE, 1),
    ("echo", "BYTES", [1, 2], ["a", "a"], TEXT * 2, 2),
    ("killer", "FP32", [1, 0], [], NONE, 1),
    ("killer", "FP32", [2, 0], [], NONE, 1000),
    ("other", "FP32", [1, 1], [3.0], np.float32(3).tobytes(), 0),
    ("other", "FP32", [1, 1], [3.0], np.float32(3).tobytes(), 2**32),
    ("other", "FP32", [1, 1], [3.0], np.float32(3).tobytes(), -1),
    ("other", "FP32", [1, 1], [3.0], np.float32(3).tobytes(), "1"),
    ("other", "FP32", [1, 1], [3.0], np.float32(3).tobytes(), True),
]


def classify(service: Service, case: tuple[str, str, list[int], Any, bytes, Any], way: str) -> tuple[Any, str]:
    """Status and answer of a request for the classes of an output."""
    model, datatype, shape, data, binary, number = case
    if way in ("json", "binary"):
        entry: dict[str, Any] = {"name": "X", "datatype": datatype, "shape": shape}
        entry |= {"data": data} if way == "json" else {"parameters": {"binary_data_size": len(binary)}}
        head = json.dumps({"inputs": [entry], "outputs": [{"name": "Y", "parameters": {"classification": number}}]})
        named = {"Inference_Header_Content_Length": str(len(head))} if way == "binary" else {}
        body = head.encode() + (binary if way == "binary" else b"")
        status, _, content = ask(service, f"/v2/models/{model}/infer", body, **named)
        return status, content.decode()
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype=datatype, shape=shape)
    request.raw_input_contents.append(binary)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    setattr(request.outputs.add(name="Y").parameters["classification"], kinds[type(number)], number)
    with grpc.insecure_channel(service.grpc) as channel:
        try:
            if way == "message":
                return 200, str(stub(channel)(request, timeout=20))
            call = channel.stream_stream(STREAM, None, service_pb2.ModelStreamInferResponse.FromString)
            (answer,) = call(iter([request.SerializeToString()]), timeout=20)
        except grpc.RpcError as error:
            return 400 if error.code() is grpc.StatusCode.INVALID_ARGUMENT else error.code(), error.details()
        return (400 if answer.error_message else 200), str(answer)


@pytest.mark.parametrize("way", ["json", "binary", "message", "stream"])
def test_classification_that_would_crash_triton(service: Service, way: str) -> None:
    before, restarts = pids(service), service.metric("shoal_restarts_total")
    for case in CLASSIFIED:
        status, text = classify(service, case, way)
        is_safe = case[0] == "killer" and way in ("message", "stream")  # Triton divides for JSON alone
        assert status == (200 if is_safe else 400), (case, text)
    assert is_right(service)
    status, text = classify(service, ("other", "FP32", [1, 1], [3.0], np.float32(3).tobytes(), 1), way)
    assert status == 200
    assert "6.000000:0" in text
    assert (pids(service), service.metric("shoal_restarts_total")) == (before, restarts)


# --- what would stop the event loop ---------------------------------------------------------------------------------

INFER_PATH, GENERATE = "/v2/models/chain/infer", "/v2/models/chain/generate"
MIB = 2**20


def tensor(data: bytes, shape: bytes = b"[1,1]") -> bytes:
    return b'{"inputs":[{"name":"X","datatype":"FP32","shape":' + shape + b',"data":' + data + b"}]}"


def numbers(count: int) -> bytes:
    return b"[" + b"1," * count + b"1]"


# Path, body and status; each is made when it is sent.
SLOW: dict[str, Callable[[], tuple[str, bytes, int]]] = {
    "a list of 1 MiB for a number": lambda: (GENERATE, b'{"X":' + numbers(MIB // 2) + b"}", 413),
    "a list of 4 MiB for a number": lambda: (GENERATE, b'{"X":' + numbers(2 * MIB - 10) + b"}", 413),
    "a list of 60 MiB for a number": lambda: (GENERATE, b'{"X":' + numbers(30 * MIB) + b"}", 413),
    "a list of 60,000 for a number": lambda: (GENERATE, b'{"X":' + numbers(60_000) + b"}", 400),
    "60,000 words": lambda: (GENERATE, b'{"X":1,"words":["' + b'a","' * 60_000 + b'"]}', 400),
    "15 million words": lambda: (GENERATE, b'{"X":1,"words":["' + b'a","' * 15_000_000 + b'"]}', 413),
    "60,000 members": lambda: (GENERATE, json.dumps({f"p{n}": 1 for n in range(60_000)}).encode(), 400),
    "a text of 3 MiB": lambda: (GENERATE, b'{"X":"' + b'\\"' * (3 * MIB // 2) + b'"}', 400),
    "5 million parameters": lambda: (
        INFER_PATH, tensor(b"[1]")[:-1] + b',"parameters":{"a":1' + b',"a":1' * 5_000_000 + b"}}", 413,
    ),
    "a million inputs": lambda: (INFER_PATH, b'{"inputs":[{}' + b',{"name":[]}' * MIB + b"]}", 400),
    "a million dimensions": lambda: (INFER_PATH, tensor(b"[1]", numbers(MIB)), 400),
    "an id of 60 MiB": lambda: (INFER_PATH, tensor(b"[1]")[:-1] + b',"id":"' + b"x" * (60 * MIB) + b'"}', 413),
    "60 MiB of numbers": lambda: (INFER_PATH, tensor(numbers(30 * MIB)), 400),
    "60 MiB of quotes": lambda: (INFER_PATH, tensor(b'["' + b'\\"' * (30 * MIB) + b'"]'), 400),
    "60 MiB of texts": lambda: (INFER_PATH, tensor(b"[" + b'"",' * (20 * MIB) + b'""]'), 400),
    "60 MiB of lists": lambda: (INFER_PATH, tensor(b"[" + b"[]," * (20 * MIB) + b"[]]"), 400),
    "60 MiB of brackets": lambda: (INFER_PATH, b"[" * (60 * MIB), 400),
    "60 MiB of NaN": lambda: (INFER_PATH, tensor(b"[" + b"NaN," * (15 * MIB) + b"1]"), 400),
}  # fmt: skip


def test_forms_of_megabytes(service: Service) -> None:
    """Triton 24.10 reads the body of a form on its stack."""
    before, body = pids(service), tensor(b"[" + b" " * 5 * MIB + b"3]")
    for kind in (
        "application/x-www-form-urlencoded",
        "application/json",
        "text/plain",
        "multipart/form-data; boundary=x",
    ):
        status, _, content = ask(service, INFER_PATH, body, Content_Type=kind)
        assert status == 200, content
        assert json.loads(content)["outputs"][0]["data"] == [12.0]
    assert pids(service) == before


def test_no_request_stops_the_event_loop(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    """Meanwhile the service says that it lives, and answers four honest callers."""
    before, worst, median = pids(service), dict[str, float](), statistics.median
    with Callers(service, 4) as callers:
        callers.wait_up()
        with Watchdog(service.metrics) as idle:
            time.sleep(scale(2, full=10))
        usual, num_usual = median(callers.seconds), len(callers.seconds)
        for name, make in SLOW.items():
            path, body, wanted = make()
            with Watchdog(service.metrics) as watchdog:
                status, _, content = ask(service, path, body)
            assert status == wanted, (name, content[:300])
            assert list(json.loads(content)) == ["error"]
            worst[name] = watchdog.longest
    assert not callers.failures
    slowed = median(callers.seconds[num_usual:])
    record(
        "the longest silence of the event loop",
        idle_ms=round(1000 * idle.longest, 1),
        worst_ms={name: round(1000 * seconds, 1) for name, seconds in worst.items()},
        usual_ms=round(1000 * usual, 2),
        beside_ms=round(1000 * slowed, 2),
    )
    assert max(worst.values()) < (0.05 if scale.is_full else 1.0), (worst, idle.longest)
    assert slowed < (2 if scale.is_full else 10) * usual, (slowed, usual)
    assert is_right(service)
    assert pids(service) == before


def test_no_request_is_judged_by_one_model_and_run_by_another(service: Service) -> None:
    two = (
        message(model="nobody").SerializeToString()
        + service_pb2.ModelInferRequest(model_name="chain").SerializeToString()
    )
    with grpc.insecure_channel(service.grpc) as channel, pytest.raises(grpc.RpcError, match="model_name twice"):
        channel.unary_unary(INFER)(two)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.5e-7])
def test_numbers_that_json_does_not_know(service: Service, value: float) -> None:
    body = json.dumps({"id": "[{", "inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [value]}]})
    status, _, content = ask(service, "/v2/models/chain/infer", body.encode())
    assert status == 200
    answer = json.loads(content)
    assert answer["id"] == "[{"
    np.testing.assert_equal(np.float32(answer["outputs"][0]["data"][0]), np.float32(4 * np.float32(value)))


def test_requests_that_kill_do_not_end_the_service(service: Service, scale: Scale) -> None:
    """Some that end their model's process; each is sent but once where it was alone, and then refused."""
    for number in range(scale(3, full=6)):
        before = service.metric("shoal_restarts_total")
        with shoal.Client(service.grpc, retries=0, timeout=60) as client:
            with pytest.raises(shoal.ServerError, match="ended while it had"):
                client.infer("killer", X=[[-1.0 - number]])
            service.wait(is_ready=True, seconds=30)
            after = service.metric("shoal_restarts_total")
            with pytest.raises(shoal.ServerError, match="ended while it had"):
                client.infer("killer", X=[[-1.0 - number]])  # refused
            assert client.infer("killer", X=[[2.0]])["Y"].item() == 4.0
        assert after - before == 1
        assert service.metric("shoal_restarts_total") == after
    assert is_right(service)


def test_requests_beside_a_killer_are_answered(service: Service) -> None:
    """The killer is sent to two servers at most; honest requests that were under way with it have their answers.

    A request that comes while the model has no process is refused, and not sent to any: honest clients send it again.
    """
    answers: list[float] = []

    def call(value: float, retries: int = 5) -> None:
        with shoal.Client(service.grpc, retries=retries, timeout=60) as client:
            answers.append(client.infer("killer", X=[[value]])["Y"].item())

    with ThreadPoolExecutor(9) as pool:
        killing = pool.submit(call, -99.0, retries=0)
        honest = [pool.submit(call, float(value)) for value in range(8)]
        assert isinstance(killing.exception(), shoal.ServerError)
        for future in honest:
            future.result()
    assert sorted(answers) == [2.0 * value for value in range(8)]


# --- deadlines, and leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["deadline", "cancel"])
def test_clients_that_do_not_wait(service: Service, scale: Scale, way: str) -> None:
    """Triton 24.10 ends after some hundred of these when it hears of them."""
    before, number = pids(service), scale(600, full=20_000)
    chance, lock, counts = random.Random(3), threading.Lock(), dict[str, int]()

    def call(_: int) -> None:
        with grpc.insecure_channel(service.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            ask_it, request = stub(channel), message()
            for _ in range(number // 8):
                seconds = chance.uniform(0.0005, 0.01)
                try:
                    if way == "deadline":
                        ask_it(request, timeout=seconds)
                    else:
                        future = ask_it.future(request, timeout=20)
                        time.sleep(seconds / 4)
                        future.cancel()
                        future.result()
                    outcome = "answered"
                except grpc.RpcError as error:
                    outcome = error.code().name
                except grpc.FutureCancelledError:
                    outcome = "CANCELLED"
                with lock:
                    counts[outcome] = counts.get(outcome, 0) + 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert set(counts) <= {"answered", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"}, counts
    assert counts.get("DEADLINE_EXCEEDED", 0) + counts.get("CANCELLED", 0) > number / 10, counts
    assert wait_until(lambda: service.metric("shoal_in_flight") == 0, 30)
    assert is_right(service)
    assert pids(service) == before


def test_a_drain_during_a_storm_of_deadlines(home: Path) -> None:
    with Service(home / "repository", home / "log2") as service:
        stop = threading.Event()

        def storm(_: int) -> None:
            with grpc.insecure_channel(service.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                while not stop.is_set():
                    try:
                        stub(channel)(message(), timeout=random.uniform(0.001, 0.04))
                    except grpc.RpcError as error:
                        if error.code() is grpc.StatusCode.UNAVAILABLE:
                            return

        with ThreadPoolExecutor(8) as pool, Callers(service, 8) as callers:
            storming = [pool.submit(storm, number) for number in range(4)]
            time.sleep(3)
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(30) == 0
            stop.set()
            for future in storming:
                future.result()
    assert callers.num_answers
    turned_away = ("stopping", "No Triton answers", "unavailable", "rejected the request")
    assert not [failure for failure in callers.failures if not any(words in failure for words in turned_away)]
