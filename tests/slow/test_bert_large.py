"""An encoder of bert-large's widths, with random weights: one optimizer step, exported, traced and served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.clients.client.client import Client
from shoal.clients.local import load
from shoal.kit.encoders.encoder import _locate
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability.corpus import Corpus
from shoal.serving.server.launch import serve
from tests.conftest import Scale
from tests.support.once import ROOT

pytestmark = pytest.mark.verify

TRAIN = """
import sys
from shoal.readability.corpus import read_passages
from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset, train

settings = EncoderSettings(max_steps=1, gradient_checkpointing=True)
preset = Preset(num_held_out=4, num_trees=5, encoder=settings)
train(read_passages(), sys.argv[1], encoder=sys.argv[2], preset=preset)
"""


@pytest.fixture
def large_bert(tmp_path: Path, scale: Scale) -> Path:
    """bert-large-uncased's geometry (Devlin et al., 2019: 24 layers, 1,024 wide, 16 heads); one layer in a sample."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path / "bert"
    AutoTokenizer.from_pretrained(_locate(SMALL_ENCODER, None)[0]).save_pretrained(folder)
    config = BertConfig(
        num_hidden_layers=scale(1, 24), hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def test_one_step_fits_and_is_served(
    large_bert: Path, passages: Corpus, tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    out = tmp_path / "artifacts"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", TRAIN, out, large_bert], check=True, env=environment)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["encoder"]["num_steps"] == 1
    repository = compose("ensemble_all", tmp_path / "repository", artifacts=out)
    texts = list(passages.texts[:4])
    local = load(repository / "ensemble_all")
    expected = local(excerpt=texts)["BERT_SCORE"]
    local.close()
    with serve(repository) as server, Client(server.grpc_url) as client:
        served = client.infer("ensemble_all", excerpt=texts)["BERT_SCORE"]
    difference = float(np.abs(served - expected).max())
    record(
        "bert-large, random weights: one step, exported, served",
        layers=scale(1, 24), batch=16, model_gib=round((out / "model.pt").stat().st_size / 2**30, 2),
        peak_gib_of_training=report["peak_memory_gib"], seconds=report["seconds"], max_diff_served=difference,
    )  # fmt: skip
    assert report["peak_memory_gib"] < 24
    assert difference <= 1e-5
