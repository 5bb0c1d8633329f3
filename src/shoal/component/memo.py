"""What a tokenizer makes of each word, kept: texts of one language repeat their words.

BERT's normalizer and pre-tokenizer treat what stands between white space by itself, so a text's tokens are those of its
words, one after the other. A word that has been seen costs one look into a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.component.ragged import Ragged

Find: TypeAlias = Callable[[list[str]], Sequence[Sequence[int]]]

MOST_WORDS, MOST_CHARACTERS = 2**17, 2**24  # kept before all are forgotten: tens of megabytes


class Memo:
    """Integers for texts, word by word.

    ``make`` gives a function that finds them, for different words; all that it gives belongs together, and it is made
    anew when the words that were kept are forgotten. Threads may share a memo.
    """

    def __init__(self, make: Callable[[], Find]) -> None:
        self._make = make
        self._table = _Table(make())

    def __call__(self, texts: Sequence[Sequence[str]]) -> Ragged:
        """INT64 values, a row a text; ``texts`` holds the words of each."""
        if self._table.is_full:
            self._table = _Table(self._make())
        words = list(chain.from_iterable(texts))
        counts, values = self._table.look_up(words)
        ends = np.zeros(len(words) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        num_words = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=num_words[1:])
        return Ragged(values, ends[num_words])


class _Table:
    """Each word's place, and at each place where its values begin and how many there are."""

    def __init__(self, find: Find) -> None:
        self._find, self._lock = find, Lock()
        self._places: dict[str, int] = {}
        self._num_characters = 0
        empty: NDArray[np.int64] = np.empty(0, np.int64)
        self._kept = (empty, empty, empty)  # begins, counts, values: exchanged in one step

    @property
    def is_full(self) -> bool:
        return len(self._places) > MOST_WORDS or self._num_characters > MOST_CHARACTERS

    def look_up(self, words: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many values each word has, and all of them."""
        if not self._places.keys() >= (unique := set(words)):
            self._add(unique)
        places = np.fromiter(map(self._places.__getitem__, words), np.int64, len(words))
        begins, counts, values = self._kept
        begins, counts = begins[places], counts[places]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return counts, values[np.arange(total) + np.repeat(begins - (ends - counts), counts)]

    def _add(self, words: set[str]) -> None:
        with self._lock:
            missing = sorted(words - self._places.keys())
            found = self._find(missing)
            begins, counts, values = self._kept
            more = np.fromiter(map(len, found), np.int64, len(found))
            first = len(values) + np.cumsum(more) - more
            added = np.fromiter(chain.from_iterable(found), np.int64, int(more.sum()))
            joined = ((begins, first), (counts, more), (values, added))
            self._kept = (np.concatenate(joined[0]), np.concatenate(joined[1]), np.concatenate(joined[2]))
            # After the values: whoever finds a word here finds them there.
            self._places.update(zip(missing, range(len(self._places), len(self._places) + len(missing)), strict=True))
            self._num_characters += sum(map(len, missing))
