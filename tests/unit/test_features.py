from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kit.blocks import normalise
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device
from shoal.kit.text.device import Ragged, count_tokens
from shoal.kit.text.words import BasicTokenizer, Lexicon, TokenCoder, TokenCounter, is_word, make_features
from tests.support.emulation import ragged
from tests.support.readings import nasty_text
from tests.support.references import raw_features

STOP_WORDS, LISTED = ("the", "a"), ("dog", "cat", "the")
LEXICON = Lexicon.build(STOP_WORDS, LISTED, Device())


def valid(texts: list[str]) -> list[str]:
    return [text.encode(errors="replace").decode() for text in texts]


def count(texts: list[str]) -> Array:
    return make_features(*TokenCounter(LEXICON)(TokenCoder(LEXICON)(valid(texts))))


@pytest.mark.parametrize(
    ("text", "statistics"),
    [
        # words, distinct, punctuation, sentences, words a sentence, stop words, stop words a sentence
        ("The dog sat.", [3, 3, 1, 1, 3, 1, 1]),
        ("The dog. The cat", [4, 3, 1, 2, 2, 2, 1]),  # text after the last end is a sentence
        ("Dog!!! ... cat?", [2, 2, 7, 2, 1, 0, 0]),  # ends in a row are one, blanks between them or not
        ("... dog", [1, 1, 3, 2, 0.5, 0, 0]),  # a run of ends at the start ends a sentence too
        ("dog, (cat)", [2, 2, 3, 1, 2, 0, 0]),
        ("DÓG dog", [2, 1, 0, 1, 2, 0, 0]),  # lower-cased, accents stripped
        ("!!! ?", [0] * 7),  # no word: nothing else counts
        ("", [0] * 7),
        ("€ ²", [0] * 7),  # neither letter nor digit
        ("٣ 4", [2, 2, 0, 1, 2, 0, 0]),  # digits of any script
    ],
)
def test_statistics(text: str, statistics: list[float]) -> None:
    assert count([text])[0, :7].tolist() == statistics


def test_shares() -> None:
    assert count(["the dog the bird", "fish", ""])[:, 7:].tolist() == [[0.25, 0, 0.5], [0, 0, 0], [0, 0, 0]]


@given(st.lists(nasty_text, min_size=1, max_size=6))
def test_equal_to_the_definitions(texts: list[str]) -> None:
    tokenize = BasicTokenizer()
    clean = [text.encode(errors="replace").decode() for text in texts]
    expected = [raw_features(tokenize(text), STOP_WORDS, LISTED) for text in clean]
    np.testing.assert_allclose(count(texts), expected, rtol=1e-15, atol=0)


@given(st.lists(nasty_text, min_size=1, max_size=6))
def test_array_code_counts_the_same(texts: list[str]) -> None:
    """In NumPy, and in torch as on a device; also if listed tokens are not words."""
    lexicon = Lexicon.build(STOP_WORDS, (*LISTED, "—", "…"), Device())
    rows = TokenCoder(lexicon)(valid(texts))
    expected = TokenCounter(lexicon)(rows)
    codes = ragged(numbered(rows, lexicon.num_known))
    for one, other in zip(expected, count_tokens(codes, lexicon), strict=True):
        assert np.array_equal(one, other)


def numbered(rows: list[list[int]], num_known: int) -> list[list[int]]:
    """With small numbers for unlisted words, as a device's are: their ranks within the batch."""
    ranks = {code: n for n, code in enumerate(sorted({c for row in rows for c in row if c >= num_known}), num_known)}
    return [[ranks.get(code, code) for code in row] for row in rows]


@given(st.lists(nasty_text, min_size=1, max_size=6))
def test_torch_arrays_give_the_same(texts: list[str]) -> None:
    codes = ragged(numbered(TokenCoder(LEXICON)(valid(texts)), LEXICON.num_known))
    columns: dict[str, Any] = {
        n: torch.asarray(getattr(LEXICON, n)) for n in ("is_word", "is_stop", "is_end", "column")
    }
    lexicon = replace(LEXICON, **columns)
    other = make_features(*count_tokens(Ragged(torch.asarray(codes.values), torch.asarray(codes.offsets)), lexicon))
    assert np.array_equal(other.numpy(), make_features(*count_tokens(codes, LEXICON)))


def test_normalise() -> None:
    z = normalise(np.array([[3.0, 5.0]]), np.array([1.0, 5.0]), np.array([4.0, 1.0]))
    assert z.dtype == np.float32
    assert z.tolist() == [[0.5, 0.0]]


def test_definition_of_a_word() -> None:
    assert [is_word(t) for t in ("a", "1", "漢", "-", "€", "a€")] == [True, True, True, False, False, True]
