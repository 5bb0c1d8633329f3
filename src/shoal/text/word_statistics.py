"""Text statistics and counts of listed words.

Basic tokens and words are defined in ``lexicon``. A *sentence* ends at a maximal run of ``. ! ? …`` tokens; text after
the last run, if it contains a word, is one more.

The host turns texts into codes (``TokenCoder``). On the host plain Python counts them (``TokenCounter``): a request has
too few for array code to pay off. On a device array code does (``count_tokens``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from array_api_compat import device as device_of

from shoal.component.tensors import Array, Device, namespace
from shoal.text.device.device_tokens import CodePoints, WordList, Words
from shoal.text.lexicon import Lexicon, TokenCodes
from shoal.text.ragged import Ragged, Texts
from shoal.text.word_cache import WordCache, flatten

STATISTICS = (
    "words",
    "distinct_words",
    "punctuation",
    "sentences",
    "words_per_sentence",
    "stop_words",
    "stop_words_per_sentence",
)
NUM_STATISTICS = len(STATISTICS)
_MOST_CODES = 2**40  # more than a batch, or the cache of earlier ones, can have


class TokenCoder:
    """Host encoder from texts to token codes (see ``TokenCodes``), cached by word."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._words = WordCache(lambda: TokenCodes(lexicon.tokens))

    def __call__(self, texts: Texts) -> list[list[int]]:
        """Return the codes of each text."""
        return flatten(self._words(texts))


class DeviceCoder:
    """Device counterpart of ``TokenCoder``, in array code.

    The code of an unlisted word comes from the rank of its hash, so two words of a batch may share a code, with a
    probability of about 2^-57 per pair.
    """

    def __init__(self, lexicon: Lexicon, device: Device) -> None:
        self._num_known = lexicon.num_known
        self._word_list = WordList(lexicon.tokens, device)
        self._word_characters = CodePoints.words(device)

    def __call__(self, words: Words) -> Ragged:
        """Return INT64 codes, one row per text."""
        hashes = self._word_list.hashes(words)
        xp, listed = namespace(hashes), self._word_list.find(hashes)
        own = self._num_known + _rank(hashes)
        unlisted = xp.where(words.are_words(self._word_characters), own, xp.full_like(listed[:1], -1))
        return Ragged(xp.where(listed >= 0, listed, unlisted), words.offsets)


def _rank(values: Array) -> Array:
    """Return the dense rank of each value, from 0: INT64."""
    xp = namespace(values)
    # In sorted order the rank grows by 1 wherever a value differs from the one before; then undo the sort.
    order = xp.argsort(values)
    rank = xp.cumulative_sum(xp.astype(_differs(xp.take(values, order)), xp.int64)) - 1
    return xp.take(rank, xp.argsort(order))


def make_features(statistics: Array, counts: Array) -> Array:
    """Return the raw features, FP64 ``[rows, 7 + lists]``, of statistics and counts; all 0 in a row without a word."""
    xp, words = namespace(counts), statistics[:, :1]
    raw = xp.concat([statistics, counts / xp.maximum(words, 1.0)], axis=1)
    return xp.where(words > 0, raw, xp.zeros_like(raw))


def count_features(codes: Ragged, lexicon: Lexicon) -> Array:
    """Return the raw features of codes, on the codes' device."""
    return make_features(*count_tokens(codes, lexicon))


class TokenCounter:
    """Host counterpart of ``count_tokens`` in plain Python; ``lexicon`` is on the host."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._num_known, self._num_listed = lexicon.num_known, lexicon.num_listed
        self._is_word, self._is_stop = lexicon.is_word.tolist(), lexicon.is_stop.tolist()
        self._column = lexicon.column.tolist()
        self._ends = frozenset(np.flatnonzero(lexicon.is_end).tolist())

    def __call__(self, rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Count the codes of each row, as ``count_tokens`` does."""
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
            statistics[row] = (
                words, distinct, len(codes) - words, sentences, words / per_sentence, stops, stops / per_sentence
            )  # fmt: skip
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


def count_tokens(codes: Ragged, lexicon: Lexicon) -> tuple[Array, Array]:
    """Return the seven statistics, FP64 ``[rows, 7]``, and each row's counts of listed tokens, INT64 ``[rows, lists]``.

    In a row without a word both still count punctuation.
    """
    xp = namespace(codes.values)
    num_known, num_rows = lexicon.num_known, len(codes)
    rows = codes.row_ids
    kind = xp.where(codes.values < 0, xp.full_like(codes.values[:1], num_known + 1), codes.values)
    kind = xp.where(codes.values > num_known, xp.full_like(codes.values[:1], num_known), kind)
    is_word, is_end = xp.take(lexicon.is_word, kind), xp.take(lexicon.is_end, kind)

    def count(where: Array) -> Array:
        return xp.astype(codes.sum(where), xp.float64)

    words = count(is_word)
    sentences = count(_run_starts(is_end, rows)) + _has_open_end(is_word, is_end, codes)
    stops = count(xp.take(lexicon.is_stop, kind))
    statistics = [
        words,
        _distinct(codes, is_word, rows),
        count(~is_word),
        sentences,
        words / xp.maximum(sentences, 1.0),
        stops,
        stops / xp.maximum(sentences, 1.0),
    ]
    width = lexicon.num_listed + 1  # one column more, for the tokens in neither list
    cells = count_keys(rows * width + xp.take(lexicon.column, kind), num_rows * width)
    return xp.stack(statistics, axis=1), xp.reshape(cells, (num_rows, width))[:, :-1]


def count_keys(keys: Array, num_keys: int) -> Array:
    """Count the occurrences of each of 0 .. ``num_keys`` - 1 in ``keys``: INT64 ``[num_keys]``."""
    if isinstance(keys, np.ndarray):
        return np.bincount(keys, minlength=num_keys)
    # On a GPU bincount would wait for the device to read the greatest key. In sorted keys each key is one run.
    xp = namespace(keys)
    ends = xp.searchsorted(xp.sort(keys), xp.arange(num_keys, dtype=keys.dtype, device=device_of(keys)), side="right")
    return xp.concat([ends[:1], ends[1:] - ends[:-1]])


def _run_starts(is_end: Array, rows: Array) -> Array:
    """Mark the first token of each run of sentence ends: the token before is not one, or is in another row."""
    xp = namespace(is_end)
    goes_on = is_end[:-1] & (rows[1:] == rows[:-1])
    return is_end & ~xp.concat([xp.zeros_like(is_end[:1]), goes_on])


def _has_open_end(is_word: Array, is_end: Array, codes: Ragged) -> Array:
    """Return 1 for each row with a word after its last sentence end, else 0: FP64 ``[rows]``."""
    xp = namespace(is_word)
    seen = xp.cumulative_sum(xp.astype(is_end, xp.int64))
    # Sentence ends up to the end of each row: if as many precede a word, none follows it.
    total = xp.cumulative_sum(codes.sum(is_end))
    return xp.astype(codes.sum(is_word & (seen == xp.take(total, codes.row_ids))) > 0, xp.float64)


def _distinct(codes: Ragged, is_word: Array, rows: Array) -> Array:
    """Count the distinct words of each row: FP64 ``[rows]``."""
    xp = namespace(is_word)
    if is_word.shape[0] == 0:
        return xp.zeros(len(codes), dtype=xp.float64, device=device_of(codes.offsets))
    # One sort of (row, word) keys puts equal words of a row side by side; each first occurrence differs from its left.
    words = xp.where(is_word, codes.values + 1, xp.zeros_like(codes.values[:1]))
    keys = xp.sort(rows * _MOST_CODES + words)  # sorted by row, so that sums over rows hold
    has_others = codes.sum(~is_word) > 0  # they share one code, 0
    return xp.astype(codes.sum(_differs(keys)) - xp.astype(has_others, xp.int64), xp.float64)


def _differs(values: Array) -> Array:
    """Whether each value differs from the one before it."""
    xp = namespace(values)
    return xp.concat([xp.ones_like(values[:1], dtype=xp.bool), values[1:] != values[:-1]])
