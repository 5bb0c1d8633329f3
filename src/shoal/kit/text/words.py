"""Words of texts: basic tokens, text statistics, and counts of the words of a list.

A *basic token* is a token of BERT's normalizer and pre-tokenizer: lower-cased, accents stripped, punctuation split off.
A *word* is a basic token with a letter or a digit (Unicode L* or Nd); any other basic token is punctuation. A
*sentence* ends at a maximal run of ``. ! ? …`` tokens; text after the last run, if it contains a word, is one more
sentence.

``TokenCoder`` converts texts to integer codes, one per basic token, and ``TokenCounter`` counts the codes. Both are
plain Python: the texts of a request have too few tokens for array code to pay off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as shorten

import numpy as np

from shoal.kit.component.files import find_repeated, read_text, refusal
from shoal.kit.component.ledger import SETUP
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device, namespace
from shoal.kit.text.tokens import WordCache, flatten

WORD_VALUES = ("count", "share", "presence")
SENTENCE_ENDS = (".", "!", "?", "…")
NUM_STATISTICS = 7  # of a text; TokenCounter lists them
_KIND = "list of words"
_ASCII_TOKEN = re.compile("[a-z0-9]+|[^a-z0-9 ]")


def is_word(token: str) -> bool:
    """Whether a basic token contains a letter or a digit."""
    return any(c.isalpha() or c.isdecimal() for c in token)


class BasicTokenizer:
    """BERT's normalizer and pre-tokenizer, always lower-casing."""

    def __init__(self) -> None:
        from tokenizers import normalizers, pre_tokenizers

        self._normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    def __call__(self, text: str) -> list[str]:
        """Split ``text`` into its basic tokens, in order."""
        return [token for token, _ in self._split(self._normalize(text))]


@dataclass(frozen=True)
class Lexicon:
    """Table of token attributes: one array per attribute, with one element per token.

    Elements 0 .. n-1 are for the n known ``tokens``: sentence ends, stop words, and the words to count. Element n is
    for every other word, element n + 1 for every other punctuation token. ``column`` is a token's index among the
    ``num_listed`` words to count, or ``num_listed`` for a token that is not one of them.
    """

    tokens: tuple[str, ...]
    is_word: Array  # BOOL [n + 2]
    is_stop: Array  # BOOL [n + 2]
    is_end: Array  # BOOL [n + 2]
    column: Array  # INT64 [n + 2]
    num_listed: int

    @property
    def num_known(self) -> int:
        """Number of known tokens, n."""
        return len(self.tokens)

    @classmethod
    def build(cls, stop_words: Sequence[str], listed: Sequence[str], device: Device) -> Lexicon:
        """Build the lexicon; ``listed`` are the words to count, in the order of the columns of the counts."""
        tokens = tuple(dict.fromkeys([*SENTENCE_ENDS, *stop_words, *listed]))
        columns, stops = {word: k for k, word in enumerate(listed)}, set(stop_words)
        put = partial(device.put, edge=SETUP)
        return cls(
            tokens=tokens,
            is_word=put(np.array([*map(is_word, tokens), True, False])),
            is_stop=put(np.array([*(t in stops for t in tokens), False, False])),
            is_end=put(np.array([*(t in SENTENCE_ENDS for t in tokens), False, False])),
            column=put(np.array([*(columns.get(t, len(listed)) for t in tokens), len(listed), len(listed)])),
            num_listed=len(listed),
        )


class TokenCodes:
    """Function that returns the integer codes of tokens.

    The code of a token in ``listed`` is its index there; of another word, the next free number, from the length of
    ``listed`` on; of other punctuation, -1. The words are kept until ``forget`` is called; then numbers are used again,
    so codes can only be compared with codes from the same time. Only one thread may call at a time.
    """

    def __init__(self, listed: Sequence[str]) -> None:
        self._listed = {token: code for code, token in enumerate(listed)}
        self._tokenize = BasicTokenizer()
        self.forget()

    def forget(self) -> None:
        """Forget all words that are not listed."""
        self._codes = self._listed.copy()

    def __call__(self, words: list[str]) -> list[list[int]]:
        """Return the codes of the basic tokens of each whitespace-separated word."""
        return [[self._code(token) for token in self.split(word)] for word in words]

    def split(self, word: str) -> list[str]:
        """Split into basic tokens; a regular expression does the same for printable ASCII, ten times as fast."""
        if word.isascii() and word.isprintable():
            return _ASCII_TOKEN.findall(word.lower())
        return self._tokenize(word)

    def _code(self, token: str) -> int:
        code = self._codes.get(token)
        if code is None:
            code = self._codes.setdefault(token, len(self._codes)) if is_word(token) else -1
        return code


class TokenCoder:
    """Encoder from texts to token codes (see ``TokenCodes``), cached by word. Thread-safe."""

    def __init__(self, lexicon: Lexicon) -> None:
        codes = TokenCodes(lexicon.tokens)
        self._words = WordCache(codes, codes.forget)

    def __call__(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the codes of each text's basic tokens, in order. Only codes of the same text can be compared."""
        return flatten(self._words(texts))


class TokenCounter:
    """Counter of words in texts that are given as token codes; the arrays of ``lexicon`` are on the host."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._num_known, self._num_listed = lexicon.num_known, lexicon.num_listed
        self._is_word, self._is_stop = lexicon.is_word.tolist(), lexicon.is_stop.tolist()
        self._column = lexicon.column.tolist()
        self._ends = frozenset(np.flatnonzero(lexicon.is_end).tolist())

    def __call__(self, rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Return 7 statistics of each row, FP64 ``[rows, 7]``, and counts of words, INT64 ``[rows, words to count]``.

        The statistics are the numbers of words, distinct words, punctuation tokens, sentences, words per sentence, stop
        words, and stop words per sentence. Punctuation is counted even in a row without a word.
        """
        statistics = np.empty((len(rows), NUM_STATISTICS))
        counts = np.zeros((len(rows), self._num_listed + 1), np.int64)  # the last: tokens in no list
        for row, codes in enumerate(rows):
            words = distinct = stops = 0
            numbers = Counter(codes)
            for code, number in numbers.items():
                if code >= self._num_known:
                    words += number
                    distinct += 1
                elif code >= 0:
                    counts[row, self._column[code]] = number
                    if self._is_word[code]:
                        words += number
                        distinct += 1
                        stops += number * self._is_stop[code]
            sentences = self._count_sentences(codes) if self._ends & numbers.keys() else min(words, 1)
            per_sentence = max(sentences, 1)
            counts_of = (words, distinct, len(codes) - words, sentences)
            statistics[row] = (*counts_of, words / per_sentence, stops, stops / per_sentence)
        return statistics, counts[:, :-1]

    def _count_sentences(self, codes: Sequence[int]) -> int:
        """Count the runs of sentence ends, and one more if a word follows the last run."""
        ends, num_known, is_word = self._ends, self._num_known, self._is_word
        num_runs, was_end, is_open = 0, False, False
        for code in codes:
            if code in ends:
                num_runs += not was_end
                was_end, is_open = True, False
            else:
                was_end = False
                is_open = is_open or code >= num_known or (code >= 0 and is_word[code])
        return num_runs + is_open


def make_features(statistics: Array, counts: Array) -> Array:
    """Return the raw features, FP64 ``[rows, 7 + words in the list]``.

    They are the 7 statistics, then the share of the row's words that is each word of the list. In a row without a word,
    all are 0.
    """
    xp, words = namespace(counts), statistics[:, :1]
    raw = xp.concat([statistics, counts / xp.maximum(words, 1.0)], axis=1)
    return xp.where(words > 0, raw, xp.zeros_like(raw))


# --- the component word_counts -----------------------------------------------------------------------------------


def read_words(path: Path) -> tuple[str, ...]:
    """Read the words of a text file, one per line.

    Raises:
        ArtifactError: the file is not UTF-8 text, a word is repeated, or a word is not exactly one basic token and so
            can never occur in a text.
    """
    words, tokenize = read_text(path, _KIND).removesuffix("\n").split("\n"), BasicTokenizer()
    for number, word in enumerate(words, 1):
        if not word.strip():
            raise refusal(path, _KIND, f"line {number:,} is blank")
        if (tokens := tokenize(word)) != [word]:
            raise refusal(path, _KIND, f"line {number:,} is {shorten(word)}, which becomes {shorten(tokens)} in texts")
    if repeated := find_repeated(words):
        raise refusal(path, _KIND, f"it holds {shorten(repeated)} twice")
    return tuple(words)


class WordCounts:
    """Counter of the words of a list in texts.

    ``value`` is ``count``, ``share`` (the count divided by the text's number of words; 0 if the text has no word) or
    ``presence`` (1 or 0). With ``has_statistics``, the 7 statistics of ``TokenCounter`` are counted, too.
    """

    def __init__(
        self, words: Sequence[str], stop_words: Sequence[str], *, value: str = "count", has_statistics: bool = False
    ) -> None:
        self._value, self._has_statistics = value, has_statistics
        lexicon = Lexicon.build(stop_words, words, Device())
        self._encode, self._count = TokenCoder(lexicon), TokenCounter(lexicon)
        self.num_columns = len(words) + (NUM_STATISTICS if has_statistics else 0)

    def __call__(self, texts: Iterable[str]) -> Array:
        """Return FP32 ``[texts, columns]`` on the host: the statistics, if any, then one column per word of the list.

        The statistics of a text without a word are all 0.
        """
        statistics, counts = self._count(self._encode(texts))
        words = statistics[:, :1]
        if self._value == "share":
            counts = counts / np.maximum(words, 1.0) * (words > 0)
        elif self._value == "presence":
            counts = counts > 0
        columns = [np.where(words > 0, statistics, 0), counts] if self._has_statistics else [counts]
        return np.concatenate(columns, axis=1).astype(np.float32)
