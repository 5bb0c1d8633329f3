"""Hostile requests of many kinds in random order: the service refuses each, and answers honest ones meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
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
from tests.support.counts import write_counts
from tests.support.planted import write
from tests.support.service import Service, make_repository
from tests.support.storms import memory_mib
from tests.support.watchdog import Watchdog

INFER, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"
CALLERS = 4
MORE_MIB = 64.0  # that memory and /dev/shm may grow by
ODD = [0, -1, 1, 2**31, 2**63, 2**64, 10**30, "1", "", True, None, 1.5, [], {}]
RESERVED = [
    "classification", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "shared_memory_region",
    "shared_memory_byte_size", "shared_memory_offset", "binary_data", "binary_data_output", "binary_data_size",
    "triton_enable_empty_final_response", "triton_x",
]  # fmt: skip

TEXTS = """
from shoal import Component, InputError


class Texts(Component):
    def check(self, inputs):
        if any(len(text) > 64 for text in inputs["TEXT"].ravel()):
            raise InputError("A text has more than 64 bytes.", "Shorten it.")

    def run(self, batch):
        return {"SAME": batch["TEXT"]}


TritonPythonModel = Texts.for_triton()
"""
TEXTS_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "SAME" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "public" value { string_value: "true" } }
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    repository = make_repository(tmp_path)
    write(repository / "texts" / "config.pbtxt", TEXTS_CONFIG)
    write(repository / "texts" / "1" / "model.py", TEXTS)
    write_counts(repository)
    with Service(repository, tmp_path / "log", "--expose", "counts", "--max-request-mib", 16) as running:
        yield running


# --- kinds of requests ----------------------------------------------------------------------------------------------


def number(chance: random.Random) -> int:
    """Mostly small, sometimes large: how many members, values or parameters."""
    return chance.choices([1, 7, 100, 1000, 10_000, 100_000], [20, 20, 20, 20, 5, 1])[0]


def infer_json(chance: random.Random) -> tuple[str, bytes]:
    """An inference request, of which some parameters or its id are odd."""
    model, tensor, value, out = chance.choice([("chain", "X", 3.0, "Z"), ("texts", "TEXT", "a", "SAME")])
    datatype = "FP32" if tensor == "X" else "BYTES"
    shape = chance.choice([[1, 1], [1, 0], [0, 1], [1, 2], [9, 1]])
    given = {"name": tensor, "datatype": datatype, "shape": shape, "data": [value] * (shape[0] * shape[1])}
    request: dict[str, Any] = {"inputs": [given], "outputs": [{"name": out}]}
    place = chance.choice([request, given, request["outputs"][0]])
    match chance.choice(["reserved", "many", "id", "outputs"]):
        case "reserved":
            place["parameters"] = {chance.choice(RESERVED): chance.choice(ODD) for _ in range(chance.randint(1, 3))}
        case "many":
            place["parameters"] = {f"p{k}": k for k in range(number(chance))}
        case "id":
            request["id"] = chance.choice(["x" * number(chance), 3, None, "\n\x1b[31m"])
        case "outputs":
            request["outputs"] = [{"name": chance.choice([out, "nothing", ""])}] * min(number(chance), 1000)
    return f"/v2/models/{model}/infer", json.dumps(request).encode()


def generate_json(chance: random.Random) -> tuple[str, bytes]:
    """A request of the generate extension: long lists, many members, or values of the wrong kind."""
    what = chance.choice(["generate", "generate_stream"])
    match chance.choice(["long", "texts", "members", "odd", "bytes"]):
        case "long":
            return f"/v2/models/chain/{what}", json.dumps({"X": [1.5] * number(chance)}).encode()
        case "texts":
            return f"/v2/models/texts/{what}", json.dumps({"TEXT": ["stop"] * number(chance)}).encode()
        case "members":
            return f"/v2/models/counts/{what}", json.dumps({f"m{k}": k for k in range(number(chance))}).encode()
        case "odd":
            values = {name: chance.choice(ODD) for name in ("COUNT", "DELAY", "id", "parameters", "priority")}
            return f"/v2/models/counts/{what}", json.dumps({**values, "COUNT": chance.choice(ODD[1:])}).encode()
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"\xff"',
        b'{"COUNT": "\\ud800"}',
        b'{"COUNT": 1e999}',
        b"\xff\xfe",
        b"{}" * 9,
    ]
    return f"/v2/models/counts/{what}", chance.choice(bodies)


def refused_texts(chance: random.Random) -> tuple[str, bytes]:
    """A text that the component refuses, of up to 4 MiB."""
    text = "x" * chance.choice([100, 10_000, 2**22])
    given = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    return "/v2/models/texts/infer", json.dumps({"inputs": [given]}).encode()


def message(chance: random.Random) -> bytes:
    """An inference request over gRPC with odd parameters, an odd id, or fields without a meaning."""
    request = service_pb2.ModelInferRequest(model_name=chance.choice(["chain", "texts", "counts", "nobody"]))
    request.inputs.add(name=chance.choice(["X", "TEXT", "COUNT", "stop"]), datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.float32(3).tobytes())
    place = chance.choice(
        [request, request.inputs[0], request.outputs.add(name=chance.choice(["Z", "SAME", "NUMBER"]))]
    )
    match chance.choice(["reserved", "many", "id", "shape", "bytes"]):
        case "reserved":
            kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
            value = chance.choice(
                [each for each in ODD if type(each) in kinds and (type(each) is not int or each < 2**63)]
            )
            setattr(place.parameters[chance.choice(RESERVED)], kinds[type(value)], value)
        case "many":
            for k in range(number(chance)):
                place.parameters[f"p{k}"].int64_param = k
        case "id":
            request.id = "i" * number(chance)
        case "shape":
            request.inputs[0].shape.extend([1] * number(chance))
        case "bytes":
            content = request.SerializeToString()
            cut = chance.randrange(len(content))
            return bytes(content[:cut] + chance.randbytes(3) + content[cut:])
    return bytes(request.SerializeToString())


# --- ways to send them ----------------------------------------------------------------------------------------------


class Caller:
    """One client that sends requests of all kinds, one after the other, and counts the outcomes."""

    def __init__(self, service: Service, seed: int) -> None:
        self._service, self._chance = service, random.Random(seed)
        self._http = http.client.HTTPConnection(service.http, timeout=30)
        self._channel = grpc.insecure_channel(service.grpc, [("grpc.use_local_subchannel_pool", 1)])
        self.outcomes = Counter[str]()

    def send(self) -> None:
        """Send one request, of a kind by chance."""
        match self._chance.choice(
            ["infer", "infer", "generate", "generate", "text", "unary", "unary", "stream", "half"]
        ):
            case "infer":
                outcome = self._post(*infer_json(self._chance))
            case "generate":
                outcome = self._post(*generate_json(self._chance))
            case "text":
                outcome = self._post(*refused_texts(self._chance))
            case "half":
                outcome = self._half()
            case way:
                outcome = self._call(way, message(self._chance))
        self.outcomes[outcome] += 1

    def _post(self, path: str, body: bytes) -> str:
        try:
            self._http.request("POST", path, body)
            reply = self._http.getresponse()
            content = reply.read()
        except (http.client.HTTPException, OSError):  # closed before all was sent
            self._http.close()
            return "closed"
        return "traceback" if b"Traceback" in content or b"/model.py" in content else str(reply.status)

    def _call(self, way: str, content: bytes) -> str:
        try:
            if way == "unary":
                self._channel.unary_unary(INFER)(content, timeout=30)
                return "OK"
            call = self._channel.stream_stream(STREAM)(iter([content]), timeout=30)
            for _, _ in zip(range(self._chance.randint(0, 3)), call, strict=False):
                pass
            call.cancel()
            return "left"
        except grpc.RpcError as error:
            return "traceback" if "Traceback" in error.details() else str(error.code().name)

    def _half(self) -> str:
        """A body that is announced, and of which the end never comes."""
        host, port = self._service.http.split(":")
        head = f"POST /v2/models/chain/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {2**22}\r\n\r\n"
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + b"x" * self._chance.choice([0, 1, 2**18]))
        return "half"

    def close(self) -> None:
        self._http.close()
        self._channel.close()


def test_hostile_requests_in_random_order(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    """Nothing restarts or grows, no answer is the service's own fault, and honest requests are right throughout."""
    total, sent, lock = scale(4_000, full=100_000), 0, threading.Lock()
    processes = [service.process.pid, *(each.pid for each in (*service.servers(), *service.stubs()))]
    before, slowest = dict[str, float](), 0.0

    def usage() -> dict[str, float]:
        sizes = [path.stat().st_size for path in Path("/dev/shm").iterdir() if path.name in service.regions()]
        return {"memory": memory_mib(*processes), "/dev/shm": sum(sizes) / 2**20}

    def honest() -> float:
        start = time.monotonic()
        for url, protocol in ((service.grpc, "grpc"), (service.http, "http")):
            with shoal.Client(url, protocol=protocol, retries=3) as client:
                assert client.infer("chain", X=[[3.0]])["Z"].item() == 12.0
                assert client.infer("texts", TEXT=[["a"]])["SAME"].item() == b"a"
        return time.monotonic() - start

    def attack(caller: Caller) -> None:
        nonlocal sent, before, slowest
        while True:
            with lock:
                sent, mine = sent + 1, sent
            if mine >= total:
                return
            caller.send()
            if mine == total // 10:  # by then, buffers and pools have their sizes
                before = usage()
            if mine % 100 == 99:
                slowest = max(slowest, honest())

    callers = [Caller(service, seed) for seed in range(CALLERS)]
    start = time.monotonic()
    with Watchdog(service.metrics) as watchdog, ThreadPoolExecutor(CALLERS) as pool:
        for done in [pool.submit(attack, caller) for caller in callers]:
            done.result()
    seconds = time.monotonic() - start
    outcomes = sum((caller.outcomes for caller in callers), Counter[str]())
    for caller in callers:
        caller.close()
    time.sleep(1)
    more = {name: round(value - before[name], 1) for name, value in usage().items()}
    record(
        "hostile requests in random order",
        requests=total, seconds=round(seconds), outcomes=dict(outcomes), more_mib=more,
        slowest_honest=round(slowest, 2), silence_ms=round(1000 * watchdog.longest),
    )  # fmt: skip
    assert service.metric("shoal_restarts_total") == 0
    faults = ("traceback", "INTERNAL", "UNKNOWN", "UNAVAILABLE")
    assert not {name for name in outcomes if name.startswith("5") or name in faults}, outcomes
    assert max(more.values()) <= MORE_MIB, more
    assert slowest < 10
    assert watchdog.longest < (0.25 if scale.is_full else 1.0)  # the callers share the processors
