"""Fixtures of the readability pipeline: artifacts that were trained for a moment, and what reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.authoring.composition.compose import compose
from shoal.clients.local import Pipeline, load
from shoal.kit.text.tokens import WordPiece, read_vocabulary
from shoal.readability.corpus import DATA_DIR, Corpus, read_corpus, read_passages
from shoal.readability.download import CLEAR_FILE
from shoal.readability.fit import EncoderSettings
from shoal.readability.preprocess_config import Bundle
from shoal.readability.train import Preset, train
from shoal.serving.server.launch import Server, serve
from tests.support.once import ROOT, once

TINY = Preset(num_held_out=20, num_trees=20, encoder=EncoderSettings(max_steps=2))
_READ = ("kit/component", "kit/encoders", "readability", "clients/bulk/tables.py", "errors.py", "system/files.py")
SOURCES = [ROOT / "src" / "shoal" / name for name in _READ]


@pytest.fixture(scope="session")
def passages() -> Corpus:
    return read_passages()


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """The CLEAR corpus, where SHOAL_DATA_DIR names its folder."""
    folder = os.environ.get(DATA_DIR)
    if not folder or not (Path(folder) / CLEAR_FILE).is_file():
        pytest.skip(f"{DATA_DIR} names no folder with {CLEAR_FILE}")
    return read_corpus(Path(folder) / CLEAR_FILE)


@pytest.fixture(scope="session")
def texts(request: pytest.FixtureRequest, passages: Corpus) -> list[str]:
    """Real texts: the corpus where it is in reach, else shoal's own passages."""
    try:
        return list(request.getfixturevalue("corpus").texts)
    except pytest.skip.Exception:
        return list(passages.texts)


@pytest.fixture(scope="session")
def artifacts(passages: Corpus) -> Path:
    """Trained for a moment: real weights, real files, scores of no worth. Nothing may be changed in there."""
    depends_on = [*SOURCES, Path(__file__), ROOT / "constraints.txt"]
    return once("artifacts", lambda folder: train(passages, folder, preset=TINY), depends_on=depends_on)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of no worth and no size, with the files of a published one."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(6000))]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bundle(artifacts: Path) -> Bundle:
    return Bundle.load(artifacts / "preprocess.json")


@pytest.fixture(scope="session")
def wordpiece(artifacts: Path) -> WordPiece:
    return WordPiece(read_vocabulary(artifacts / "vocab.txt"))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, artifacts: Path) -> Path:
    return compose("ensemble_all", tmp_path_factory.mktemp("composed") / "repository", artifacts=artifacts)


@pytest.fixture(scope="session")
def pipeline(repository: Path) -> Pipeline:
    return load(repository / "ensemble_all")


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Server]:
    with serve(repository) as running:
        yield running
