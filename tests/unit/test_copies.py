"""The whole pipeline on a pretended GPU: same answers, and nothing copied beyond the budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.plan import Plan, Tuning
from shoal.clients import local
from shoal.clients.client.copies import Copies
from shoal.clients.local import Pipeline, load
from shoal.errors import ShoalError
from shoal.kit.component.ledger import (
    ACROSS,
    BATCHES,
    CONTROL,
    DOWN,
    EXACT,
    EXACT_ROWS,
    SETUP,
    UP,
    CopyEdge,
    CopyTotals,
)
from shoal.kit.component.spec import Array
from shoal.readability import reader
from tests.support.emulation import EmulatedText
from tests.support.pretend import PretendGpu

GPU = 2
TEXTS = ["The cat sat.", "cat [SEP] cat", "", "Naïve 漢字 🐟, isn't it?"]


class StandIn:
    """nvForest's calls, over Treelite's own engine: arrays of the device in and out."""

    def Handle(self, stream: int) -> int:  # noqa: N802
        return stream

    def load_model(self, path: str, **options: Any) -> Any:
        import treelite

        assert (options["model_type"], options["device_id"]) == ("treelite_checkpoint", GPU)
        model = treelite.Model.deserialize(path)

        def predict(rows: Array) -> Array:
            assert PretendGpu().owns(rows)
            scores = treelite.gtil.predict(model, np.asarray(rows), nthread=1).astype(np.float32)
            return PretendGpu().xp.asarray(scores)

        return SimpleNamespace(predict=predict)


@pytest.fixture
def on_gpu(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """On GPUs in place of which torch's CPU tensors stand, with libcudf's and nvForest's calls emulated."""

    def place(config: Any, library: str) -> PretendGpu:
        assert config.message.instance_group[0].kind == config.message.instance_group[0].KIND_GPU
        assert library in ("cupy", "torch")
        return PretendGpu(index=config.message.instance_group[0].gpus[0])

    monkeypatch.setattr(local, "_device", place)
    monkeypatch.setattr(reader, "GpuText", EmulatedText)
    monkeypatch.setitem(sys.modules, "nvforest", StandIn())
    plan = Plan(placement="gpu", target="26.06", gpus=(GPU,))
    repository = compose("ensemble_all", tmp_path / "gpu", artifacts=artifacts, plan=plan)
    loaded = load(repository / "ensemble_all")
    yield loaded
    loaded.close()


def test_a_pipeline_on_a_gpu_answers_as_on_the_host(on_gpu: Pipeline, pipeline: Pipeline) -> None:
    for inputs in ({"excerpt": TEXTS}, {"excerpt": TEXTS, "BERT_WEIGHT": [0, 1, 0.25, 0.5]}, {"excerpt": [""]}):
        there, here = on_gpu(**inputs), pipeline(**inputs)
        for name in here:
            assert isinstance(there[name], np.ndarray)
            np.testing.assert_allclose(there[name], here[name], atol=1e-5)


def test_nothing_but_the_budget_is_copied(on_gpu: Pipeline) -> None:
    before = on_gpu.copies()
    on_gpu(excerpt=TEXTS, BERT_WEIGHT=[0.5] * 4)
    moved = on_gpu.copies() - before
    moved.check(on_gpu.graph)
    blob = sum(len(text.encode()) for text in TEXTS) + 8 * (len(TEXTS) + 1)
    found = {(copy.model, *copy.edge): (copy.traffic.copies, copy.traffic.num_bytes) for copy in moved}
    exact = found.pop(("preprocess", EXACT, UP))
    assert exact[0] == 2
    assert found == {
        ("preprocess", "INPUT0", UP): (1, blob),
        ("preprocess", CONTROL, DOWN): (2, 8 + len(TEXTS) + 1),
        ("postprocess", "BERT_WEIGHT_INPUT", UP): (1, 16),
        ("postprocess", "OUTPUT0", DOWN): (1, 16),
        ("postprocess", "BERT_SCORE", DOWN): (1, 16),
        ("postprocess", "FOREST_SCORE", DOWN): (1, 16),
    }


@pytest.mark.parametrize("model", ["preprocess", "bert-large", "postprocess"])
def test_a_planted_copy_breaks_the_budget(on_gpu: Pipeline, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The features, the encoder's ids or the scores go to the host and back again."""
    planted = on_gpu._models[model, 1]

    def call(inputs: Any) -> Any:
        device = planted.device
        return {name: device.put(device.fetch(array, name), name) for name, array in planted.call(inputs).items()}

    monkeypatch.setitem(on_gpu._models, (model, 1), replace(planted, ask=call))
    before = on_gpu.copies()
    on_gpu(excerpt=TEXTS)
    with pytest.raises(ShoalError, match=rf"Copied beyond the budget: {model}: .* went (up|down) 1 times"):
        (on_gpu.copies() - before).check(on_gpu.graph)


def copies(model: str, name: str, direction: str, num_bytes: int = 8, times: int = 1, exact: int = 0) -> Copies:
    """One edge's traffic in two batches."""
    events = {model: {BATCHES: 2, EXACT_ROWS: exact}}
    return Copies({(model, CopyEdge(name, direction)): CopyTotals(times, num_bytes, 0.1)}, events, has_setup=False)


@pytest.mark.parametrize(
    ("copied", "is_within"),
    [
        (copies("preprocess", "INPUT0", UP), True),
        (copies("preprocess", "INPUT0", DOWN), False),
        (copies("preprocess", "INPUT0", UP, times=2), True),
        (copies("preprocess", "INPUT0", UP, times=3), False),
        (copies("preprocess", SETUP, UP), False),  # in a difference of two readings
        (copies("preprocess", EXACT, UP), False),
        (copies("preprocess", EXACT, UP, exact=1), True),
        (copies("preprocess", EXACT, UP, exact=1, times=5), False),
        (copies("preprocess", CONTROL, ACROSS), False),
        (copies("postprocess", "OUTPUT0", DOWN, times=3), False),
        (copies("another", "X", DOWN), True),  # none of this pipeline's models
        (copies("preprocess", EXACT, DOWN), False),
        (copies("preprocess", CONTROL, DOWN, 2048), True),
        (copies("preprocess", CONTROL, DOWN, 2049), False),
        (copies("preprocess", "TREE_FEATS", DOWN), False),
        (copies("bert-large", "INPUT__0", UP), False),
        (copies("postprocess", "BERT_WEIGHT_INPUT", UP), True),
        (copies("postprocess", "BERT_WEIGHT_INPUT", ACROSS), False),
        (copies("postprocess", "OUTPUT0", DOWN), True),
    ],
)
def test_the_budget(copied: Copies, is_within: bool, pipeline: Pipeline) -> None:
    assert (copied.beyond(pipeline.graph) == []) == is_within


def test_steps_on_different_devices_may_exchange_tensors(artifacts: Path, tmp_path: Path) -> None:
    """The first or the last step on the host, all other models on the GPU: what is between them moves once."""
    for host, model, edge, is_within in (
        ("preprocess", "bert-large", CopyEdge("INPUT__0", UP), True),
        ("preprocess", "bert-large", CopyEdge("INPUT__0", DOWN), False),
        ("preprocess", "postprocess", CopyEdge("CUML_SCORE", UP), False),
        ("postprocess", "postprocess", CopyEdge("CUML_SCORE", DOWN), True),
        ("postprocess", "bert-large", CopyEdge("INPUT__0", UP), False),
        ("cuml", "cuml", CopyEdge("input__0", DOWN), False),  # its score goes back to the GPU
    ):
        plan, tuning = Plan(placement="gpu", target="26.06"), {host: Tuning(gpus=())}
        folder = tmp_path / host
        if not folder.exists():
            compose("ensemble_all", folder, artifacts=artifacts, plan=plan, tuning=tuning)
        graph = Graph.load(folder / "ensemble_all")
        copied = Copies({(model, edge): CopyTotals(1, 4)}, {model: {BATCHES: 1}})
        assert (copied.beyond(graph) == []) == is_within, (model, edge)


def test_metrics_are_read_back() -> None:
    text = """
# TYPE shoal_copies_total counter
shoal_copies_total{direction="up",edge="INPUT0",instance="preprocess_0_0-7",model="preprocess"} 3
shoal_copies_total{direction="up",edge="INPUT0",instance="preprocess_0_1-8",model="preprocess"} 4
# TYPE shoal_copied_bytes_total counter
shoal_copied_bytes_total{direction="up",edge="INPUT0",model="preprocess"} 300
# TYPE shoal_copy_seconds_total counter
shoal_copy_seconds_total{direction="up",edge="INPUT0",model="preprocess"} 0.5
# TYPE shoal_batches_total counter
shoal_batches_total{instance="preprocess_0_0-7",model="preprocess"} 3
shoal_batches_total{instance="preprocess_0_1-8",model="preprocess"} 4
# TYPE shoal_ready gauge
shoal_ready 1.0
# TYPE shoal_requests_total counter
shoal_requests_total{model="preprocess",outcome="answered"} 5
# TYPE nv_inference_count counter
nv_inference_count{model="preprocess",version="1"} 9
"""
    read = Copies.parse(text)
    assert [(copy.model, copy.edge, copy.traffic) for copy in read] == [
        ("preprocess", CopyEdge("INPUT0", UP), CopyTotals(7, 300, 0.5))
    ]
    assert read.events == {"preprocess": {BATCHES: 7}}
