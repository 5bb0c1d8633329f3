"""What is known of words, kept: texts of one language repeat their words.

BERT's normalizer and pre-tokenizer treat what stands between white space by itself, so a text's tokens are those of its
words, one after the other. A word that has been seen costs a look into a table, by array code for all words of a batch;
what is known of it stands in columns at the place that is found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from threading import Lock
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.text.ragged import Cut, Keys, Ragged, Texts

Find: TypeAlias = Callable[[list[str]], Sequence[Sequence[int]]]
Places: TypeAlias = NDArray[np.int64]

# Kept before those that did not come again are forgotten: about 100 MB. A short word takes some 650 bytes, and of a
# long one each byte may be a token, whose numbers stand in several columns.
MOST_WORDS, MOST_BYTES = 2**17, 2**21
_UNKNOWN, _EMPTY = 0, 1  # the places of every word that is not known, and of the empty one
_MOST_PROBES = 8
_FEWEST_SLOTS, _SLOTS_A_WORD = 2, 4  # a word, before the table grows and after


class Store(Protocol):
    """What is known of words: each has a place, in the order in which they were added."""

    def add(self, words: list[str]) -> None:
        """Find what is to be known of words, for the places that come next."""

    def keep(self, places: Places) -> Self:
        """A store of its own with only these places, in this order."""


S = TypeVar("S", bound=Store)


class Memo(Generic[S]):
    """A place for each word of a text, in a store that grows as it must and forgets what does not come again.

    Threads may share a memo. ``store`` is an empty one; it stays so.
    """

    def __init__(self, store: S) -> None:
        self._lock = Lock()
        store = store.keep(np.empty(0, np.int64))
        store.add(["", ""])
        self._table = _Table(store, [])

    def __call__(self, texts: Texts) -> tuple[Ragged, S]:
        """Places of the words of texts on the host, INT64, and the store that has them."""
        cut = texts.cut
        while True:
            table = self._usable()
            places = table.look_up(cut)
            if places is not None:
                return Ragged(places, cut.offsets), table.store

    def _usable(self) -> _Table[S]:
        """The table, or a new one in its place."""
        table = self._table
        if table.is_full or table.is_broken:
            with self._lock:
                if self._table is table:
                    self._table = table.renewed()
                table = self._table
        return table


class _Table(Generic[S]):
    """Each word's place: all words in a dictionary, and all but a few long ones in slots that array code finds."""

    def __init__(self, store: S, words: list[bytes]) -> None:
        """``words`` are those that the store knows beside the unknown and the empty one."""
        self.store, self._lock = store, Lock()
        # Whether words could not be added. The store may know some of them: what comes next gets another place there
        # than here.
        self.is_broken = False
        self._places: dict[bytes, int] = {}
        self._num_bytes = 0
        self._came_again = Column(np.bool_)
        self._came_again.extend(np.zeros(1, np.bool_))
        self._slots = _Slots(len(words))
        self._put([b"", *words])

    @property
    def is_full(self) -> bool:
        return len(self._places) > MOST_WORDS or self._num_bytes > MOST_BYTES

    def look_up(self, cut: Cut) -> Places | None:
        """The place of each word; None if the table is broken and does not know them all."""
        places = self._slots.find(cut.keys())
        self._came_again.values[places] = True
        left = (places == _UNKNOWN).nonzero()[0]
        if len(left):
            words = cut.words(left)
            found = [self._places.get(word, _UNKNOWN) for word in words]
            self._came_again.values[found] = True
            if _UNKNOWN in found:
                # In the order of appearance: what is frequent comes early, so that its places lie close together.
                unknown = (word for word, place in zip(words, found, strict=True) if place == _UNKNOWN)
                if not self._add(dict.fromkeys(unknown)):
                    return None
                found = [self._places[word] for word in words]
            places[left] = found
        return places

    def _add(self, words: Iterable[bytes]) -> bool:
        """Whether it could be: not in a table that another thread broke."""
        with self._lock:
            if self.is_broken:
                return False
            missing = [word for word in words if word not in self._places]
            try:
                self.store.add([word.decode() for word in missing])
                self._put(missing)
            except BaseException:
                self.is_broken = True
                raise
            return True

    def _put(self, words: list[bytes]) -> None:
        """Places for words of which the store knows. After it: whoever finds a word here finds it there."""
        first = len(self._places) + 1  # after the one that stands for words that are not known
        places = np.arange(first, first + len(words))
        self._came_again.extend(np.zeros(len(words), np.bool_))
        self._slots = self._slots.with_more(Cut.of(words).keys(), places)
        self._places.update(zip(words, places.tolist(), strict=True))
        self._num_bytes += sum(map(len, words))

    def renewed(self) -> _Table[S]:
        """A table of the words that came again since this one was begun; of the oldest, if they would half fill it."""
        with self._lock:
            words = list(self._places)
            came_again = self._came_again.values[: len(words) + 1].copy()
            came_again[[_UNKNOWN, _EMPTY]] = False
            places = np.flatnonzero(came_again)[: MOST_WORDS // 2]
            kept = [words[place - _EMPTY] for place in places.tolist()]
            num_kept = int(np.searchsorted(np.cumsum([*map(len, kept)]), MOST_BYTES // 2, side="right"))
            store = self.store.keep(np.concatenate([[_UNKNOWN, _EMPTY], places[:num_kept]]))
            return _Table(store, kept[:num_kept])


class _Slots:
    """A hash table of words of up to 16 bytes, with linear probing.

    A slot is filled once and its place is written last, so that threads may look while one writes. The hash's factors
    are drawn anew for each table: nobody can choose words that meet in one slot.
    """

    def __init__(self, num_words: int) -> None:
        self._num_bits = max(8, (num_words * _SLOTS_A_WORD - 1).bit_length())
        # The two parts of a key, a place, and nothing.
        self._rows = _aligned_rows(2**self._num_bits + _MOST_PROBES)
        self._num_words = 0
        self._factors = np.random.default_rng().integers(2**63, size=2, dtype=np.uint64) * 2 + 1

    def _slots(self, keys: Keys) -> NDArray[np.int64]:
        """Where to look first: multiply-shift (Dietzfelbinger et al., 1997)."""
        mixed = keys.second * self._factors[0]
        mixed ^= keys.first
        mixed *= self._factors[1]
        mixed >>= np.uint64(64 - self._num_bits)
        slots: NDArray[np.int64] = mixed.view(np.int64)
        return slots

    def find(self, keys: Keys) -> Places:
        """The place of each word, or that of unknown ones."""
        slots = self._slots(keys)
        places, is_pending = self._probe(slots, keys)
        pending = is_pending.nonzero()[0]
        for _ in range(_MOST_PROBES - 1):
            if not len(pending):
                break
            slots[pending] += 1
            places[pending], is_pending = self._probe(slots[pending], keys.take(pending))
            pending = pending[is_pending]
        return places

    def _probe(self, slots: NDArray[np.int64], keys: Keys) -> tuple[Places, NDArray[np.bool_]]:
        """The place of each word that has this slot, and whether another one has it."""
        rows = self._rows.take(slots, axis=0)
        found = rows[:, 2].view(np.int64)
        is_same = rows[:, 0] == keys.first
        is_same &= rows[:, 1] == keys.second
        is_same &= keys.are_whole
        places: Places = found * is_same
        return places, (places != found) & keys.are_whole

    def with_more(self, keys: Keys, places: Places) -> _Slots:
        """This table, or a larger one with the same words, with more words in it."""
        table, num_words = self, self._num_words + len(places)
        if num_words * _FEWEST_SLOTS > len(self._rows):
            table = _Slots(num_words)
            used = self._rows[self._rows[:, 2] != _UNKNOWN]
            whole = np.ones(len(used), np.bool_)
            table._insert(Keys(used[:, 0], used[:, 1], whole), used[:, 2].view(np.int64))
        whole_ones = np.flatnonzero(keys.are_whole)
        table._insert(keys.take(whole_ones), places[whole_ones])
        return table

    def _insert(self, keys: Keys, places: Places) -> None:
        """A word for which no probe finds a free slot stays out."""
        slots, pending = self._slots(keys), np.arange(len(places))
        for _ in range(_MOST_PROBES):
            if not len(pending):
                break
            wanted, index = np.unique(slots[pending], return_index=True)
            is_free = self._rows[wanted, 2] == _UNKNOWN
            wanted, index = wanted[is_free], index[is_free]
            chosen = pending[index]
            self._rows[wanted, 0], self._rows[wanted, 1] = keys.first[chosen], keys.second[chosen]
            self._rows[wanted, 2] = places[chosen].view(np.uint64)
            pending = np.delete(pending, index)
            slots[pending] += 1
        self._num_words += len(places)


def _aligned_rows(count: int) -> NDArray[np.uint64]:
    """Zeros, UINT64 ``[count, 4]``, at a multiple of 32 bytes: no row lies in two lines of the processor's cache."""
    values = np.zeros(4 * count + 3, np.uint64)
    start = -values.ctypes.data % 32 // 8
    return values[start : start + 4 * count].reshape(count, 4)


class Column:
    """A growing array. What stood in ``values`` once stays there; beyond it is room for more."""

    def __init__(self, dtype: Any = np.int64, *shape: int) -> None:
        self.values: NDArray[Any] = np.zeros((16, *shape), dtype)
        self.size = 0

    def extend(self, more: NDArray[Any]) -> None:
        """Append; threads that hold the array of before find in it what they found."""
        end = self.size + len(more)
        if end > len(self.values):
            values = np.zeros((2 * end, *self.values.shape[1:]), self.values.dtype)
            values[: self.size] = self.values[: self.size]
            self.values = values
        self.values[self.size : end] = more
        self.size = end


class Rows:
    """A store of rows of integers, which ``find`` gives for different words."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._values, self._ends = Column(), Column()
        self._ends.extend(np.zeros(1, np.int64))  # row i is from end i to end i + 1

    def add(self, words: list[str]) -> None:
        """Find the rows of words."""
        rows = self._find(words)
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        self.extend(counts, np.fromiter(chain.from_iterable(rows), np.int64, int(counts.sum())))

    def extend(self, counts: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """Rows for the places that come next: how many integers each has, and all of them."""
        ends = self._values.size + np.cumsum(counts)
        self._values.extend(values)
        self._ends.extend(ends)

    def keep(self, places: Places) -> Self:
        """A store of its own with only these places."""
        kept = type(self)(self._find)
        kept.extend(*self.take(places))
        return kept

    def take(self, places: Places) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many integers stand at each place, and all of them."""
        ends, values = self._ends.values, self._values.values
        begins = ends.take(places)
        counts = ends.take(places + 1)
        counts -= begins
        begins[1:] -= np.cumsum(counts)[:-1]
        index = np.repeat(begins, counts)
        index += np.arange(len(index))
        return counts, values.take(index)

    def of(self, places: Ragged) -> Ragged:
        """The integers of each row of places."""
        counts, values = self.take(places.values)
        return Ragged(values, totals(counts).take(places.offsets))


def totals(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Running totals with a 0 before them."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums
