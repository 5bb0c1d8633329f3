"""Words that were seen are not read again; what is found for a text is what it would be without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.component import memo
from shoal.component.bundle import Bundle
from shoal.component.features import BasicTokenizer, Lexicon, TokenCoder
from shoal.component.memo import Memo
from shoal.component.ragged import Ragged, split_words, to_texts
from shoal.component.tensors import Device
from shoal.component.wordpiece import WordPiece

# All that a normalizer or a pre-tokenizer treats in a way of its own, beside letters.
ODD = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f\x85\xa0\xad\u1680\u2000\u2028\u2029\u202f\u205f\u3000\u200b\ufeff\x00\ufffd"
    "'’-[]…漢字\u0301İßﬁ"
)
TEXTS = st.one_of(
    st.text(st.sampled_from(ODD + "aZé9. ") | st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(["[SEP]", "[MASK]", "a", " ", "[", "\x1c", "."]), max_size=8).map("".join),
)


def rows(ragged: Ragged) -> list[list[int]]:
    ends = ragged.offsets.tolist()
    return [ragged.values[a:b].tolist() for a, b in pairwise(ends)]


@given(st.lists(TEXTS, max_size=6))
def test_pieces_are_those_of_the_whole_text(wordpiece: WordPiece, texts: list[str]) -> None:
    whole = wordpiece._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    assert rows(wordpiece.pieces(to_texts(texts))) == [list(each.ids) for each in whole]


@given(TEXTS)
def test_basic_tokens_are_those_of_the_whole_text(text: str) -> None:
    tokenize = BasicTokenizer()
    assert [token for word in split_words(text) for token in tokenize(word)] == tokenize(text)


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, max_size=6))
def test_codes_tell_words_apart_whatever_came_before(bundle: Bundle, before: list[str], texts: list[str]) -> None:
    coder = TokenCoder(Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], Device()))
    coder(to_texts(before))
    tokenize, seen = BasicTokenizer(), dict[int, str]()
    for text, codes in zip(texts, rows(coder(to_texts(texts))), strict=True):
        for token, code in zip(tokenize(text), codes, strict=True):
            assert code == -1 or seen.setdefault(code, token) == token
    assert len(set(seen.values())) == len(seen)


def numbering() -> memo.Find:
    """Each word's letters, and a number of its own."""
    numbers: dict[str, int] = {}
    return lambda words: [[*map(ord, word), numbers.setdefault(word, len(numbers))] for word in words]


def test_rows_without_words() -> None:
    found = Memo(numbering)([[], ["ab"], [], []])
    assert rows(found) == [[], [97, 98, 0], [], []]
    assert rows(Memo(numbering)([])) == []


@pytest.mark.parametrize("limit", ["MOST_WORDS", "MOST_CHARACTERS"])
def test_what_is_kept_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, limit, 10)
    kept = Memo(numbering)
    for start in range(0, 200, 8):
        words = [f"w{n}" for n in range(start, start + 8)]
        found = rows(kept([words]))[0]
        assert len(set(found[-1:])) == 1
        assert len(kept._table._places) <= 18


def test_threads_share_a_memo() -> None:
    kept, texts = Memo(numbering), [[f"word{n % 97}" for n in range(k, k + 300)] for k in range(64)]
    with ThreadPoolExecutor(8) as callers:
        numbers: dict[str, set[int]] = {}
        for words, found in zip(texts, callers.map(lambda words: rows(kept([words]))[0], texts), strict=True):
            position = 0
            for word in words:
                position += len(word) + 1
                numbers.setdefault(word, set()).add(found[position - 1])
    assert all(len(each) == 1 for each in numbers.values())
    assert len(set.union(*numbers.values())) == 97
