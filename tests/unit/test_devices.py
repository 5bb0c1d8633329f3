"""The door between Triton and arrays, with a pretended GPU: what crosses, what does not, and what is written down."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import SetupError
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.ledger import ACROSS, BATCHES, DOWN, ROWS, UP, CopyEdge, CopyTotals, Ledger, Metrics
from shoal.kit.component.spec import Array, Arrays
from shoal.kit.component.tensors import Device
from tests.support.fake_triton import InferenceRequest, Stub, Tensor
from tests.support.once import ROOT
from tests.support.pretend import PretendGpu

CONFIG: dict[str, Any] = {
    "name": "double",
    "max_batch_size": 8,
    "dynamic_batching": {},
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
}


class Double(Component):
    """Doubles X on whatever device it is."""

    def setup(self, _: Context) -> None:
        self.seen: list[Array] = []

    def run(self, batch: Arrays) -> Arrays:
        self.seen.append(weakref.ref(batch["X"]))
        assert self.context.device.owns(batch["X"])
        return {"Y": batch["X"] * 2}


class Turned(Double):
    """Gives a view that is not in C order."""

    def run(self, batch: Arrays) -> Arrays:
        return {"Y": (batch["X"].T * 2).T}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGpu:
    device = PretendGpu()
    monkeypatch.setattr(Device, "from_triton", classmethod(lambda *_: device))
    return device


def request(*rows: list[float], is_on_gpu: bool = False) -> InferenceRequest:
    return InferenceRequest([Tensor("X", np.array(rows, np.float32), is_on_gpu=is_on_gpu)])


def answers(responses: list[Any]) -> list[Any]:
    return [r.error().message() if r.has_error() else r.output_tensors()[0]._array.tolist() for r in responses]


def test_requests_on_the_host_go_up_as_one(gpu: PretendGpu, tmp_path: Path) -> None:
    stub = Stub(Double, tmp_path, CONFIG, kind="GPU")
    assert answers(stub.infer(request([1, 2]), request([3, 4], [5, 6]))) == [[[2, 4]], [[6, 8], [10, 12]]]
    assert {edge: (t.copies, t.num_bytes) for edge, t in gpu.ledger.traffic.items()} == {CopyEdge("X", UP): (1, 24)}
    assert gpu.ledger.events == {BATCHES: 1, ROWS: 3}


def test_tensors_on_the_gpu_are_taken_as_they_are(gpu: PretendGpu, tmp_path: Path) -> None:
    stub = Stub(Double, tmp_path, CONFIG, kind="GPU")
    tensor = request([1, 2], is_on_gpu=True)
    assert answers(stub.infer(tensor)) == [[[2, 4]]]
    assert gpu.ledger.traffic == {}


def test_one_batch_may_hold_both(gpu: PretendGpu, tmp_path: Path) -> None:
    stub = Stub(Double, tmp_path, CONFIG, kind="GPU")
    got = answers(stub.infer(request([1, 2]), request([3, 4], is_on_gpu=True), request([5, 6])))
    assert got == [[[2, 4]], [[6, 8]], [[10, 12]]]
    assert gpu.ledger.traffic[CopyEdge("X", UP)].num_bytes == 16  # the two that came on the host
    assert gpu.ledger.events[BATCHES] == 1


def test_a_component_on_the_host_fetches_what_another_left_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "_download", lambda self, tensor: np.array(tensor._array))
    stub = Stub(Double, tmp_path, CONFIG)
    assert answers(stub.infer(request([1, 2], is_on_gpu=True))) == [[[2, 4]]]
    ledger = stub._model.component.context.device.ledger
    assert {edge: t.num_bytes for edge, t in ledger.traffic.items()} == {CopyEdge("X", DOWN): 8}


def test_a_tensor_on_another_gpu_is_copied_across(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendGpu, "_adopt", lambda self, array: (torch.as_tensor(array._array), ACROSS))
    gpu.put(Tensor("X", np.zeros(3, np.int64), is_on_gpu=True), "X")
    assert gpu.ledger.traffic[CopyEdge("X", ACROSS)].num_bytes == 24


@pytest.mark.usefixtures("gpu")
def test_outputs_leave_in_c_order(tmp_path: Path) -> None:
    stub = Stub(Turned, tmp_path, CONFIG, kind="GPU")
    assert answers(stub.infer(request([1, 2], [3, 4]))) == [[[2, 4], [6, 8]]]


@pytest.mark.usefixtures("gpu")
def test_nothing_is_kept_after_execute(tmp_path: Path) -> None:
    stub = Stub(Double, tmp_path, CONFIG, kind="GPU")
    stub.infer(request([1, 2]), request([3, 4], is_on_gpu=True))
    gc.collect()
    assert [seen() for seen in stub._model.component.seen] == [None]  # type: ignore[attr-defined]


def test_host_arrays_cross_nothing() -> None:
    device, array = Device(), np.zeros(3)
    assert device.put(array, "X") is array
    assert device.fetch(array, "X") is array
    assert device.fetch(torch.zeros(2), "X").tolist() == [0, 0]
    texts = np.array([b"a"], np.object_)
    assert PretendGpu().put(texts, "X") is texts
    assert device.ledger.traffic == {}


def test_a_gpu_that_is_not_there_is_named() -> None:
    for library in ("cupy", "torch"):
        with pytest.raises(SetupError, match=r"GPU 7; its process sees \d GPUs|cupy is not installed"):
            Device("gpu", 7, library).prepare()


@pytest.mark.usefixtures("may_start_processes")
def test_the_device_is_chosen_before_a_gpu_library_is_imported(tmp_path: Path) -> None:
    """Also by the encoder's backend, whose array library is torch."""
    code = """
import json, sys
from pathlib import Path
from shoal.kit.component import tensors
from tests.support.fake_triton import Stub
from shoal.authoring.repository.loading import component_class
from shoal.serving.server.runtime import BACKENDS

choose = tensors.Device.from_triton.__func__
def spy(cls, args, library):
    assert not {"torch", "cupy", "pylibcudf"} & set(sys.modules), "too early"
    print("chosen", choose(cls, args, library))
    return choose(cls, args, library)
tensors.Device.from_triton = classmethod(spy)
try:
    Stub(component_class(BACKENDS / "pytorch" / "model.py"), Path(sys.argv[1]), json.loads(sys.argv[2]), kind="GPU")
except Exception as error:
    print(type(error).__name__, error)
"""
    import json

    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(CONFIG)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("chosen Device(kind='gpu', index=0, library='torch')"), run.stderr
    assert "This model is placed on GPU 0; its process sees 0 GPUs." in run.stdout or torch.cuda.is_available()


def test_ledgers_add_up() -> None:
    ledger = Ledger()
    ledger.record("X", UP, 10, 0.5)
    ledger.record("X", UP, 5, 0.25, copies=2)
    assert ledger.traffic == {CopyEdge("X", UP): CopyTotals(3, 15, 0.75)}
    assert CopyTotals(3, 15, 0.75) - CopyTotals(1, 10, 0.5) == CopyTotals(2, 5, 0.25)


def test_metrics_follow_the_ledger() -> None:
    from tests.support.fake_triton import MetricFamily

    ledger = Ledger()
    metrics = Metrics(ledger, MetricFamily, "double", "double_0_0", seconds=60)
    ledger.record("X", UP, 10)
    ledger.count(ROWS, 3)
    ledger.tell(batching="static")
    ledger.count("vllm:prompt_tokens", 5)
    for running in (4, 2):
        ledger.levels["vllm:num_requests_running"] = running
        metrics.publish()
    numbers = {key: metric.number for key, metric in metrics._metrics.items()}
    assert numbers == {
        ("shoal_copies_total", "X", UP): 1,
        ("shoal_copied_bytes_total", "X", UP): 10,
        ("shoal_rows_total",): 3,
        ("shoal_component_info",): 1,
        ("vllm:prompt_tokens_total",): 5,
        ("vllm:num_requests_running",): 2,
    }
    assert metrics._metrics["shoal_component_info",].labels.items() >= {("model", "double"), ("batching", "static")}
    assert metrics._metrics["shoal_rows_total",].labels == {"model": "double", "instance": f"double_0_0-{os.getpid()}"}
    metrics.close()


def test_a_server_without_metrics_answers_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    from tests.support.fake_triton import MetricFamily

    class Refusing(MetricFamily):
        def Metric(self, labels: Any) -> Any:  # noqa: ARG002, N802
            raise RuntimeError("metrics are off")

    ledger = Ledger()
    ledger.count(ROWS)
    metrics = Metrics(ledger, Refusing, "double", "double_0_0", seconds=0.01)
    metrics._thread.join(5)
    assert "model double publishes no metrics" in caplog.text
    metrics.close()


def test_on_a_gpu_torch_does_not_use_cudnns_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for each new length of text, which takes longer than the text."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    chosen: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        Device("gpu", 0, "torch").prepare()
        assert chosen == [0]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)
