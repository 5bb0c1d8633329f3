"""Another engine in the encoder's slot: the same scores, by files and a configuration alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import ArtifactError, InputError
from shoal.paths import shipped_root
from shoal.repository.compose import compose
from shoal.repository.pbtxt import read_config
from shoal.serving.client import Client
from shoal.serving.local import Pipeline, load_component
from shoal.serving.server import serve
from shoal.training.encoder import load_encoder
from shoal.training.export import export_encoder

TEXTS = ["The cat sat.", "", "It is nonetheless imperative that epistemology be considered. " * 12]


@pytest.fixture(scope="module")
def leaves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The leaf `bert-large` for Triton's onnxruntime backend: two lines differ."""
    folder = tmp_path_factory.mktemp("leaves") / "models" / "bert-large"
    shutil.copytree(shipped_root() / "models" / "bert-large", folder)
    config = folder / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('backend: "pytorch"', 'backend: "onnxruntime"')
    config.write_text(text.replace('"model.pt"', '"model.onnx"'), encoding="utf-8")
    return folder.parents[1]


@pytest.mark.server
def test_onnx_runtime_serves_the_slot(leaves: Path, artifacts: Path, tmp_path: Path) -> None:
    from shoal.training.encoder import SMALL_ENCODER

    encoder = load_encoder(SMALL_ENCODER, seed=0).candidates.pick("mean")
    own = tmp_path / "artifacts"
    shutil.copytree(artifacts, own)
    (own / "report.json").unlink()  # it speaks of another encoder
    for name in ("model.pt", "model.onnx"):
        export_encoder(encoder, own / name, ties={})
    torchscript = Pipeline.load(compose("ensemble_all", tmp_path / "torch", artifacts=own) / "ensemble_all")
    repository = compose("ensemble_all", tmp_path / "onnx", artifacts=own, leaves=[leaves])
    expected = torchscript(excerpt=TEXTS)["BERT_SCORE"]
    np.testing.assert_allclose(
        Pipeline.load(repository / "ensemble_all")(excerpt=TEXTS)["BERT_SCORE"], expected, rtol=0, atol=1e-5
    )
    with serve(repository) as server, Client(server.grpc_url) as client:
        served = client.infer("ensemble_all", excerpt=TEXTS)["BERT_SCORE"]
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-5)


def test_what_no_engine_runs(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = load_encoder(str(tiny_bert), seed=0).candidates.pick("mean")
    with pytest.raises(InputError, match=r"No engine runs model\.bin\. Name a file that ends in \.pt or \.onnx\."):
        export_encoder(encoder, tmp_path / "model.bin", ties={})


def test_a_damaged_onnx_model_is_refused(leaves: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert-large"
    shutil.copytree(leaves / "models" / "bert-large", folder)
    (folder / "1" / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ArtifactError, match=r"model\.onnx is not a valid ONNX model: Protobuf parsing failed\."):
        load_component(read_config(folder))
