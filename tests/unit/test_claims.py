"""Claims of the documentation, each computed in two ways: samples in `make test`, everything in `make verify`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.kit.component.ledger import EXACT_ROWS
from shoal.kit.encoders.export import compare, trace
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.kit.text.tokens import WordPiece, read_vocabulary
from shoal.kit.text.words import BasicTokenizer, TokenCoder
from shoal.readability.corpus import Corpus
from shoal.readability.encoder import load_encoder
from shoal.readability.forest import export_forest, forest_inputs, train_forest
from shoal.readability.preprocess_config import Bundle
from shoal.readability.reader import DeviceReader, Features, Reader
from tests.conftest import Record, Scale
from tests.support import references
from tests.support.emulation import EmulatedText
from tests.support.pretend import PretendGpu
from tests.support.readings import assert_same_reading, batches, nasty_strings

# --- served = in process = client side ---------------------------------------------------------------------------


# --- features ----------------------------------------------------------------------------------------------------


def test_features_equal_the_definitions(bundle: Bundle, texts: list[str], scale: Scale, record: Record) -> None:
    sample = texts[: scale(120, len(texts))]
    tokenize = BasicTokenizer()
    listed = [*bundle.frequent, *bundle.rare]
    raw = np.array([references.raw_features(tokenize(text), bundle.stop_words, listed) for text in sample])
    expected = (raw - np.array(bundle.mean)) / np.array(bundle.std)
    features = Features(bundle)
    got = features(TokenCoder(features.lexicon)(sample))
    difference = float((np.abs(got - expected) / np.maximum(1, np.abs(expected))).max())
    record("features = definitions", texts=len(sample), max_relative_diff=difference)
    assert difference <= 1e-6


def test_word_lists_equal_the_definitions(bundle: Bundle, passages: Corpus) -> None:
    """The lists of the small training set, counted the slow way."""
    from shoal.readability.train import split
    from tests.support.artifacts import TINY

    tokenize, counts = BasicTokenizer(), dict[str, int]()
    for text in passages.take(split(passages, TINY, 0)[0]).texts:
        for token in tokenize(text):
            if any(c.isalnum() for c in token):
                counts[token] = counts.get(token, 0) + 1
    assert list(bundle.frequent) == sorted(counts, key=lambda w: (-counts[w], w))[:100]
    assert list(bundle.rare) == sorted(counts, key=lambda w: (counts[w], w))[:100]


# --- tokens ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hugging_face(artifacts: Path) -> Any:
    from transformers import BertTokenizer

    return BertTokenizer(vocab=str(artifacts / "vocab.txt"), do_lower_case=True)


def expected_tokens(hugging_face: Any, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    encoded = hugging_face(texts, truncation=True, max_length=256, padding="longest", pad_to_multiple_of=8)
    return encoded["input_ids"], encoded["attention_mask"]


def test_tokens_equal_hugging_faces_on_real_texts(
    wordpiece: WordPiece, hugging_face: Any, texts: list[str], scale: Scale, record: Record
) -> None:
    sample = texts[: scale(160, len(texts))]
    for batch in batches(sample, 50):
        ids, mask = wordpiece.encode(batch)
        assert (ids.tolist(), mask.tolist()) == expected_tokens(hugging_face, batch)
    record("tokens = Hugging Face's, real texts", texts=len(sample), differing=0)


def test_tokens_equal_hugging_faces_on_nasty_unicode(
    wordpiece: WordPiece, hugging_face: Any, scale: Scale, record: Record
) -> None:
    def check(strings: list[str]) -> None:
        ids, mask = wordpiece.encode(strings)
        assert (ids.tolist(), mask.tolist()) == expected_tokens(hugging_face, strings)

    count = scale(1000, 10_000)
    nasty_strings(check, count)
    record("tokens = Hugging Face's, nasty Unicode", strings=count, differing=0)


def test_the_gpus_path_equals_the_hosts_on_real_texts(
    artifacts: Path, bundle: Bundle, texts: list[str], scale: Scale, record: Record
) -> None:
    """By libcudf's published rules (support/emulation.py). What those get wrong must have been routed to the host."""
    sample = texts[: scale(200, len(texts))]
    read, reference, device = readers(artifacts, bundle)
    for batch in batches(sample, 50):
        assert_same_reading(read(batch), reference(batch))
    routed = device.ledger.events.get(EXACT_ROWS, 0)
    record("GPU path by libcudf's rules = host, real texts", texts=len(sample), differing=0, on_exact_path=routed)


def test_the_gpus_path_equals_the_hosts_on_nasty_unicode(
    artifacts: Path, bundle: Bundle, scale: Scale, record: Record
) -> None:
    read, reference, device = readers(artifacts, bundle)

    def check(strings: list[str]) -> None:
        assert_same_reading(read(strings), reference(strings))

    count = scale(1000, 100_000)
    nasty_strings(check, count)
    routed = device.ledger.events.get(EXACT_ROWS, 0)
    assert 0 < routed < count
    record("GPU path by libcudf's rules = host, nasty Unicode", strings=count, differing=0, on_exact_path=routed)


def readers(artifacts: Path, bundle: Bundle) -> tuple[DeviceReader, Reader, PretendGpu]:
    vocabulary, device = read_vocabulary(artifacts / "vocab.txt"), PretendGpu()
    read = DeviceReader(vocabulary, bundle, device, "TEXT", EmulatedText(vocabulary, device))
    device.ledger.end_setup()
    return read, Reader(vocabulary, bundle), device


def test_a_plain_wordpiece_agrees(artifacts: Path, texts: list[str], scale: Scale, record: Record) -> None:
    """The reference, in references.py, follows the paper's code and ignores special tokens in the text."""
    tokens = read_vocabulary(artifacts / "vocab.txt")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    encode = WordPiece(tokens, max_length=512).encode
    sample = texts[: scale(100, len(texts))]
    for batch in batches(sample, 50):
        ids, mask = encode(batch)
        for text, row, length in zip(batch, ids.tolist(), mask.sum(1).tolist(), strict=True):
            pieces = [p for t in references.basic_tokens(text) for p in references.word_pieces(t, vocabulary)]
            assert row[:length] == [vocabulary["[CLS]"], *pieces[:510], vocabulary["[SEP]"]]
    record("tokens = a plain WordPiece", texts=len(sample), differing=0)


# --- exported models ---------------------------------------------------------------------------------------------


def test_the_traced_encoder_equals_the_eager_one(scale: Scale, record: Record) -> None:
    generator = np.random.default_rng(0)
    count = scale(4, 100)
    shapes = [(int(generator.integers(1, 9)), int(generator.integers(2, 257))) for _ in range(count)]
    encoder = load_encoder(SMALL_ENCODER, seed=0).candidates.pick("mean").eval()
    difference = compare(trace(encoder), encoder, shapes)
    record("traced = eager", shapes=count, padded_and_unpadded=True, max_diff=difference)
    assert difference <= 1e-5


def test_treelite_equals_scikit_learn(
    bundle: Bundle, texts: list[str], tmp_path: Path, scale: Scale, record: Record
) -> None:
    import treelite

    sample = texts[: scale(300, len(texts))]
    targets = np.random.default_rng(0).normal(size=len(sample))
    forest = train_forest(bundle, sample, targets, seed=0, num_trees=scale(20, 100))
    features = forest_inputs(bundle, sample)
    export_forest(forest, features[:10], tmp_path / "checkpoint.tl", bundle_sha256="0")
    model = treelite.Model.deserialize(str(tmp_path / "checkpoint.tl"))
    served = treelite.gtil.predict(model, features, nthread=1).reshape(-1)
    difference = float(np.abs(served - forest.predict(features)).max())
    record("treelite = scikit-learn", rows=len(sample), trees=len(forest.estimators_), max_diff=difference)
    assert difference <= 1e-5


def test_treelite_equals_lightgbm(bundle: Bundle, texts: list[str], tmp_path: Path, scale: Scale) -> None:
    """Also of values that are thresholds, where both go the same way."""
    import treelite

    sample = texts[: scale(300, len(texts))]
    targets = np.random.default_rng(0).normal(size=len(sample))
    forest = train_forest(bundle, sample, targets, seed=0, kind="boosted")
    features = forest_inputs(bundle, sample)
    export_forest(forest, features[:10], tmp_path / "checkpoint.tl", bundle_sha256="0")
    model = treelite.Model.deserialize(str(tmp_path / "checkpoint.tl"))
    trees = [model.get_tree_accessor(index) for index in range(model.num_tree)]
    assert len(trees) == 400
    thresholds: dict[int, list[float]] = {}
    for tree in trees:
        for column, threshold in zip(tree.get_field("split_index"), tree.get_field("threshold"), strict=True):
            thresholds.setdefault(int(column), []).append(float(threshold))
    rows = np.repeat(features[:1], 50, axis=0)
    for column, values in thresholds.items():
        if column >= 0:
            rows[:, column] = np.resize(np.array(values, np.float32), len(rows))
    for asked in (features, rows):
        served = treelite.gtil.predict(model, asked, nthread=1).reshape(-1)
        assert float(np.abs(served - forest.predict(asked)).max()) <= 1e-5


def test_the_report_is_of_the_artifacts(artifacts: Path) -> None:
    report = json.loads((artifacts / "report.json").read_text(encoding="utf-8"))
    assert report["is_demonstration"]
    assert report["num_trained_on"] + report["evaluation"]["num_texts"] == 100
    assert report["versions"]["torch"] == version("torch")  # of PyPI's CUDA build, torch.__version__ says more
