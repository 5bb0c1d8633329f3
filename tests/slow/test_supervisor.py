"""``shoal serve`` under what happens to servers: killed, hanging, lying and leaking processes."""

from __future__ import annotations

import os
import queue
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

import shoal
from tests.conftest import Scale
from tests.support.service import Callers, Service, make_repository, wait_until

NOTICED, HEALTHY, ISOLATED = 2.0, 15.0, 5.0  # seconds
SLACK = 1.0  # of a machine that does other things as well


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    make_repository(folder)
    return folder


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    with Service(home / "repository", home / "log", "--max-restarts", 1000) as running:
        yield running


def test_killed_processes(service: Service, scale: Scale, record: Callable[..., None]) -> None:
    regions, noticed, healthy = len(service.regions()), [], []
    with Callers(service) as callers:
        for _ in range(scale(3, full=100)):
            time.sleep(random.uniform(0.3, scale(1, full=8)))
            os.kill(random.choice(service.stubs()).pid, signal.SIGKILL)
            noticed.append(service.wait(is_ready=False, seconds=NOTICED + SLACK))
            healthy.append(service.wait(is_ready=True, seconds=HEALTHY))
    assert callers.num_answers > 100
    assert not callers.unexpected()
    assert wait_until(lambda: len(service.regions()) == regions)  # the old server is on its way out
    assert len(service.servers()) == 1
    record(
        "killed processes of models",
        kills=len(noticed),
        noticed_s=round(max(noticed), 2),
        healthy_s=round(max(healthy), 2),
        answers=callers.num_answers,
        failures=len(callers.failures),
    )


def ask_in_one_stream(service: Service, *models: str) -> list[Any]:
    """Answers of models to 1.0, one after the other: a value, or an error."""
    answers: queue.Queue[Any] = queue.Queue()
    given = triton_grpc.InferInput("X", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    heard = []
    with triton_grpc.InferenceServerClient(service.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for model in models:
            client.async_stream_infer(model, [given])
            result, error = answers.get(timeout=10)
            heard.append(str(error) if error else result.as_numpy("Y").item())
    return heard


@pytest.mark.parametrize("what", ["hang", "raise", "garbage", "stopped"])
def test_a_model_that_is_not_well(service: Service, home: Path, what: str) -> None:
    restarts = service.metric("shoal_restarts_total")
    if what == "stopped":
        os.kill(next(stub.pid for stub in service.stubs() if "first_0_0" in stub.arguments()), signal.SIGSTOP)
    else:
        (home / "first").write_text(what, encoding="utf-8")
    try:
        assert service.wait(is_ready=False, seconds=ISOLATED + SLACK) < ISOLATED + SLACK
        with shoal.Client(service.grpc, retries=0) as client:
            assert client.infer("other", X=[[1.0]])["Y"][0, 0] == 2  # isolated
            with pytest.raises(shoal.ServerError, match="unavailable"):
                client.infer("chain", X=[[1.0]])
        heard = ask_in_one_stream(service, "other", "chain", "other")
        assert heard[::2] == [2, 2]  # in one stream, too
        assert heard[1].startswith("chain is unavailable: ")
        with shoal.Client(service.http, protocol="http", retries=0) as client:
            with pytest.raises(shoal.ServerError, match="unavailable"):
                client.infer("first", X=[[1.0]])
            assert not client.is_ready("first")
            assert client.is_ready("other")
        assert '"chain": "' in service.get("/health/ready")[1]
    finally:
        (home / "first").unlink(missing_ok=True)
    service.wait(is_ready=True, seconds=HEALTHY)
    assert service.metric("shoal_restarts_total") > restarts
    told = [entry for entry in service.entries() if entry.get("kind") in ("hangs", "wrong")]
    assert told[-1]["model"] == "first"
    assert told[-1]["level"] == "error"
