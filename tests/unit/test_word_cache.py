"""Words that were seen are not read again; what is found for a text is what it would be without."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kit.component.tensors import Device
from shoal.kit.text import tokens
from shoal.kit.text.tokens import WordCache, WordPiece, flatten
from shoal.kit.text.words import BasicTokenizer, Lexicon, TokenCoder, TokenCodes, is_word
from shoal.readability.preprocess_config import Bundle

# All that a normalizer or a pre-tokenizer treats in a way of its own, beside letters.
ODD = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f\x85\xa0\xad\u1680\u2000\u2028\u2029\u202f\u205f\u3000\u200b\ufeff\x00\ufffd"
    "'’-[]…漢字\u0301İßﬁ"
)
TEXTS = st.one_of(
    st.text(st.sampled_from(ODD + "aZé9. ") | st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(["[SEP]", "[MASK]", "a", " ", "[", "\x1c", "."]), max_size=8).map("".join),
)


@given(st.lists(TEXTS, max_size=6))
def test_pieces_are_those_of_the_whole_text(wordpiece: WordPiece, texts: list[str]) -> None:
    whole = wordpiece._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    assert flatten(wordpiece._words(texts)) == [list(each.ids) for each in whole]


@given(TEXTS)
def test_basic_tokens_are_those_of_the_whole_text(text: str) -> None:
    tokenize = BasicTokenizer()
    (words,) = WordCache(list)([text])
    assert [token for word in words for token in tokenize(word)] == tokenize(text)


def test_ascii_is_split_as_berts_pre_tokenizer_does() -> None:
    tokenize, split = BasicTokenizer(), TokenCodes(["a"]).split
    characters = list(map(chr, range(128)))
    for text in [*characters, *(f"aB{c}{d}3 x" for c in characters for d in characters)]:
        assert split(text) == tokenize(text)


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, max_size=6))
def test_codes_tell_words_apart_whatever_came_before(bundle: Bundle, before: list[str], texts: list[str]) -> None:
    coder = TokenCoder(Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], Device()))
    coder(before)
    tokenize, seen = BasicTokenizer(), dict[int, str]()
    for text, codes in zip(texts, coder(texts), strict=True):
        for token, code in zip(tokenize(text), codes, strict=True):
            assert code == -1 or seen.setdefault(code, token) == token
    assert len(set(seen.values())) == len(seen)


def numbering() -> Callable[[list[str]], list[list[int]]]:
    """Each word's letters, and a number of its own; nothing for the empty word."""
    numbers: dict[str, int] = {}
    return lambda words: [[*map(ord, word), numbers.setdefault(word, len(numbers))] if word else [] for word in words]


def look_up(cache: WordCache[list[int]], texts: Sequence[Sequence[str]]) -> list[list[int]]:
    return flatten(cache(map(" ".join, texts)))


def test_rows_without_words() -> None:
    assert look_up(WordCache(numbering()), [[], ["ab"], [], []]) == [[], [97, 98, 0], [], []]
    assert look_up(WordCache(numbering()), []) == []


@given(st.lists(TEXTS, max_size=6))
def test_words_are_split_at_ascii_white_space(texts: list[str]) -> None:
    cache: WordCache[str] = WordCache(list)
    assert cache(texts) == [re.split("[\t\n\r ]", text) for text in texts]


def test_a_word_is_found_once() -> None:
    asked: list[str] = []

    def find(words: list[str]) -> list[list[int]]:
        asked.extend(words)
        return [[len(word)] for word in words]

    cache, words = WordCache(find), [f"word{n}" * (1 + n % 5) for n in range(3000)]
    for start in (0, 7, 0, 2000, 1000):
        some = words[start : start + 1000]
        assert look_up(cache, [some, some[:5]]) == [[*map(len, some)], [*map(len, some[:5])]]
    assert sorted(asked) == sorted(words)


@pytest.mark.parametrize("limit", ["MOST_WORDS", "MOST_CHARACTERS"])
def test_the_cache_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, limit, 10)
    cache = WordCache(numbering())
    for start in range(0, 200, 8):
        words = [f"w{n}" for n in range(start, start + 8)]
        one, two = look_up(cache, [words, words])
        assert one == two
        assert len(cache._known) <= 18


@given(st.lists(st.lists(TEXTS, max_size=4), max_size=8))
def test_codes_tell_words_apart_where_words_are_forgotten(bundle: Bundle, batches: list[list[str]]) -> None:
    listed = Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], Device()).tokens
    tokenize = BasicTokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "MOST_WORDS", 6)
        codes = TokenCodes(listed)
        cache = WordCache(codes, codes.forget)
        for texts in batches:
            for text, row in zip(texts, flatten(cache(texts)), strict=True):
                seen: dict[int, str] = {}
                for token, code in zip(tokenize(text), row, strict=True):
                    assert (code == -1 and not is_word(token)) or seen.setdefault(code, token) == token
                    assert token not in listed or listed[code] == token
                assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
def test_words_that_could_not_be_found_are_found_later(error: BaseException) -> None:
    number, fails = numbering(), [error]

    def find(words: list[str]) -> Sequence[list[int]]:
        if "two" in words and fails:
            raise fails.pop()
        return number(words)

    cache = WordCache(find)
    first = look_up(cache, [["early", "bird"]] * 2)
    with pytest.raises(type(error)):
        look_up(cache, [["one", "two", "three"]])
    assert look_up(cache, [["early", "bird"]] * 2) == first
    (row,) = look_up(cache, [["three", "one"]])
    assert [*row[:5], *row[6:-1]] == [*map(ord, "threeone")]


def test_threads_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text's words are all found, even if another thread empties the cache meanwhile."""
    monkeypatch.setattr(tokens, "MOST_WORDS", 120)
    cache, texts = WordCache(numbering()), [[f"word{n % 297}" for n in range(k, k + 300, 5)] for k in range(256)]
    with ThreadPoolExecutor(8) as callers:
        for words, found in zip(texts, callers.map(lambda words: look_up(cache, [words])[0], texts), strict=True):
            numbers: dict[str, set[int]] = {}
            position = 0
            for word in words:
                assert found[position : position + len(word)] == [*map(ord, word)]
                position += len(word) + 1
                numbers.setdefault(word, set()).add(found[position - 1])
            assert all(len(each) == 1 for each in numbers.values())
            assert len(set.union(*numbers.values())) == len(numbers)
