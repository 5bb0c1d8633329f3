"""On a real GPU: nothing copied beyond the budget, as the profiler sees it; nothing mixed up, nothing lost.

Without one every test here is skipped. With one: ``make gpu``.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.client import Client
from shoal.clients.client.copies import Copies, read_metrics
from shoal.clients.local import Pipeline
from shoal.errors import ShoalError
from shoal.kit.component.ledger import ACROSS, DOWN, UP, CopyEdge
from shoal.kit.component.tensors import Device
from shoal.serving.server.launch import serve
from tests.conftest import Scale
from tests.gpu.conftest import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def device() -> Device:
    made = Device("gpu", 0)
    made.prepare()
    return made


# --- the ledger --------------------------------------------------------------------------------------------------


def profile(call: Any, folder: Path) -> dict[str, tuple[int, int]]:
    """Copies and bytes by direction, as CUDA's own profiling interface saw them."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        call()
        torch.cuda.synchronize()
    run.export_chrome_trace(str(folder / "trace.json"))
    seen = {UP: (0, 0), DOWN: (0, 0)}
    for event in json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]:
        direction = {"Memcpy HtoD": UP, "Memcpy DtoH": DOWN}.get(str(event.get("name", ""))[:11])
        if direction and event.get("cat") == "gpu_memcpy":
            copies, num_bytes = seen[direction]
            seen[direction] = (copies + 1, num_bytes + int(event["args"]["bytes"]))
    return seen


def by_direction(copies: Copies) -> dict[str, tuple[int, int]]:
    seen = {UP: (0, 0), DOWN: (0, 0)}
    for _, edge, traffic in copies:
        number, num_bytes = seen[edge.direction]  # a KeyError: something went across
        seen[edge.direction] = (number + traffic.copies, num_bytes + traffic.num_bytes)
    return seen


@pytest.mark.parametrize("batch", [["The cat sat."], ["The cat sat."] * 64, ["cat [SEP] cat", "", "The cat sat."]])
def test_the_ledger_is_what_the_profiler_sees(gpu_pipeline: Pipeline, batch: list[str], tmp_path: Path) -> None:
    gpu_pipeline(excerpt=batch, BERT_WEIGHT=[0.5] * len(batch))  # kernels are compiled, pools have grown
    before = gpu_pipeline.copies()
    seen = profile(lambda: gpu_pipeline(excerpt=batch, BERT_WEIGHT=[0.5] * len(batch)), tmp_path)
    moved = gpu_pipeline.copies() - before
    moved.check(gpu_pipeline.graph)
    assert {k: v[0] for k, v in by_direction(moved).items()} == {k: v[0] for k, v in seen.items()}
    for direction in (UP, DOWN):  # libcudf's sizes are counted as 8 bytes each; some are 4
        assert 0 <= by_direction(moved)[direction][1] - seen[direction][1] <= 4 * 8


def test_a_planted_copy_is_seen(gpu_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = gpu_pipeline._models["bert-large", 1]

    def call(inputs: Any) -> Any:
        import torch

        ids = torch.utils.dlpack.from_dlpack(inputs["INPUT__0"]).cpu()
        return planted.call({**inputs, "INPUT__0": ids.cuda()})

    gpu_pipeline(excerpt=["The cat sat."])
    monkeypatch.setitem(gpu_pipeline._models, ("bert-large", 1), replace(planted, ask=call))
    before = gpu_pipeline.copies()
    seen = profile(lambda: gpu_pipeline(excerpt=["The cat sat."]), tmp_path)
    moved = by_direction(gpu_pipeline.copies() - before)
    assert seen[DOWN][0] == moved[DOWN][0] + 1
    assert seen[UP][0] == moved[UP][0] + 1


def test_a_server_hands_tensors_on_from_gpu_to_gpu(gpu_pipeline: Pipeline, texts: list[str]) -> None:
    """The embedded Triton, with a stub built for NumPy 2 and for GPUs: nothing but the budget is copied."""
    if not os.environ.get("SHOAL_STUB") or not os.environ.get("SHOAL_TRITONSERVER"):
        pytest.skip("SHOAL_TRITONSERVER and SHOAL_STUB name no server and no stub that is built for NumPy 2")
    sample = texts[:64]
    expected = gpu_pipeline(excerpt=sample)
    with serve(gpu_pipeline.graph.config.folder.parent) as server, Client(server.grpc_url) as client:
        got = client.infer("ensemble_all", excerpt=sample)
        time.sleep(2)  # metrics follow within a second
        copies = read_metrics(server.metrics_url)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-3)
    copies.check(gpu_pipeline.graph)
    assert any(copy.edge.direction == UP for copy in copies)


# --- under load --------------------------------------------------------------------------------------------------


def test_streams_with_distinct_inputs_never_mix(gpu_pipeline: Pipeline, pipeline: Pipeline, texts: list[str]) -> None:
    import cupy

    sample = texts[:80]
    expected = pipeline(excerpt=sample)["SCORE"]

    def ask(index: int) -> float:
        with cupy.cuda.Stream(non_blocking=True):  # a caller's own stream is none of the pipeline's business
            return float(gpu_pipeline(excerpt=[sample[index]])["SCORE"][0, 0])

    with ThreadPoolExecutor(8) as callers:
        got = list(callers.map(ask, [*range(80)] * 5))
    np.testing.assert_allclose(got, np.tile(expected[:, 0], 5), atol=1e-3)


def test_work_of_another_stream_is_waited_for(device: Device) -> None:
    """Check that work queued on a producer's stream is done before the component reads its result."""
    import torch

    for _ in range(20):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            made = torch.zeros(1 << 22, device="cuda")
            for _ in range(50):
                made = made + 1
            taken = device.put(made, "X")
        with device.active():
            total = device.fetch(taken.sum(), "(test)")
        assert total == 50 * (1 << 22)


def test_an_exhausted_pool_is_an_error_and_then_over(gpu_pipeline: Pipeline, texts: list[str]) -> None:
    import rmm

    good = gpu_pipeline(excerpt=texts[:2])["SCORE"]
    pool = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(rmm.mr.LimitingResourceAdaptor(pool, allocation_limit=1 << 16))
    try:
        with pytest.raises(ShoalError, match="Model preprocess failed on this request"):
            gpu_pipeline(excerpt=texts[:512])
    finally:
        rmm.mr.set_current_device_resource(pool)
    assert np.array_equal(gpu_pipeline(excerpt=texts[:2])["SCORE"], good)


def test_memory_does_not_grow_over_ten_thousand_batches(gpu_pipeline: Pipeline, texts: list[str], scale: Scale) -> None:
    import torch

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def run(count: int) -> None:
        for start in range(count):
            gpu_pipeline(excerpt=[texts[(start + k) % len(texts)] for k in range(1 + start % 32)])

    run(500)
    before = used()
    run(scale(2_000, 10_000))
    assert used() - before <= 16 * 2**20


def test_a_tensor_on_another_gpu_is_copied_across(device: Device) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    taken = device.put(torch.arange(8, device="cuda:1"), "X")
    assert device.owns(taken)
    assert device.ledger.traffic[CopyEdge("X", ACROSS)].copies == 1
    assert device.fetch(taken, "(test)").tolist() == list(range(8))
