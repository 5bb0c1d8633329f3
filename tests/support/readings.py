"""Texts that readers of texts find hard, and readings compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.kit.component.tensors import Device
from shoal.readability.preprocess_config import Bundle
from shoal.readability.reader import DeviceReader, Reading
from tests.support.emulation import EmulatedText


def batches(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(texts), size):
        yield list(texts[start : start + size])


# Letters that decompose, marks, signs, CJK, right-to-left, controls, zero width, special tokens, very long words.
NASTY = st.sampled_from(
    [
        "é", "e\u0301", "ﬁ", "İ", "ß", "漢字", "שלום", "مرحبا", "\u200d", "\u00ad", "\0", "\t", "\u3000", "\ufffd",
        "🐟", "[SEP]", "[CLS]", "[MASK]", "[sep]", "[UNK]", "…", "¿", "—", "don't", "x²", "ﷺ",
        "\u0300" * 9, " ", "\u00a0",
        "fish", "a" * 101, "[PAD]", "\ue000", "กขค", "ก" * 34, "\u302e", "\U0001d165",
    ]
)  # fmt: skip
NASTY_TEXT = st.lists(NASTY | st.text(max_size=5), max_size=20).map("".join)


def nasty_strings(check: Callable[[list[str]], None], num_strings: int) -> None:
    """Run `check` on about `num_strings` strings, ten at a time."""

    @settings(max_examples=num_strings // 10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(NASTY_TEXT, min_size=10, max_size=10))
    def run(strings: list[str]) -> None:
        check([text.encode(errors="replace").decode() for text in strings])

    run()


def assert_same_reading(some: Reading, other: Reading) -> None:
    assert np.array_equal(some.ids, other.ids)
    assert np.array_equal(some.mask, other.mask)
    np.testing.assert_allclose(some.features, other.features, rtol=1e-6, atol=1e-6)


def device_reader(vocabulary: Sequence[str], bundle: Bundle, device: Device) -> DeviceReader:
    read = DeviceReader(vocabulary, bundle, device, "TEXT", EmulatedText(vocabulary, device))
    device.ledger.end_setup()
    return read


# Much of what matters is rare in random text: sentence ends, listed words, repeated words, marks and signs.
snippets = st.sampled_from(
    ["the", "The", "dog", "cat", "é", "²", "…", ".", "!", "?", ", ", "—", " ", "x1", "漢", "\u0301", "€", "٣"]
)
nasty_text = st.lists(snippets | st.text(max_size=4), max_size=25).map("".join)
