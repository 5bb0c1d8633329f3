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
        marks_here = self._marks_and_runs.values.take(at)
        marks_and_runs = totals(marks_here)
        first, second = (sums[offsets[1:]] - sums[offsets[:-1]] for sums in (words_and_stops, marks_and_runs))
        words, stops, marks = first & _LOW, first >> _HALF, second & _LOW
        ending = (marks_here > _LOW).nonzero()[0]
        sentences = (second >> _HALF) + self._correct(places, ending, words_and_stops, marks_and_runs)
        cells, distinct = self._count_numbers(places)
        at_least_one = np.maximum(sentences, 1)
        raw = np.empty((len(places), NUM_STATISTICS + none))
        statistics = words, distinct, marks, sentences, words / at_least_one, stops, stops / at_least_one
        for column, values in enumerate(statistics):
            raw[:, column] = values
        np.divide(cells[:, :none], np.maximum(words, 1)[:, None], out=raw[:, NUM_STATISTICS:])
        raw[words == 0] = 0
        return raw

    def _correct(self, places: Ragged, ending: Ints, words_and_stops: Ints, marks_and_runs: Ints) -> Ints:
        """What a row's sentences are beside its words' runs of ends: the open one, less the runs that go on.

        ``ending`` are the words with a sentence end.
        """
        offsets = places.offsets
        rows = offsets.searchsorted(ending, side="right") - 1
        edges = self._edges.values.take(places.values.take(ending))
        is_last = np.empty(len(ending), np.bool_)
        is_last[-1:] = True
        np.not_equal(rows[1:], rows[:-1], out=is_last[:-1])
        # A row is open if a word follows its last end, within the same word or after it.
        last, behind = is_last.nonzero()[0], offsets[:-1].copy()
        behind[rows[last]] = ending[last] + 1
        is_open: NDArray[np.bool_] = words_and_stops[offsets[1:]] - words_and_stops[behind] & _LOW > 0
        is_open[rows[last]] |= edges[last] & _IS_OPEN > 0
        # One run, if nothing but words without tokens stands between two words of a row.
        later = (edges[1:] & _BEGINS & ~is_last[:-1]).nonzero()[0]
        correction = is_open.astype(np.int64)
        if not len(later):
            return correction
        goes_on = edges[later] & _CLOSES > 0
        for sums in (words_and_stops, marks_and_runs):
            goes_on &= sums[ending[later + 1]] == sums[ending[later] + 1]
        correction -= np.bincount(rows[later[goes_on]], minlength=len(places))
        return correction

    def _count_numbers(self, places: Ragged) -> tuple[Ints, Ints]:
        """How often each listed number stands in each row, and how many different words a row has.

        INT64 ``[rows, listed + 1]``, the last for tokens without a number, and INT64 ``[rows]``.
        """
        num_rows, width = len(places), self._none + 1
        numbers, rows = self._numbers.values.take(places.values), np.arange(num_rows).repeat(places.lengths)
        several = (numbers < 0).nonzero()[0]
        if len(several):
            counts, more = self._several.take(-1 - numbers[several])
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
