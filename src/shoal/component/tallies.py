"""The features' counts on the host: what words add to them is added up, instead of looking at every token.

The same numbers as ``count_features`` gives of the tokens' codes, by another way. Array code for NumPy alone.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from shoal.component.bundle import NUM_STATISTICS
from shoal.component.lexicon import Codes, Lexicon
from shoal.component.memo import Column, Places, Rows, totals
from shoal.component.ragged import Ragged

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
        self._words_and_stops, self._marks_and_runs = Column(), Column()
        self._edges = Column(np.uint8)
        # The number of the one token whose share or difference counts: a listed word's column, or a number behind
        # those; -1 - k where there are several, row k of them.
        self._numbers, self._several, self._num_several = Column(), Rows(lambda words: []), 0
        # Listed tokens that are no words have shares, but are not among the distinct words.
        self._uncounted = [self._none, *{int(c) for c in lexicon.column[~lexicon.is_word] if c < self._none}]

    def add(self, words: list[str]) -> None:
        """Find what is to be known of words."""
        before = self._edges.size
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
        edges = np.zeros(len(counts), np.uint8)
        edges[filled] = is_end[first] * _BEGINS + is_end[last] * _CLOSES
        after = is_word & (num_ends == num_ends[offsets[rows + 1] - 1])
        edges += np.minimum(tokens.sum(after), 1).astype(np.uint8) * _IS_OPEN

        self._words_and_stops.extend(tokens.sum(is_word) + (tokens.sum(lexicon.is_stop[kind]) << _HALF))
        self._marks_and_runs.extend(tokens.sum(~is_word) + (tokens.sum(is_end & ~before) << _HALF))
        self._number(
            tokens, is_word | (column < self._none), np.where(column < self._none, column, codes + 1 + self._none)
        )
        self._edges.extend(edges)

    def _number(self, tokens: Ragged, counts: NDArray[np.bool_], numbers: Ints) -> None:
        """The numbers of those tokens that count."""
        num_counted = tokens.sum(counts)
        own = np.full(len(tokens), self._none)
        is_one, is_several = num_counted == 1, num_counted > 1
        own[is_one] = numbers[counts & is_one[tokens.row_ids]]
        more = num_counted[is_several]
        own[is_several] = -1 - (self._num_several + np.arange(len(more)))
        self._num_several += len(more)
        self._several.extend(more, numbers[counts & is_several[tokens.row_ids]])
        self._numbers.extend(own)

    def count(self, places: Ragged) -> NDArray[np.float64]:
        """The raw features, FP64 ``[rows, 7 + lists]``; all 0 in a row without a word."""
        at, offsets, none = places.values, places.offsets, self._none
        words_and_stops = totals(self._words_and_stops.values.take(at))
        marks_and_runs = totals(self._marks_and_runs.values.take(at))
        first, second = np.diff(words_and_stops.take(offsets)), np.diff(marks_and_runs.take(offsets))
        words, stops, marks = first & _LOW, first >> _HALF, second & _LOW
        sentences = (second >> _HALF) + self._correct(places, words_and_stops, marks_and_runs)
        cells, distinct = self._count_numbers(places)
        at_least_one = np.maximum(sentences, 1)
        raw = np.empty((len(places), NUM_STATISTICS + none))
        statistics = words, distinct, marks, sentences, words / at_least_one, stops, stops / at_least_one
        for column, values in enumerate(statistics):
            raw[:, column] = values
        np.divide(cells[:, :none], np.maximum(words, 1)[:, None], out=raw[:, NUM_STATISTICS:])
        raw[words == 0] = 0
        return raw

    def _correct(self, places: Ragged, words_and_stops: Ints, marks_and_runs: Ints) -> Ints:
        """What a row's sentences are beside its words' runs of ends: the open one, less the runs that go on."""
        at, offsets = places.values, places.offsets
        ending = np.flatnonzero(np.diff(marks_and_runs) > _LOW)  # the words with a sentence end
        rows = np.searchsorted(offsets, ending, side="right") - 1
        edges = self._edges.values[at[ending]]
        is_last = np.ones(len(ending), np.bool_)
        is_last[:-1] = rows[1:] != rows[:-1]
        # One run, if nothing but words without tokens stands between two words of a row.
        goes_on = ~is_last[:-1] & (edges[:-1] & _CLOSES > 0) & (edges[1:] & _BEGINS > 0)
        for sums in (words_and_stops, marks_and_runs):
            goes_on &= sums[ending[1:]] == sums[ending[:-1] + 1]
        # A row is open if a word follows its last end, within the same word or after it.
        behind = offsets[:-1].copy()
        is_open = np.zeros(len(places), np.bool_)
        behind[rows[is_last]] = ending[is_last] + 1
        is_open[rows[is_last]] = edges[is_last] & _IS_OPEN > 0
        is_open |= (words_and_stops[offsets[1:]] - words_and_stops[behind]) & _LOW > 0
        return is_open - np.bincount(rows[1:][goes_on], minlength=len(places))

    def _count_numbers(self, places: Ragged) -> tuple[Ints, Ints]:
        """How often each number stands in each row, and how many different words a row has.

        INT64 ``[rows, listed + 2]``, the two for no number and for all that are behind the listed tokens' ones; and
        INT64 ``[rows]``.
        """
        num_rows, width = len(places), self._none + 2
        numbers, rows = self._numbers.values.take(places.values), np.repeat(np.arange(num_rows), places.lengths)
        several = np.flatnonzero(numbers < 0)
        if len(several):
            counts, more = self._several.take(-1 - numbers[several])
            numbers[several] = self._none
            numbers, rows = np.concatenate([numbers, more]), np.concatenate([rows, np.repeat(rows[several], counts)])
        keys = rows << _HALF
        keys |= numbers
        keys.sort()
        is_new = np.ones(len(keys), np.bool_)
        np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
        different = np.bincount(keys[is_new] >> _HALF, minlength=num_rows)

        rows *= width
        rows += np.minimum(numbers, width - 1)
        cells = np.bincount(rows, minlength=num_rows * width).reshape(num_rows, width)
        return cells, different - np.count_nonzero(cells[:, self._uncounted], axis=1)
