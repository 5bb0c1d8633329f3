"""Fields of a configuration that Triton obeys only with a flag: the server gets it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.launch_flags import find_launch_flags
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.plan import Plan
from shoal.clients.client.client import Client
from shoal.errors import ServerError
from shoal.serving.server.container import container_command
from shoal.serving.server.launch import serve
from tests.support.planted import config, write

COUNTS = """import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.number = 0

    def execute(self, requests):
        time.sleep(0.4)
        self.number += len(requests)
        y = np.full((1, 4), self.number, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]) for _ in requests]
"""
LIMIT = 'rate_limiter { resources [ { name: "R" global: true count: 1 } ] }'


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The same model three times: as it is, with a cache, and with two instances of which one runs at a time."""
    changes = {
        "plain": ("KIND_CPU", "KIND_CPU count: 2"),
        "cached": ("", ""),
        "limited": ("KIND_CPU", f"KIND_CPU {LIMIT} count: 2"),
    }
    for name, (old, new) in changes.items():
        text = config(name, batching="").replace(old, new)
        more = "response_cache { enable: true }\n" if name == "cached" else ""
        write(tmp_path / "models" / name / "config.pbtxt", text + more)
        write(tmp_path / "models" / name / "1" / "model.py", COUNTS)
    return tmp_path


def test_a_cache_and_a_limit_take_effect(models: Path) -> None:
    with serve(models / "models", cache_mib=2) as server, Client(server.grpc_url) as client:

        def ask(model: str, value: float = 1.0) -> float:
            return float(client.infer(model, X=[[value] * 4])["Y"][0, 0])

        def seconds(model: str) -> float:
            begin = time.monotonic()
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(ask, [model] * 2, (1.0, 2.0)))
            return time.monotonic() - begin

        assert [ask("cached", value) for value in (1.0, 1.0, 2.0, 1.0)] == [1, 1, 2, 1]
        assert seconds("plain") < 0.75 < seconds("limited")


def test_flags_are_those_that_the_configurations_need(models: Path) -> None:
    expected = ["--cache-config=local,size=67108864", "--rate-limit=execution_count"]
    assert find_launch_flags(models / "models") == expected
    plan = Plan(target="26.06")
    repository = compose(["cached", "limited"], models / "r", projects=[models], plan=plan)
    assert read_manifest(repository)["launch"]["flags"] == expected
    assert find_launch_flags(repository, 3) == ["--cache-config=local,size=3145728", expected[1]]
    command = container_command(repository, cache_mib=3)
    assert command.count("--cache-config=local,size=3145728") == command.count("--cache-config") == 1
    plain = compose("plain", models / "plain", projects=[models], plan=plan)
    assert find_launch_flags(plain) == []


def test_a_component_does_not_start_where_its_backend_would_choose(tmp_path: Path) -> None:
    """Triton accepts KIND_MODEL for every backend; the component refuses it, and serve reports the reason."""
    repository = compose("softmax", tmp_path / "r")
    path = repository / "softmax" / "config.pbtxt"
    path.write_text(path.read_text(encoding="utf-8").replace("KIND_CPU", "KIND_MODEL"), encoding="utf-8")
    assert [finding.rule.id for finding in check(repository)] == ["kind-unsupported"]
    with pytest.raises(ServerError, match="Its instance has KIND_MODEL, and the component computes with KIND_CPU or"):
        serve(repository)
