"""Basic tokenizer, and a lexicon of per-token attributes.

A *basic token* is a token of BERT's normalizer and pre-tokenizer: lower-cased, accents stripped, punctuation split off.
A *word* is a basic token with a letter or a digit (Unicode L* or Nd); any other basic token is punctuation.
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
    """Whether a basic token contains a letter or a digit."""
    return any(c.isalpha() or c.isdecimal() for c in token)


class BasicTokenizer:
    """BERT's normalizer and pre-tokenizer, always lower-casing."""

    def __init__(self) -> None:
        from tokenizers import normalizers, pre_tokenizers

        self._normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    def __call__(self, text: str) -> list[str]:
        """Split ``text`` into its basic tokens, in order."""
        return [token for token, _ in self._split(self._normalize(text))]


@dataclass(frozen=True)
class Lexicon:
    """Attribute table of token codes, one column per attribute.

    Codes 0 .. n-1 are the listed tokens. Two rows follow them: n for every other word, n + 1 for every other
    punctuation token. ``column`` is the feature column of a token's share, ``num_listed`` for tokens without one.
    """

    tokens: tuple[str, ...]
    is_word: Array  # BOOL [n + 2]
    is_stop: Array  # BOOL [n + 2]
    is_end: Array  # BOOL [n + 2]
    column: Array  # INT64 [n + 2]
    num_listed: int

    @property
    def num_known(self) -> int:
        """Number of listed tokens."""
        return len(self.tokens)

    @classmethod
    def build(cls, stop_words: Sequence[str], listed: Sequence[str], device: Device) -> Lexicon:
        """Build the lexicon; ``listed`` are the words whose shares are features, in the order of their columns."""
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
    """Token-to-code map: a listed token's index; a new number for each unlisted word; -1 for other punctuation."""

    def __init__(self, listed: Sequence[str]) -> None:
        self.codes = {token: code for code, token in enumerate(listed)}
        self._tokenize = BasicTokenizer()

    def __call__(self, words: list[str]) -> list[list[int]]:
        """Return the codes of each word's tokens."""
        return [[self._code(token) for token in self.split(word)] for word in words]

    def split(self, word: str) -> list[str]:
        """Split into basic tokens; for printable ASCII, an equivalent regular expression is ten times as fast."""
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
