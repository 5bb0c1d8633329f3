"""Cache of what is found for single words; most words of a batch have been seen before.

BERT's normalizer and pre-tokenizer treat what stands between white space by itself, so a text's tokens are those of its
words, one after the other. White space here is ASCII's tab, line feed, carriage return and space, which every such
tokenizer splits at; other white space stays within a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import Generic, TypeAlias, TypeVar

from shoal.text.ragged import Ragged, Texts

T = TypeVar("T")
Find: TypeAlias = Callable[[list[str]], Sequence[T]]

# Kept before the cache starts over: about 100 MB. A short word takes some 500 bytes; a long one may be a token a byte.
MOST_WORDS, MOST_CHARACTERS = 2**17, 2**21
_TO_SPACES = str.maketrans("\t\n\r", "   ")


class WordCache(Generic[T]):
    """What ``find`` gives for each word of a text, found once.

    ``make_find`` makes a ``find``, which is kept until the cache is full; then both start over, since a ``find`` may
    number the words that it meets. Threads may share a cache.
    """

    def __init__(self, make_find: Callable[[], Find[T]]) -> None:
        self._make_find, self._lock = make_find, Lock()
        self._words = _Words(make_find())

    def __call__(self, texts: Texts) -> list[list[T]]:
        """What was found for the words of each text on the host, all of it by one ``find``."""
        rows = [text.translate(_TO_SPACES).split(" ") for text in texts.strings]
        words = self._words
        known = words.known
        missing = {word for row in rows for word in row if word not in known}
        if missing:
            with self._lock:
                words.add([word for word in missing if word not in known])
                if words.is_full and self._words is words:
                    self._words = _Words(self._make_find())
        return [[known[word] for word in row] for row in rows]


class _Words(Generic[T]):
    """The words that one ``find`` was asked for."""

    def __init__(self, find: Find[T]) -> None:
        self._find = find
        self.known: dict[str, T] = {}
        self._num_characters = 0

    @property
    def is_full(self) -> bool:
        return len(self.known) > MOST_WORDS or self._num_characters > MOST_CHARACTERS

    def add(self, words: list[str]) -> None:
        """Find what is missing; where that fails, nothing is kept."""
        self.known.update(zip(words, self._find(words), strict=True))
        self._num_characters += sum(map(len, words))


def flatten(rows: Sequence[Sequence[Sequence[int]]]) -> Ragged:
    """The integers of each row's words, one after the other: INT64 values."""
    return Ragged.from_rows([list(chain.from_iterable(row)) for row in rows])
