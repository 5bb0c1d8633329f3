"""Labels of added models, from the checkpoint or the estimator to Triton's classification extension."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray

from shoal.authoring.composition.compose import compose
from shoal.authoring.project.scaffold.pipelines import draft_pipeline
from shoal.clients.client.client import Client
from tests.support.apis import post
from tests.support.grown import NAMES, SERVED
from tests.support.imports import add
from tests.support.published import LABELS, publish
from tests.support.service import Service

TEXTS = ["w1 w2", "w3", "w4 w5 w6 w7", "w8"]
OUTER = """
platform: "ensemble"
max_batch_size: 512
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "PROBS" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [ {
  model_name: "topics" model_version: -1
  input_map { key: "TEXT" value: "TEXT" } output_map { key: "OUTPUT__0" value: "PROBS" }
} ] }
"""


@pytest.fixture(scope="module")
def service(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An encoder, a pipeline of it, a pipeline of that, and a forest, added to a project and composed."""
    root = tmp_path_factory.mktemp("labels")
    published, project = publish(tiny_bert, root / "published"), root / "project"
    add(project, published / "triage", "classifier", task="classify", tokenizer="tokens", max_length=16)
    add(project, SERVED["skops_three"].make(root)[0], "forest")
    draft_pipeline("topics", ["tokens", "classifier"], project=project).draft.write()
    outer = project / "ensembles" / "outer"
    (outer / "1").mkdir(parents=True)
    (outer / "1" / ".gitkeep").touch()
    (outer / "config.pbtxt").write_text(OUTER, encoding="utf-8")
    repository = compose(["topics", "outer", "classifier", "forest"], root / "repository", projects=[project])
    with Service(repository, root / "log") as running:
        yield running


def classify(service: Service, protocol: Any, model: str, output: str, inputs: dict[str, NDArray[Any]]) -> list[Any]:
    """The two greatest classes of each row, by NVIDIA's client: value, index and label."""
    url = service.grpc if protocol is tritonclient.grpc else service.http
    kinds = {"O": "BYTES", "f": "FP32", "i": "INT64"}
    with protocol.InferenceServerClient(url) as client:
        tensors = []
        for name, array in inputs.items():
            tensors.append(protocol.InferInput(name, array.shape, kinds[array.dtype.kind]))
            tensors[-1].set_data_from_numpy(array)
        asked = protocol.InferRequestedOutput(output, class_count=2)
        found = client.infer(model, tensors, outputs=[asked]).as_numpy(output)
    return [[each.decode().split(":") for each in row] for row in found]


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
@pytest.mark.parametrize(
    ("model", "output"),
    [("topics", "OUTPUT__0"), ("outer", "PROBS"), ("classifier", "OUTPUT__0"), ("forest", "output__0")],
)
def test_triton_answers_with_labels(model: str, output: str, protocol: Any, service: Service) -> None:
    labels = NAMES.tolist() if model == "forest" else [*LABELS.values()]
    inputs: dict[str, NDArray[Any]] = {"TEXT": np.array([[text.encode()] for text in TEXTS], np.object_)}
    if model == "forest":
        inputs = {"input__0": SERVED["skops_three"].rows[:4]}
    elif model == "classifier":
        ids = np.arange(1, 13).reshape(4, 3)
        inputs = {"INPUT__0": ids, "INPUT__1": np.ones_like(ids)}
    with Client(service.grpc) as own:
        scores = own.infer(model, inputs)[output]
    found = classify(service, protocol, model, output, inputs)
    for row, classes in zip(scores, found, strict=True):
        order = np.argsort(-row, kind="stable")[:2]
        assert [(int(index), label) for _, index, label in classes] == [(int(at), labels[at]) for at in order]
        np.testing.assert_allclose([float(value) for value, *_ in classes], row[order], atol=1e-5)


@pytest.mark.parametrize("model", ["topics", "outer"])
def test_v1_classify_answers_with_labels(model: str, service: Service) -> None:
    status, found = post(service, "/v1/classify", json.dumps({"model": model, "input": TEXTS}).encode())
    assert status == 200
    for row in found["data"]:
        assert row["label"] == LABELS[int(np.argmax(row["probs"]))]
