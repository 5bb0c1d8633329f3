"""Different words are counted as different, also where their hashes are the same: on the host and on a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kit.component.ledger import EXACT_ROWS
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device
from shoal.kit.text import device as on_device
from shoal.kit.text import tokens
from shoal.kit.text.device import DeviceCoder, Words, count_tokens, upload
from shoal.kit.text.tokens import MAX_WORD_CHARS, read_vocabulary
from shoal.kit.text.words import BasicTokenizer, Lexicon, TokenCoder, TokenCounter, is_word, make_features
from shoal.readability.preprocess_config import Bundle
from shoal.readability.reader import Reader
from tests.conftest import Scale
from tests.support.pretend import PretendGpu
from tests.support.readings import assert_same_reading, device_reader
from tests.support.references import raw_features

TOKENIZE = BasicTokenizer()
STOP_WORDS, LISTED = ("the", "и"), ("zz", "cat", "кот", "字")


def twins() -> list[tuple[str, str]]:
    """Pairs of words whose characters have the same bytes, which are all that CPython hashes.

    A string of Latin-1 has one byte per character, others have two or four. Two characters of the first are one of the
    second kind. Words have none in common with the third: their bytes would be control characters of the others.
    """
    latin = [chr(code) for code in range(0x30, 0x100) if TOKENIZE(chr(code)) == [chr(code)] and is_word(chr(code))]
    pairs = [(one + two, chr(ord(one) | ord(two) << 8)) for one, two in product(latin, latin)]
    found = [(narrow, wide) for narrow, wide in pairs if is_word(wide) and TOKENIZE(wide) == [wide]]
    kana = [pair for pair in found if "\u3040" < pair[1] < "\u30ff"]  # which are not split off one by one
    return found + [(a + b, c + d) for (a, c), (b, d) in product(kana, kana)]


TWINS = twins()
SCRIPTS = """
the cat zz sat on a mat naïve и кот спит ο γάτος κοιμάται القط ينام הֶחָתוּל ישן बिल्ली सो रही है
고양이가 잔다 ねこ カタ 漢字 空 . , ! ? … — 。 ٣ 4 ²
"""
WORDS = tuple(SCRIPTS.split())


def planted(number: int) -> list[str]:
    """Texts in eight scripts, most with both words of a pair."""
    chance, texts = random.Random(5), []
    for _ in range(number):
        words = chance.choices(WORDS, k=chance.randint(0, 12))
        for pair in chance.sample(TWINS, chance.randint(0, 2)):
            words += chance.choices(pair, k=chance.randint(1, 4))
        chance.shuffle(words)
        texts.append(" ".join(words))
    return texts


def reference(texts: Sequence[str]) -> Array:
    return np.array([raw_features(TOKENIZE(text), STOP_WORDS, LISTED) for text in texts])


def on_host(coder: TokenCoder, lexicon: Lexicon, texts: Sequence[str]) -> Array:
    return make_features(*TokenCounter(lexicon)(coder(texts)))


def read_on(device: Device, texts: Sequence[str], size: int = 256) -> Array:
    lexicon = Lexicon.build(STOP_WORDS, LISTED, device)
    code, rows = DeviceCoder(lexicon, device), []
    for start in range(0, len(texts), size):
        clean = [" ".join(TOKENIZE(text)) for text in texts[start : start + size]]
        codes, is_wrong = code(Words.find(upload(clean, device, "TEXT"), device))
        assert not is_wrong
        rows.append(np.asarray(make_features(*count_tokens(codes, lexicon))))
    return np.concatenate(rows)


def test_two_words_of_one_hash_are_two() -> None:
    assert len(TWINS) > 1000
    assert ("zz", "空") in TWINS
    assert all(hash(one) == hash(two) for one, two in TWINS)
    lexicon = Lexicon.build((), ("cat",), Device())
    rows = on_host(TokenCoder(lexicon), lexicon, [" ".join(pair) for pair in TWINS])
    assert np.unique(rows[:, :2]).tolist() == [2.0]


def test_features_are_those_of_plain_sets(scale: Scale) -> None:
    texts = planted(scale(4000, full=100_000))
    expected, lexicon = reference(texts), Lexicon.build(STOP_WORDS, LISTED, Device())
    assert np.array_equal(on_host(TokenCoder(lexicon), lexicon, texts), expected)
    for device in (Device(), PretendGpu()):
        assert np.array_equal(read_on(device, texts), expected)


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from(TWINS).flatmap(st.sampled_from) | st.sampled_from(WORDS)).map(" ".join)))
def test_any_texts_of_twins(texts: list[str]) -> None:
    lexicon = Lexicon.build(STOP_WORDS, LISTED, Device())
    expected = reference(texts).reshape(len(texts), -1 if texts else 7 + len(LISTED))
    assert np.array_equal(on_host(TokenCoder(lexicon), lexicon, texts), expected)


def test_threads_share_numbers_that_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_WORDS", 40)
    texts, lexicon = planted(2000), Lexicon.build(STOP_WORDS, LISTED, Device())
    coder = TokenCoder(lexicon)
    parts = [texts[start : start + 20] for start in range(0, len(texts), 20)]
    with ThreadPoolExecutor(8) as callers:
        found = np.concatenate([*callers.map(lambda part: on_host(coder, lexicon, part), parts)])
    assert np.array_equal(found, reference(texts))
    codes = coder._words._find
    assert len(codes._codes) < 300  # type: ignore[attr-defined]


# --- a device, whose hash is another ----------------------------------------------------------------------------------


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that is the same for words of the same letters."""
    monkeypatch.setattr(on_device, "hash_factors", lambda device: device.put(np.ones(MAX_WORD_CHARS, np.int64), ""))


ANAGRAMS = st.lists(st.text("abté", min_size=1, max_size=3) | st.just("a" * 99 + "bab"), max_size=6).map(" ".join)


@pytest.mark.parametrize("device", [Device(), PretendGpu()], ids=["numpy", "torch"])
@pytest.mark.usefixtures("weak")
def test_words_of_one_hash_are_found(device: Device) -> None:
    listed = ["at", "tab"]
    coder = DeviceCoder(Lexicon.build((), listed, device), device)

    @settings(max_examples=50)
    @given(st.lists(ANAGRAMS, max_size=4))
    def check(texts: list[str]) -> None:
        _, is_wrong = coder(Words.find(upload(texts, device, "TEXT"), device))
        words = {word for text in texts for word in text.split() if len(word.encode()) <= MAX_WORD_CHARS}
        hashes = {sum(word.encode()) + len(word.encode()) for word in words | set(listed)}
        assert bool(is_wrong) == (len(hashes) < len(words | set(listed)))

    check()


@pytest.mark.usefixtures("weak")
@pytest.mark.parametrize("texts", [["tac cat", "zzzzzzz"], ["tac", "cat"], ["tac it is", "a cat"], ["eht"]])
def test_a_batch_with_words_of_one_hash_is_read_on_the_host(artifacts: Path, bundle: Bundle, texts: list[str]) -> None:
    vocabulary, device = read_vocabulary(artifacts / "vocab.txt"), PretendGpu()
    read, host = device_reader(vocabulary, bundle, device), Reader(vocabulary, bundle)
    for batch, num_exact in ((texts, len(texts)), (["zzzzzzz", "zzzzzzz zzzzzzz"], 0)):
        before = device.ledger.events.get(EXACT_ROWS, 0)
        assert_same_reading(read(batch), host(batch))
        assert device.ledger.events.get(EXACT_ROWS, 0) - before == num_exact
