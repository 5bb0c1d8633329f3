"""An encoder by its published name, from add-model to the served answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoModel, AutoTokenizer

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.clients.client.client import Client
from shoal.clients.local import load
from shoal.kit.encoders.encoder import _locate
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability.corpus import Corpus
from shoal.serving.server.launch import serve
from tests.support.encoders import ask, embed, pipeline
from tests.support.imports import add


def test_passages_to_embeddings_by_name(tmp_path: Path, passages: Corpus) -> None:
    """The packaged encoder, as its own model card computes it."""
    config, said = add(tmp_path, SMALL_ENCODER, "minilm", task="embeddings", tokenizer="minilm_tokens")
    assert config.spec.outputs[0].dims == (384,)
    assert "pooling mean: as its files for sentence-transformers say" in said
    assert "normalised: as its files for sentence-transformers say" in said
    assert said[-1] == "its tokens come from preprocess/minilm_tokens, at most 256 per text"
    assert check(tmp_path / "preprocess" / "minilm_tokens") == []
    assert read_config(tmp_path / "preprocess" / "minilm_tokens").spec.parameters["max_length"] == "256"
    pipeline(tmp_path, "minilm", "minilm_tokens", "embed")
    repository = compose("embed", tmp_path / "repository", projects=[tmp_path])
    texts = list(passages.texts[:24])
    place = _locate(SMALL_ENCODER, None)[0]
    tokenizer = AutoTokenizer.from_pretrained(place)
    given = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
    ids, mask = given["input_ids"], given["attention_mask"]
    expected = embed(ask(place, AutoModel, ids, mask).last_hidden_state, mask, "mean", is_normalised=True)
    local = load(repository / "embed")
    np.testing.assert_allclose(local(TEXT=texts)["ANSWER"], expected, rtol=0, atol=1e-5)
    local.close()
    with serve(repository) as server, Client(server.grpc_url) as client:
        np.testing.assert_allclose(client.infer("embed", TEXT=texts)["ANSWER"], expected, rtol=0, atol=1e-5)
