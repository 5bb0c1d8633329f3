"""The features' counts on the host: what words add to them is added up, instead of looking at every token.

The same numbers as ``count_features`` gives of the tokens' codes, by another way. Array code for NumPy alone.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from shoal.text.lexicon import Codes, Lexicon
from shoal.text.ragged import Ragged
from shoal.text.word_cache import Column, Places, Rows
from shoal.text.word_statistics import NUM_STATISTICS

Ints = NDArray[np.int64]

_HALF = 32  # bits: two counts in one integer are added up at once
_LOW = 2**_HALF - 1
_BEGINS, _CLOSES, _IS_OPEN = 1, 2, 4  # the first token is a sentence end; the last is; a word stands after the last end


class Tallies:
    """What is known of each word for the features, for a ``Memo``.

    A word here stands between white space, and may have any number of basic tokens. ``lexicon`` lies on the host.
    """

    def __init__(self, lexicon: Lexicon, codes: Codes | None = None) -> None:
        self.codes = codes or Codes(lexicon.tokens)
        self._lexicon = lexicon
        self._none = lexicon.num_listed
        # Words and stop words; punctuation and runs of ends; the number of the one token that counts as this word or
        # that, which is a listed word's column or a number behind those; what stands at the edges. Rows of 32 bytes.
        self._table = Column(np.int64, 4)
        # Where several tokens count, their number is ~k, and theirs are in row k.
        self._several, self._num_several = Rows(lambda words: []), 0
        # Listed tokens that are no words have shares, but are not among the distinct words.
        self._uncounted = [self._none, *{int(c) for c in lexicon.column[~lexicon.is_word] if c < self._none}]

    def add(self, words: list[str]) -> None:
        """Find what is to be known of words."""
        before = self._table.size
        self.codes.add(words)
        self._extend(*self.codes.take(np.arange(before, before + len(words))))

    def keep(self, places: Places) -> Self:
        """A store of its own with only these places."""
        kept = type(self)(self._lexicon, self.codes.keep(places))
        kept._extend(*kept.codes.take(np.arange(len(places))))
        return kept

    def _extend(self, counts: Ints, codes: Ints) -> None:
        """What is known of words whose tokens have these codes, ``counts[i]`` the i-th."""
        lexicon, known = self._lexicon, self._lexicon.num_known
        kind = np.where(codes < 0, known + 1, np.minimum(codes, known))
        is_word, is_end, column = lexicon.is_word[kind], lexicon.is_end[kind], lexicon.column[kind]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        tokens = Ragged(codes, offsets)
        rows, filled = tokens.row_ids, np.flatnonzero(counts)
        first, last = offsets[filled], offsets[filled + 1] - 1

        before = np.zeros_like(is_end)
        before[1:] = is_end[:-1]
        before[first] = False
        num_ends = np.cumsum(is_end)
        table = np.zeros((len(counts), 4), np.int64)
        after = is_word & (num_ends == num_ends[offsets[rows + 1] - 1])
        is_listed = column < self._none
        table[:, 0] = tokens.sum(is_word) + (tokens.sum(lexicon.is_stop[kind]) << _HALF)
        table[:, 1] = tokens.sum(~is_word) + (tokens.sum(is_end & ~before) << _HALF)
        table[:, 2] = self._number(tokens, is_word | is_listed, np.where(is_listed, column, codes + 1 + self._none))
        table[filled, 3] = is_end[first] * _BEGINS + is_end[last] * _CLOSES
        table[:, 3] += (tokens.sum(after) > 0) * _IS_OPEN
        self._table.extend(table)

    def _number(self, tokens: Ragged, counts: NDArray[np.bool_], numbers: Ints) -> Ints:
        """Each word's number, from those of the tokens that count."""
        num_counted = tokens.sum(counts)
        own = np.full(len(tokens), self._none)
        is_one, is_several = num_counted == 1, num_counted > 1
        own[is_one] = numbers[counts & is_one[tokens.row_ids]]
        more = num_counted[is_several]
        own[is_several] = ~(self._num_several + np.arange(len(more)))
        self._num_several += len(more)
        self._several.extend(more, numbers[counts & is_several[tokens.row_ids]])
        return own

    def count(self, places: Ragged) -> NDArray[np.float64]:
        """The raw features, FP64 ``[rows, 7 + lists]``; all 0 in a row without a word."""
        raw = np.empty((len(places), NUM_STATISTICS + self._none))
        counts = self.tally(places, raw)
        words = raw[:, :1]
        np.divide(counts, np.maximum(words, 1), out=raw[:, NUM_STATISTICS:])
        raw[words[:, 0] == 0] = 0
        return raw

    def tally(self, places: Ragged, statistics: NDArray[np.float64]) -> Ints:
        """How often each listed token stands in each row, INT64 ``[rows, lists]``: as ``count_tokens`` has it.

        The seven statistics are written into the first columns of ``statistics``.
        """
        found, none = self._table.values.take(places.values, axis=0), self._none
        sums = np.zeros((len(found) + 1, 2), np.int64)
        np.cumsum(found[:, :2], axis=0, out=sums[1:])
        ends: Ints = sums[places.offsets]
        halves = ends[1:] - ends[:-1]
        low, high = halves & _LOW, halves >> _HALF
        words, marks, stops, runs = low[:, 0], low[:, 1], high[:, 0], high[:, 1]
        cells, distinct = self._count_numbers(places, found[:, 2])
        sentences = runs + self._correct(places, found, sums)
        at_least_one = np.maximum(sentences, 1)
        values = words, distinct, marks, sentences, words / at_least_one, stops, stops / at_least_one
        for column, value in enumerate(values):
            statistics[:, column] = value
        return cells[:, :none]

    def _correct(self, places: Ragged, found: Ints, sums: Ints) -> Ints:
        """What a row's sentences are beside its words' runs of ends: the open one, less the runs that go on.

        ``found`` stands at the places, and ``sums`` are its first columns' totals before each word.
        """
        offsets = places.offsets
        ending = (found[:, 1] > _LOW).nonzero()[0]  # the words with a sentence end
        edges, rows = found[:, 3].take(ending), offsets.searchsorted(ending, side="right") - 1
        is_last = np.empty(len(ending), np.bool_)
        is_last[-1:] = True
        np.not_equal(rows[1:], rows[:-1], out=is_last[:-1])
        # A row is open if a word follows its last end, within the same word or after it.
        last, behind = is_last.nonzero()[0], offsets[:-1].copy()
        last_rows = rows[last]
        behind[last_rows] = ending[last] + 1
        is_open = (sums[offsets[1:], 0] - sums[behind, 0]) & _LOW
        is_open[last_rows] |= edges[last] & _IS_OPEN
        correction: Ints = (is_open > 0).astype(np.int64)
        # One run, if nothing but words without tokens stands between two words of a row.
        later = (edges[1:] & _BEGINS & ~is_last[:-1]).nonzero()[0]
        if len(later):
            goes_on = (sums[ending[later + 1]] == sums[ending[later] + 1]).all(axis=1)
            goes_on &= edges[later] & _CLOSES > 0
            correction -= np.bincount(rows[later[goes_on]], minlength=len(places))
        return correction

    def _count_numbers(self, places: Ragged, numbers: Ints) -> tuple[Ints, Ints]:
        """How often each listed number stands in each row, and how many different words a row has.

        INT64 ``[rows, listed + 1]``, the last for tokens without a number, and INT64 ``[rows]``.
        """
        num_rows, width = len(places), self._none + 1
        rows = np.arange(num_rows).repeat(places.lengths)
        several = (numbers < 0).nonzero()[0]
        if len(several):
            counts, more = self._several.take(~numbers[several])
            numbers[several] = self._none
            numbers, rows = np.concatenate([numbers, more]), np.concatenate([rows, rows[several].repeat(counts)])
        rows <<= _HALF
        rows |= numbers
        rows.sort()
        # Each number of each row once, and how often it stands there.
        is_new = np.empty(len(rows) + 1, np.bool_)
        is_new[:1] = is_new[-1:] = True
        np.not_equal(rows[1:], rows[:-1], out=is_new[1:-1])
        begins = is_new.nonzero()[0]
        different = rows.take(begins[:-1])
        distinct = np.bincount(different >> _HALF, minlength=num_rows)

        listed = (different & _LOW < width).nonzero()[0]
        which, cells = different.take(listed), np.zeros((num_rows, width), np.int64)
        cells[which >> _HALF, which & _LOW] = begins.take(listed + 1) - begins.take(listed)
        return cells, distinct - np.count_nonzero(cells[:, self._uncounted], axis=1)
