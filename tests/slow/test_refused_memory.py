"""Large requests that are refused, again and again: no process of the service grows, and neither does shared memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

import shoal
from tests.conftest import Scale
from tests.support.planted import write
from tests.support.service import INFER, STREAM, Service, wait_until
from tests.support.storms import memory_mib

SLACK_MIB = 64.0  # 500 requests of 32 MiB are 16,000
CODE = """
import numpy as np

from shoal.kit.component.base import Component
from shoal.errors import InputError


class Refusing(Component):
    def check(self, inputs):
        if inputs["X"][0, 0] < 0:
            raise InputError("X is negative.", "Send another.")

    def run(self, batch):
        if batch["X"][0, 0] == 1:
            raise InputError("X is 1.", "Send another.")
        if batch["X"][0, 0] == 2:
            raise KeyError("unexpected")
        return {"Y": batch["X"][:, :1] * np.float32(2)}


TritonPythonModel = Refusing.for_triton()
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "public" value { string_value: "true" } }
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("refusing")
    write(folder / "repository" / "refusing" / "config.pbtxt", CONFIG)
    write(folder / "repository" / "refusing" / "1" / "model.py", CODE)
    with Service(folder / "repository", folder / "log") as running:
        yield running


def used(service: Service) -> dict[str, float]:
    """Memory in MiB: of the gateway, of Triton, of its stubs, and of the shared memory that is really there."""
    regions = [Path("/dev/shm") / name for name in service.regions()]
    return {
        "gateway": memory_mib(service.process.pid),
        "Triton": memory_mib(*(process.pid for process in service.servers())),
        "stubs": memory_mib(*(process.pid for process in service.stubs())),
        "shared": sum(path.stat().st_blocks for path in regions) * 512 / 2**20,
    }


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by the client's own HTTP library
def test_refused_requests_of_32_mib(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    """Memory after 80 (in full, 500) as after 20: refused by the gateway, by ``check`` and by ``run``, and failed."""
    clients = [shoal.Client(service.grpc, retries=0), shoal.Client(service.http, protocol="http", retries=0)]
    messages = {-1.0: "X is negative", 1.0: "X is 1", 2.0: "failed on this request"}
    looks = list[dict[str, float]]()
    array = np.zeros((1, 2**23), np.float32)
    stray = service_pb2.ModelInferRequest(model_name="nobody")
    stray.inputs.add(name="X", datatype="FP32", shape=array.shape)
    stray.raw_input_contents.append(array.tobytes())
    for number in range(scale(80, full=500)):
        array[0, 0] = value = [-1.0, 1.0, 2.0][number // 2 % 3]
        with pytest.raises(shoal.ShoalError, match=messages[value]):
            clients[number % 2].infer("refusing", X=array)
        if number % 5 == 0:
            with grpc.insecure_channel(service.grpc) as channel:
                (answer,) = channel.stream_stream(STREAM)(iter([stray.SerializeToString()]))
                assert b"unknown model" in answer
                with pytest.raises(grpc.RpcError, match="unknown model"):
                    channel.unary_unary(INFER)(stray.SerializeToString())
        if number % 10 == 9 and number > 10:
            looks.append(used(service))
    # Triton's allocator keeps one to three requests, never the same number: looks are compared, not two moments
    before, after = (
        {name: pick(look[name] for look in some) for name in looks[0]}
        for pick, some in ((max, looks[:3]), (min, looks[-3:]))
    )
    grown = {name: round(after[name] - mib) for name, mib in before.items()}
    assert max(grown.values()) <= SLACK_MIB, looks
    record("refused requests of 32 MiB", after_20=before, grown_mib=grown)
    for client in clients:
        assert client.infer("refusing", X=[[3.0]])["Y"].item() == 6.0
        client.close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_client_keeps_nothing(service: Service, protocol: Literal["grpc", "http"]) -> None:
    """Neither of a refused request nor of a refused stream; without a garbage collector."""
    with shoal.Client(getattr(service, protocol), protocol=protocol, retries=0) as client:
        refs: list[weakref.ref[Any]] = []
        gc.disable()
        try:
            for _ in range(3):
                array = np.full((1, 2), -1, np.float32)
                refs.append(weakref.ref(array))
                with pytest.raises(shoal.InputError, match="X is negative"):
                    client.infer("refusing", X=array)
                with pytest.raises(shoal.ShoalError), client.stream("refusing", X=array) as replies:
                    list(replies)
                del array, replies
            assert wait_until(lambda: not any(ref() is not None for ref in refs), 10)
        finally:
            gc.enable()
