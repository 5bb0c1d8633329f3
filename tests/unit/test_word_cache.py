"""Words that were seen are not read again; what is found for a text is what it would be without."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.component.tensors import Device
from shoal.readability.preprocess_config import Bundle
from shoal.text import word_cache as memo
from shoal.text.lexicon import BasicTokenizer, Codes, Lexicon, TokenCodes, is_word
from shoal.text.ragged import Cut, Ragged, to_texts
from shoal.text.word_cache import Find, Memo, Rows
from shoal.text.word_features import Tallies
from shoal.text.word_statistics import TokenCoder
from shoal.text.wordpiece import WordPiece

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
    tokenize, cut = BasicTokenizer(), to_texts([text]).cut
    words = [word.decode() for word in cut.words(np.arange(len(cut.begins)))]
    assert [token for word in words for token in tokenize(word)] == tokenize(text)


def test_ascii_is_split_as_berts_pre_tokenizer_does() -> None:
    tokenize, split = BasicTokenizer(), TokenCodes(["a"]).split
    characters = list(map(chr, range(128)))
    for text in [*characters, *(f"aB{c}{d}3 x" for c in characters for d in characters)]:
        assert split(text) == tokenize(text)


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, max_size=6))
def test_codes_tell_words_apart_whatever_came_before(bundle: Bundle, before: list[str], texts: list[str]) -> None:
    coder = TokenCoder(Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], Device()))
    coder(to_texts(before))
    tokenize, seen = BasicTokenizer(), dict[int, str]()
    for text, codes in zip(texts, rows(coder(to_texts(texts))), strict=True):
        for token, code in zip(tokenize(text), codes, strict=True):
            assert code == -1 or seen.setdefault(code, token) == token
    assert len(set(seen.values())) == len(seen)


def numbering() -> Find:
    """Each word's letters, and a number of its own; nothing for the empty word."""
    numbers: dict[str, int] = {}
    return lambda words: [[*map(ord, word), numbers.setdefault(word, len(numbers))] if word else [] for word in words]


def look_up(kept: Memo[Rows], texts: Sequence[Sequence[str]]) -> list[list[int]]:
    places, found = kept(to_texts(map(" ".join, texts)))
    return rows(found.of(places))


def test_rows_without_words() -> None:
    assert look_up(Memo(Rows(numbering())), [[], ["ab"], [], []]) == [[], [97, 98, 0], [], []]
    assert look_up(Memo(Rows(numbering())), []) == []


@given(st.lists(TEXTS, max_size=6))
def test_words_are_what_stands_between_ascii_white_space(texts: list[str]) -> None:
    cut = to_texts(texts).cut
    expected = [re.split(b"[\t\n\r ]", text.encode()) for text in texts]
    assert cut.words(np.arange(len(cut.begins))) == [word for words in expected for word in words]
    assert np.diff(cut.offsets).tolist() == [len(words) for words in expected]


@given(st.sets(st.binary(max_size=20).map(lambda word: bytes(b for b in word if b not in b"\t\n\r ")), max_size=40))
def test_words_of_one_key_are_one_word_but_for_nuls_at_their_ends(words: set[bytes]) -> None:
    keys = Cut.of(list(words)).keys()
    short = {(int(a), int(b)) for a, b, is_whole in zip(*keys, strict=True) if is_whole}
    assert len(short) == len({word.rstrip(b"\0") for word in words if len(word) <= 16})


def test_a_word_is_found_once() -> None:
    asked: list[str] = []

    def find(words: list[str]) -> list[list[int]]:
        asked.extend(words)
        return [[len(word)] for word in words]

    kept, words = Memo(Rows(find)), [f"word{n}" * (1 + n % 5) for n in range(3000)]
    for start in (0, 7, 0, 2000, 1000):
        some = words[start : start + 1000]
        assert look_up(kept, [some, some[:5]]) == [[*map(len, some)], [*map(len, some[:5])]]
    assert sorted(word for word in asked if word) == sorted(words)


def test_words_that_meet_in_one_slot_are_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo._Slots, "_slots", lambda self, keys: np.zeros(len(keys.first), np.int64))
    kept, words = Memo(Rows(numbering())), [f"w{n}" for n in range(600)]
    first = look_up(kept, [[word] for word in words])
    assert look_up(kept, [[word] for word in words]) == first == [[*map(ord, w), n] for n, w in enumerate(words)]


@pytest.mark.parametrize("limit", ["MOST_WORDS", "MOST_BYTES"])
def test_what_is_kept_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, limit, 10)
    kept = Memo(Rows(numbering()))
    for start in range(0, 200, 8):
        words = [f"w{n}" for n in range(start, start + 8)]
        assert look_up(kept, [words, words]) == look_up(kept, [words] * 2)
        assert len(kept._table._places) <= 18


def test_words_that_came_again_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MOST_WORDS", 100)
    asked: list[str] = []
    number = numbering()

    def find(words: list[str]) -> Sequence[Sequence[int]]:
        asked.extend(words)
        return number(words)

    kept, usual = Memo(Rows(find)), [f"usual{n}" * 4 for n in range(20)]
    expected = look_up(kept, [usual])
    for start in range(0, 2000, 10):
        assert (
            look_up(kept, [[*usual, *(f"rare{n}" for n in range(start, start + 10))]])[0][: len(expected[0])]
            == expected[0]
        )
    assert all(asked.count(word) == 1 for word in usual)


def test_what_is_forgotten_is_freed_at_once(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MOST_WORDS", 10)
    kept, stores = Memo(Tallies(Lexicon.build(bundle.stop_words, [*bundle.frequent], Device()))), []
    gc.disable()  # it would hide a store that holds itself
    try:
        for start in range(0, 100, 10):
            stores.append(weakref.ref(kept(to_texts([f"w{n}" for n in range(start, start + 10)]))[1]))
        assert len({id(store()) for store in stores if store()}) == 1
    finally:
        gc.enable()


@given(st.lists(st.lists(TEXTS, max_size=4), max_size=8))
def test_codes_tell_words_apart_where_words_are_forgotten(bundle: Bundle, batches: list[list[str]]) -> None:
    tokens = Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], Device()).tokens
    tokenize = BasicTokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memo, "MOST_WORDS", 6)
        kept = Memo(Codes(tokens))
        for texts in batches:
            places, codes = kept(to_texts(texts))
            seen: dict[int, str] = {}
            for text, row in zip(texts, rows(codes.of(places)), strict=True):
                for token, code in zip(tokenize(text), row, strict=True):
                    assert (code == -1 and not is_word(token)) or seen.setdefault(code, token) == token
                    assert token not in tokens or tokens[code] == token
            assert len(set(seen.values())) == len(seen)
            assert max(seen, default=0) < codes.num_codes <= len(tokens) + 2 * 6 + 4 * 60


class Two(Rows):
    """Two stores in one, of which the second can fail when the first has grown."""

    def __init__(self, find: Find, fails: list[BaseException]) -> None:
        super().__init__(find)
        self.fails = fails

    def add(self, words: list[str]) -> None:
        super().add(words)
        if len(words) > 1 and self.fails:
            raise self.fails.pop()

    def keep(self, places: Any) -> Self:
        kept = type(self)(self._find, self.fails)
        kept.extend(*self.take(places))
        return kept


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
def test_words_that_could_not_be_added_put_no_others_in_their_place(error: BaseException) -> None:
    fails: list[BaseException] = []
    kept: Memo[Rows] = Memo(Two(numbering(), fails))
    first = look_up(kept, [["early", "bird"]] * 2)
    fails.append(error)
    with pytest.raises(type(error)):
        look_up(kept, [["one", "two", "three"]])
    assert look_up(kept, [["late"]])[0][:-1] == [*map(ord, "late")]
    assert look_up(kept, [["early", "bird"]] * 2) == first
    (row,) = look_up(kept, [["three", "one"]])
    assert [*row[:5], *row[6:-1]] == [*map(ord, "threeone")]


def test_a_thread_that_waited_while_the_table_broke_asks_anew() -> None:
    kept = Memo(Rows(numbering()))
    table = kept._table
    table.is_broken = True
    assert table.look_up(to_texts(["new"]).cut) is None
    assert look_up(kept, [["new"]])[0][:-1] == [*map(ord, "new")]
    assert kept._table is not table


def test_no_slot_lies_in_two_lines_of_the_cache() -> None:
    for num_words in (0, 100, 10_000, 100_000):
        rows = memo._Slots(num_words)._rows
        assert (rows.ctypes.data % 32, rows.strides[0]) == (0, 32)
        assert not rows.any()


def test_threads_share_a_memo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MOST_WORDS", 120)  # so that some look while another forgets
    kept, texts = Memo(Rows(numbering())), [[f"word{n % 297}" for n in range(k, k + 300, 5)] for k in range(256)]
    with ThreadPoolExecutor(8) as callers:
        numbers: dict[str, set[int]] = {}
        for words, found in zip(texts, callers.map(lambda words: look_up(kept, [words])[0], texts), strict=True):
            position = 0
            for word in words:
                assert found[position : position + len(word)] == [*map(ord, word)]
                position += len(word) + 1
                numbers.setdefault(word, set()).add(found[position - 1])
    assert all(len(each) == 1 for each in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)
