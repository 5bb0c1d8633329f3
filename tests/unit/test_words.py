"""The device's array code on NumPy and torch, and on torch's meta device, where reading a value is an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kit.blocks import blend, normalise
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device
from shoal.kit.text.device import (
    CodePoints,
    DeviceCoder,
    Ragged,
    Routing,
    Words,
    code_points,
    count_begun,
    count_tokens,
    frame,
    hash_factors,
    round_up,
    upload,
)
from shoal.kit.text.tokens import SpecialIds
from shoal.kit.text.words import BasicTokenizer, Lexicon, TokenCoder, TokenCounter, is_word, make_features
from shoal.readability.reader import Reading, _merge
from tests.support.pretend import PretendGpu

HOST, DEVICE = Device(), PretendGpu()
LETTERS = {device: CodePoints.words(device) for device in (HOST, DEVICE)}
STOP_WORDS, LISTED = ["a", "b"], ["c", "é", "bc"]
CODERS = {device: DeviceCoder(Lexicon.build(STOP_WORDS, LISTED, device), device) for device in (HOST, DEVICE)}
ON = pytest.mark.parametrize("device", [HOST, DEVICE], ids=["numpy", "torch"])
WORD = st.text("abcé漢字0.!…-ก\U0001f41f", min_size=1, max_size=12)
CLEAN = st.lists(st.lists(WORD, max_size=8).map(" ".join), min_size=1, max_size=5)


def there(texts: list[str], device: Device) -> Ragged:
    return upload(texts, device, "TEXT")


def tokens(texts: list[str]) -> list[str]:
    return [token for text in texts for token in text.split()]


@ON
@given(texts=CLEAN)
def test_code_points(device: Device, texts: list[str]) -> None:
    batch = there(texts, device)
    points, values = np.asarray(code_points(batch.values)), np.asarray(batch.values)
    assert [chr(p) for p in points[(values & 0xC0) != 0x80]] == list("".join(texts))


@ON
@given(texts=CLEAN)
def test_words_are_found(device: Device, texts: list[str]) -> None:
    expected = tokens(texts)
    words = Words.find(there([f" {text}  " for text in texts], device), device)
    assert words.num_tokens == len(expected)
    assert np.asarray(words.are_words(LETTERS[device])).tolist() == [is_word(token) for token in expected]
    hashes = np.asarray(words.hashes(hash_factors(device))).tolist()
    assert len(set(hashes)) == len(set(expected)) == len(set(zip(hashes, expected, strict=True)))


@ON
@pytest.mark.parametrize(("text", "expected"), [("a" * 100, False), ("a" * 101, True), ("é" * 51, True), ("", False)])
def test_long_words_are_found(device: Device, text: str, expected: bool) -> None:
    texts = ["a b", f"b {text} b", "a" * 60, "a" * 60]
    words = Words.find(there(texts, device), device)
    assert np.asarray(words.has_long).tolist() == [False, expected, False, False]


@ON
@given(texts=CLEAN)
def test_codes_on_a_device_give_the_features_of_the_hosts(device: Device, texts: list[str]) -> None:
    host = Lexicon.build(STOP_WORDS, LISTED, Device())
    expected = make_features(*TokenCounter(host)(TokenCoder(host)(texts)))

    there_lexicon = Lexicon.build(STOP_WORDS, LISTED, device)
    clean = [" ".join(BasicTokenizer()(text)) for text in texts]
    codes, is_wrong = CODERS[device](Words.find(there(clean, device), device))
    assert not is_wrong
    got = make_features(*count_tokens(codes, there_lexicon))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def meta(array: Array) -> Array:
    """An array without values, as a GPU's are while the host goes on: whatever reads one fails."""
    return torch.as_tensor(np.array(array)).to("meta")


def test_nothing_reads_a_value_from_the_device() -> None:
    class MetaGpu(PretendGpu):
        def _upload(self, array: Array) -> Array:
            return meta(array)

    device, num_tokens = MetaGpu(), 7
    texts = Ragged(meta(np.zeros(40, np.uint8)), meta(np.zeros(4, np.int64)))
    lexicon = Lexicon.build(["a"], ["b"], device)
    words = Words(texts, count_begun(texts), num_tokens)
    codes, is_wrong = DeviceCoder(lexicon, device)(words)
    assert is_wrong.shape == (1,)
    raw = make_features(*count_tokens(codes, lexicon))
    features = normalise(raw, meta(np.zeros(8)), meta(np.ones(8)))
    assert features.shape == (3, 7 + 1)
    is_exact = Routing(device).find(texts, words)
    ids, mask = frame(codes, SpecialIds(1, 2, 0), 16)
    round_up(torch.max(codes.lengths))
    reading = Reading(ids, mask, features)
    assert _merge(reading, reading, is_exact).ids.shape == (3, 16)
    assert blend(0.5, features[:, 0], features[:, 1]).shape == (3,)
    with pytest.raises(RuntimeError, match="meta"):
        bool(is_exact.any())
