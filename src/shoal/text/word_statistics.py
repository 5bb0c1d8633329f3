"""Statistics of texts, and how often listed words stand in them.

Of basic tokens and words see ``lexicon``. A *sentence* ends at a maximal run of ``. ! ? …`` tokens; text after the last
run, if it holds a word, is one more.

The host turns texts into codes (``TokenCoder``); everything after is array code, written once for every device.
"""

from __future__ import annotations

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
_MOST_CODES = 2**40  # more than a batch, or what is kept of earlier ones, can have


class TokenCoder:
    """Texts to token codes, on the host, as in ``TokenCodes``."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._words = WordCache(lambda: TokenCodes(lexicon.tokens))

    def __call__(self, texts: Texts) -> Ragged:
        """INT64 codes, one row per text."""
        return flatten(self._words(texts))


class DeviceCoder:
    """What ``TokenCoder`` gives, by array code, for tokens on a device.

    A word's own code is the rank of its hash, so two words of a batch may share one, with a probability of about 2^-57
    a pair.
    """

    def __init__(self, lexicon: Lexicon, device: Device) -> None:
        self._num_known = lexicon.num_known
        self._word_list = WordList(lexicon.tokens, device)
        self._word_characters = CodePoints.words(device)

    def __call__(self, words: Words) -> Ragged:
        """INT64 codes, a row a text."""
        hashes = self._word_list.hashes(words)
        xp, listed = namespace(hashes), self._word_list.find(hashes)
        own = self._num_known + _rank(hashes)
        unlisted = xp.where(words.are_words(self._word_characters), own, xp.full_like(listed[:1], -1))
        return Ragged(xp.where(listed >= 0, listed, unlisted), words.offsets)


def _rank(values: Array) -> Array:
    """The place of each value among the different ones, in order: INT64, from 0."""
    xp = namespace(values)
    order = xp.argsort(values)
    rank = xp.cumulative_sum(xp.astype(_differs(xp.take(values, order)), xp.int64)) - 1
    return xp.take(rank, xp.argsort(order))


def count_features(codes: Ragged, lexicon: Lexicon) -> Array:
    """The raw features, FP64 ``[rows, 7 + lists]``; all 0 in a row without a word."""
    statistics, counts = count_tokens(codes, lexicon)
    xp, words = namespace(counts), statistics[:, :1]
    raw = xp.concat([statistics, counts / xp.maximum(words, 1.0)], axis=1)
    return xp.where(words > 0, raw, xp.zeros_like(raw))


def count_tokens(codes: Ragged, lexicon: Lexicon) -> tuple[Array, Array]:
    """The seven statistics, FP64 ``[rows, 7]``, and how often each listed token stands in each row.

    The latter is INT64 ``[rows, lists]``. In a row without a word both still count what is no word.
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
    """How often each of 0 .. ``num_keys`` - 1 stands in ``keys``: INT64 ``[num_keys]``."""
    if isinstance(keys, np.ndarray):
        return np.bincount(keys, minlength=num_keys)
    # On a GPU bincount would wait to learn the greatest key.
    xp = namespace(keys)
    ends = xp.searchsorted(xp.sort(keys), xp.arange(num_keys, dtype=keys.dtype, device=device_of(keys)), side="right")
    return xp.concat([ends[:1], ends[1:] - ends[:-1]])


def _run_starts(is_end: Array, rows: Array) -> Array:
    """Where a run of sentence ends begins: the token before is none, or belongs to another row."""
    xp = namespace(is_end)
    goes_on = is_end[:-1] & (rows[1:] == rows[:-1])
    return is_end & ~xp.concat([xp.zeros_like(is_end[:1]), goes_on])


def _has_open_end(is_word: Array, is_end: Array, codes: Ragged) -> Array:
    """1 for each row with a word after its last sentence end, else 0: FP64 ``[rows]``."""
    xp = namespace(is_word)
    seen = xp.cumulative_sum(xp.astype(is_end, xp.int64))
    # Sentence ends up to the end of each row: where a word has seen as many, none follows it.
    total = xp.cumulative_sum(codes.sum(is_end))
    return xp.astype(codes.sum(is_word & (seen == xp.take(total, codes.row_ids))) > 0, xp.float64)


def _distinct(codes: Ragged, is_word: Array, rows: Array) -> Array:
    """How many different words each row has: FP64 ``[rows]``."""
    xp = namespace(is_word)
    if is_word.shape[0] == 0:
        return xp.zeros(len(codes), dtype=xp.float64, device=device_of(codes.offsets))
    words = xp.where(is_word, codes.values + 1, xp.zeros_like(codes.values[:1]))
    keys = xp.sort(rows * _MOST_CODES + words)  # sorted by row, so that sums over rows hold
    has_others = codes.sum(~is_word) > 0  # they share one code, 0
    return xp.astype(codes.sum(_differs(keys)) - xp.astype(has_others, xp.int64), xp.float64)


def _differs(values: Array) -> Array:
    """Whether each value differs from the one before it."""
    xp = namespace(values)
    return xp.concat([xp.ones_like(values[:1], dtype=xp.bool), values[1:] != values[:-1]])
