"""Basic tokens, and what is known of them.

A *basic token* is what BERT's normalizer and pre-tokenizer give: lower-cased, accents stripped, punctuation split off.
A *word* is a basic token that holds a letter or a digit (Unicode L* or Nd); any other basic token is punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.component.ledger import SETUP
from shoal.component.tensors import Array, Device

SENTENCE_ENDS = (".", "!", "?", "…")
_ASCII_TOKEN = re.compile("[a-z0-9]+|[^a-z0-9 ]")


def is_word(token: str) -> bool:
    """Whether a basic token holds a letter or a digit."""
    return any(c.isalpha() or c.isdecimal() for c in token)


class BasicTokenizer:
    """BERT's normalizer and pre-tokenizer, always lower-casing."""

    def __init__(self) -> None:
        from tokenizers import normalizers, pre_tokenizers

        self._normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    def __call__(self, text: str) -> list[str]:
        """The basic tokens of ``text``, in order."""
        return [token for token, _ in self._split(self._normalize(text))]


@dataclass(frozen=True)
class Lexicon:
    """What is known of each token code, as columns of a table.

    Codes 0 .. n-1 are the listed tokens. Two rows follow them: n stands for every other word, n + 1 for every other
    punctuation token. ``column`` is the share's column (0 .. 199), or 200 for tokens in neither list.
    """

    tokens: tuple[str, ...]
    is_word: Array  # BOOL [n + 2]
    is_stop: Array  # BOOL [n + 2]
    is_end: Array  # BOOL [n + 2]
    column: Array  # INT64 [n + 2]
    num_listed: int

    @property
    def num_known(self) -> int:
        """The number of listed tokens."""
        return len(self.tokens)

    @classmethod
    def build(cls, stop_words: Sequence[str], listed: Sequence[str], device: Device) -> Lexicon:
        """``listed`` holds the words whose shares are features, in the order of their columns."""
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
    """The code of each token of words: its place among the listed, or the next number for a word of its own, or -1."""

    def __init__(self, listed: Sequence[str]) -> None:
        self.codes = {token: code for code, token in enumerate(listed)}
        self._tokenize = BasicTokenizer()

    def __call__(self, words: list[str]) -> list[list[int]]:
        """The codes of each word's tokens."""
        return [[self._code(token) for token in self.split(word)] for word in words]

    def split(self, word: str) -> list[str]:
        """Basic tokens; of printable ASCII by what BERT's rules come to there, which takes a tenth of the time."""
        if word.isascii() and word.isprintable():
            return _ASCII_TOKEN.findall(word.lower())
        return self._tokenize(word)

    def _code(self, token: str) -> int:
        code = self.codes.get(token)
        if code is None:
            if not is_word(token):
                return -1
            code = self.codes[token] = len(self.codes)
        return code
