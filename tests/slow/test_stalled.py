"""Clients that send by half, do not read, or send many small things keep no others waiting."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from shoal.system.processes import find_process, processes
from tests.conftest import Scale
from tests.support.counts import write_counts
from tests.support.half import Half
from tests.support.planted import write
from tests.support.service import Service, are_gone, make_repository, wait_until

INFER, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"
SLOTS = 4
OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]  # a connection, with a window of 64 KiB


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("stalled")
    write_counts(make_repository(folder), SLOTS)
    with Service(folder / "repository", folder / "log", "--expose", "counts") as running:
        yield running


def infer(value: float = 3.0, model: str = "chain", **fields: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.float32(value).tobytes())
    return request


def counts(**values: float) -> Any:
    request = service_pb2.ModelInferRequest(model_name="counts", id="mine")
    for name, value in values.items():
        dtype = "FP32" if name in ("DELAY", "FIRST") else "INT32"
        request.inputs.add(name=name, datatype=dtype, shape=[1, 1])
        request.raw_input_contents.append(np.array(value, np.float32 if dtype == "FP32" else np.int32).tobytes())
    return request


def call(channel: Any) -> float:
    """Seconds until the answer to a small request."""
    start = time.monotonic()
    answer = channel.unary_unary(INFER, response_deserializer=service_pb2.ModelInferResponse.FromString)(
        infer().SerializeToString(), timeout=60
    )
    assert np.frombuffer(answer.raw_output_contents[0], np.float32) == 12
    return time.monotonic() - start


def talk(url: str, *requests: Any) -> list[Any]:
    """Answers in a stream of these requests, or messages."""
    contents = [each if isinstance(each, bytes) else each.SerializeToString() for each in requests]
    with grpc.insecure_channel(url, OWN) as channel:
        stream = channel.stream_stream(STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString)
        return list(stream(iter(contents), timeout=60))


def longest(channel: Any, seconds: float) -> float:
    """Longest time of a small request within some seconds of them."""
    end, found = time.monotonic() + seconds, [call(channel)]
    while time.monotonic() < end:
        found.append(call(channel))
        time.sleep(0.02)
    return max(found)


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_messages_that_are_sent_by_half(service: Service, path: str) -> None:
    """Honest calls are answered beside 100 messages of 63 MB from one address, which gets its share of memory."""
    with grpc.insecure_channel(service.grpc, OWN) as channel, ExitStack() as stack:
        call(channel)
        halves = [stack.enter_context(Half(service.grpc, path, 63 * 2**20)) for _ in range(100)]
        assert longest(channel, 12) < 3
        assert sum(half.has_ended for half in halves) >= 60
        assert sum(half.num_sent for half in halves) < 1.5 * 2**30


def many(kind: str) -> bytes:
    """A message with more of one thing than anything needs."""
    request = infer()
    if kind == "parameters":
        added = service_pb2.ModelInferRequest()
        added.parameters["a"].int64_param = 1
        return bytes(request.SerializeToString() + added.SerializeToString() * 10**6)
    if kind == "dimensions":
        request.inputs[0].shape.extend([1] * 10**6)
    if kind == "of an input":
        added = service_pb2.ModelInferRequest.InferInputTensor()
        added.parameters["a"].int64_param = 1
        part = added.SerializeToString() * 10**6
        return bytes(b"\x2a" + varint(len(part)) + part + request.SerializeToString())
    if kind == "outputs":
        added = service_pb2.ModelInferRequest()
        added.outputs.add(name="Z")
        return bytes(request.SerializeToString() + added.SerializeToString() * 10**6)
    if kind == "raw contents":
        return bytes(request.SerializeToString() + b"\x3a\0" * 10**6)
    if kind == "strings":
        del request.raw_input_contents[:]
        request.inputs[0].datatype = "BYTES"
        request.inputs[0].shape[1] = 10**6
        request.inputs[0].contents.bytes_contents.extend([b""] * 10**6)
    if kind == "id":
        request.id = "x" * 2**20
    return bytes(request.SerializeToString())


def varint(number: int) -> bytes:
    found = b""
    while number >= 0x80:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


@pytest.mark.parametrize(
    "kind", ["parameters", "dimensions", "of an input", "outputs", "raw contents", "strings", "id"]
)
def test_a_million_of_something(service: Service, kind: str, scale: Scale) -> None:
    content = many(kind)
    with grpc.insecure_channel(service.grpc, OWN) as channel, grpc.insecure_channel(service.grpc, OWN) as other:
        call(channel)
        sent = [other.unary_unary(INFER).future(content, timeout=60) for _ in range(4)]
        assert longest(channel, scale(1, full=2)) < 2
        for future in sent:
            assert future.exception().code() in (
                grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
            )  # fmt: skip
    answers = talk(service.grpc, content, infer(id="after"))
    assert [bool(answer.error_message) for answer in answers] == [True, False]
    assert answers[1].infer_response.id == "after"


# --- what is read ----------------------------------------------------------------------------------------------------


@contextmanager
def over_grpc(service: Service) -> Iterator[None]:
    with grpc.insecure_channel(service.grpc, OWN) as channel:
        content = counts(COUNT=10**6, SIZE=2**15).SerializeToString()
        stream = channel.stream_stream(STREAM)(iter([content]))
        yield
        stream.cancel()


@contextmanager
def over_http(service: Service) -> Iterator[None]:
    host, port = service.http.split(":")
    body = json.dumps({"COUNT": 10**6, "SIZE": 2**15}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST /v2/models/counts/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        yield


@pytest.mark.parametrize("way", [over_grpc, over_http])
def test_streams_that_are_not_read(service: Service, scale: Scale, way: Callable[[Service], Any]) -> None:
    """They lose their places, of which there are 16, to callers who read."""
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(way(service))
        assert wait_until(lambda: service.metric("shoal_streams") == 4 * SLOTS)
        start, seconds = time.monotonic(), scale(20, full=10)
        while (answers := talk(service.grpc, counts(COUNT=3)))[0].error_message:
            assert "Too many requests" in answers[0].error_message
            assert time.monotonic() - start < seconds
            time.sleep(0.2)
        assert [answer.infer_response.id for answer in answers] == ["mine"] * 3
        assert time.monotonic() - start < seconds
    assert wait_until(lambda: service.metric("shoal_in_flight") == 0, 30)


def test_a_slow_reader_of_a_model_that_is_not_full(service: Service) -> None:
    """It has 30 s for each answer, as documented."""
    with grpc.insecure_channel(service.grpc, OWN) as channel:
        stream = channel.stream_stream(STREAM)(iter([counts(COUNT=40, SIZE=2**15).SerializeToString()]))
        next(stream)
        time.sleep(6)
        assert len(list(stream)) == 39


# --- errors within a stream ------------------------------------------------------------------------------------------


def test_requests_that_are_refused_end_no_stream(service: Service) -> None:
    short, unknown = infer(id="short"), infer(model="nobody", id="unknown")
    short.raw_input_contents[0] = b""
    twice = (
        infer(id="twice").SerializeToString() + service_pb2.ModelInferRequest(model_name="other").SerializeToString()
    )
    answers = talk(service.grpc, b"\xff\xff", unknown, short, twice, infer(id="right"), counts(COUNT=2))
    found = [(answer.infer_response.id, answer.error_message) for answer in answers]
    for (request_id, message), (wanted, words) in zip(
        found[:4],
        [("", "not a Model"), ("unknown", "'nobody' is not found"), ("short", "has shape"), ("twice", "model_name")],
        strict=True,
    ):
        assert request_id == wanted
        assert words in message
    assert sorted(found[4:]) == [("mine", ""), ("mine", ""), ("right", "")]


def test_decoupled_models_and_others_in_one_stream(service: Service) -> None:
    """Triton itself aborts at this within a second; a version that it does not have counts as not decoupled."""
    server, num = service.servers()[0].pid, 400

    def send() -> Iterator[bytes]:
        yield counts(COUNT=5000).SerializeToString()
        for number in range(num):
            yield infer(number, id=f"{number}").SerializeToString()
            other = counts(COUNT=1)
            other.model_version = "9"
            yield other.SerializeToString()
            time.sleep(0.001)  # so that answers of all kinds are written at the same time
        latest = counts(COUNT=1)
        latest.model_version, latest.id = "1", "latest"
        yield latest.SerializeToString()

    with grpc.insecure_channel(service.grpc, OWN) as channel:
        stream = channel.stream_stream(STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString)
        answers = list(stream(send(), timeout=60))
    refused = [answer.error_message for answer in answers if answer.error_message]
    assert refused == ["counts has no version '9'. Leave it out for the latest one."] * num
    by_chain = [answer.infer_response for answer in answers if answer.infer_response.model_name == "chain"]
    assert [answer.id for answer in by_chain] == [f"{number}" for number in range(num)]
    values = [np.frombuffer(answer.raw_output_contents[0], np.float32).item() for answer in by_chain]
    assert values == [4.0 * number for number in range(num)]
    by_counts = [answer.infer_response.id for answer in answers if answer.infer_response.model_name == "counts"]
    assert sorted(by_counts) == ["latest"] + ["mine"] * 5000
    assert [each.pid for each in service.servers()] == [server]


def test_a_stream_that_the_stop_ends(tmp_path: Path) -> None:
    write_counts(tmp_path / "repository")
    with Service(tmp_path / "repository", tmp_path / "log", "--grace", 1) as service:
        with grpc.insecure_channel(service.grpc, OWN) as channel:
            stream = channel.stream_stream(STREAM)(iter([counts(COUNT=10**4, DELAY=0.05).SerializeToString()]))
            next(stream)
            service.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError, match="The server is stopping"):
                list(stream)
        assert service.process.wait(30) == 0


# --- a service that is killed ----------------------------------------------------------------------------------------


def test_a_killed_service_leaves_nothing(tmp_path: Path) -> None:
    """Its models' processes may be busy: one spins, one hangs, one sends answers."""
    repository = make_repository(tmp_path)
    write_counts(repository)
    service = Service(repository, tmp_path / "log", "--expose", "counts")
    write(tmp_path / "first", "spin")
    write(tmp_path / "second", "hang")
    with grpc.insecure_channel(service.grpc, OWN) as channel:
        stream = channel.stream_stream(STREAM)(iter([counts(COUNT=10**6, DELAY=0.01).SerializeToString()]))
        next(stream)
        for model in ("first", "second"):
            channel.unary_unary(INFER).future(infer(model=model).SerializeToString(), timeout=60)
        time.sleep(0.5)
        left = [each.pid for each in (*service.servers(), *service.stubs())]
        assert len(left) == 6
        regions, folders = service.regions(), find_folders(service.process.pid)
        assert regions
        assert len(folders) == 2  # the service's, with the copy of the repository, and the server's
        service.process.kill()
        service.process.wait()
        assert wait_until(
            lambda: are_gone(left) and not service.regions() and not find_folders(service.process.pid), 15
        )

        def named() -> list[int]:
            words = {each.pid: str(each.arguments()) for each in processes()}
            return [pid for pid in words if any(str(folder) in words[pid] for folder in folders)]

        assert wait_until(lambda: not named())
    assert service.process.stdout is not None
    service.process.stdout.close()


def find_folders(pid: int) -> list[Path]:
    return [path for path in Path(os.environ.get("TMPDIR", "/tmp")).glob(f"shoal-{pid}-*") if path.is_dir()]


def test_a_start_ends_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's process that hangs, of a killed service and a killed Triton; the process that watches is killed too."""
    repository = make_repository(tmp_path)
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))  # services of other tests clean up in theirs
    service = Service(repository, tmp_path / "log")
    folders = find_folders(service.process.pid)
    (server,), (stub, *_) = service.servers(), service.stubs()
    watching = [["shoal.serving.server.orphans", str(folder)] for folder in folders]
    watchers = [each.pid for each in processes() if each.arguments()[-2:] in watching]
    assert len(watchers) == len(folders) == 2
    os.kill(stub.pid, signal.SIGSTOP)
    for pid in (*watchers, service.process.pid, server.pid):
        os.kill(pid, signal.SIGKILL)
    service.process.wait()
    assert service.process.stdout is not None
    service.process.stdout.close()
    time.sleep(1)
    assert find_process(stub.pid) is not None
    assert all(folder.exists() for folder in folders)
    assert service.regions()
    with Service(repository, tmp_path / "log2") as another, Service(repository, tmp_path / "log3") as third:
        assert are_gone([stub.pid])
        assert not find_folders(service.process.pid)
        assert not service.regions()
        assert "Removed files of a server that was killed" in str(another.entries())
        assert another.is_ready()  # the third has not taken it for a leftover
        assert third.is_ready()
