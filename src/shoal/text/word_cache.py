"""Cache of per-word results, such as token ids; most words of a batch have been seen before.

BERT's normalizer and pre-tokenizer process each whitespace-separated word on its own, so a text's tokens are its words'
tokens in order. Whitespace here is ASCII's tab, line feed, carriage return and space, which every such tokenizer splits
at; other whitespace stays within a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from threading import Lock
from typing import Generic, TypeAlias, TypeVar

from shoal.text.ragged import Texts

T = TypeVar("T")
Find: TypeAlias = Callable[[list[str]], Sequence[T]]

# Limits of the cache: about 100 MB. A short word takes some 500 bytes; a long one may be one token per byte.
MOST_WORDS, MOST_CHARACTERS = 2**17, 2**21
_TO_SPACES = str.maketrans("\t\n\r", "   ")


class WordCache(Generic[T]):
    """Cache of ``find``'s result for each word.

    ``make_find`` makes a ``find``, which is used until the cache is full. Then both are replaced, since a ``find`` may
    number the words that it sees. Thread-safe.
    """

    def __init__(self, make_find: Callable[[], Find[T]]) -> None:
        self._make_find, self._lock = make_find, Lock()
        self._words = _Words(make_find())

    def __call__(self, texts: Texts) -> list[list[T]]:
        """Return the results for the words of each text on the host, all from the same ``find``."""
        words = self._words
        return [self._look_up(text.translate(_TO_SPACES).split(" "), words) for text in texts.strings]

    def _look_up(self, row: list[str], words: _Words[T]) -> list[T]:
        get = words.known.__getitem__
        try:
            return [*map(get, row)]  # most rows: all of their words are known
        except KeyError:
            with self._lock:
                words.add(dict.fromkeys(word for word in row if word not in words.known))
                if words.is_full and self._words is words:
                    self._words = _Words(self._make_find())
            return [*map(get, row)]


class _Words(Generic[T]):
    """Results of one ``find``, by word."""

    def __init__(self, find: Find[T]) -> None:
        self._find = find
        self.known: dict[str, T] = {}
        self._num_characters = 0

    @property
    def is_full(self) -> bool:
        return len(self.known) > MOST_WORDS or self._num_characters > MOST_CHARACTERS

    def add(self, words: Iterable[str]) -> None:
        """Look up words and store their results; if ``find`` fails, nothing is stored."""
        words = [*words]
        self.known.update(zip(words, self._find(words), strict=True))
        self._num_characters += sum(map(len, words))


def flatten(rows: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Concatenate the integers of each row's words."""
    return [[*chain.from_iterable(row)] for row in rows]
