"""Token analysis of normalised texts in pure array code: positions, word or punctuation, and identity by hash.

A normalised text is UTF-8 whose tokens have spaces between them. The same code runs on a GPU and, in the tests, on
NumPy and torch. Except for the number of tokens nothing here synchronises with the device: no shape depends on a value.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from array_api_compat import device as device_of

from shoal.component.ledger import CONTROL, SETUP
from shoal.component.tensors import Array, Device, namespace
from shoal.text.ragged import Ragged, Texts, to_texts
from shoal.text.wordpiece import MAX_WORD_CHARS

_SPACE = 0x20


def count_begun(texts: Texts) -> Array:
    """Count the tokens that have begun up to and including each byte of normalised texts: INT64 ``[bytes]``."""
    xp, inside, rows = namespace(texts.values), texts.values > _SPACE, texts.row_ids
    goes_on = inside[:-1] & (rows[1:] == rows[:-1])
    begins = inside & ~xp.concat([xp.zeros_like(inside[:1]), goes_on])
    return xp.cumulative_sum(xp.astype(begins, xp.int64))


def hash_factors(device: Device) -> Array:
    """Return random odd factors for ``Words.hashes``, the same in every process: INT64 ``[100]``."""
    return device.put(np.random.default_rng(1).integers(-(2**62), 2**62, MAX_WORD_CHARS) * 2 + 1, SETUP)


@dataclass(frozen=True)
class CodePoints:
    """A set of Unicode code points: BOOL ``[0x110000]``."""

    table: Array

    @classmethod
    def words(cls, device: Device) -> CodePoints:
        """Return the set that makes a token a word: letters (L*) and decimal digits (Nd)."""
        characters = map(chr, range(sys.maxunicode + 1))
        table = np.fromiter((c.isalpha() or c.isdecimal() for c in characters), np.bool_, sys.maxunicode + 1)
        return cls(device.put(table, SETUP))

    @classmethod
    def ranges(cls, ranges: Sequence[tuple[int, int]], device: Device) -> CodePoints:
        """Return the set of code points in ``ranges``, first and last included."""
        table = np.zeros(sys.maxunicode + 1, np.bool_)
        for first, last in ranges:
            table[first : last + 1] = True
        return cls(device.put(table, SETUP))

    def find(self, texts: Texts) -> Array:
        """Mark the first byte of each character in the set: BOOL ``[len(texts.values)]``."""
        xp = namespace(texts.values)
        return xp.take(self.table, code_points(texts.values)) & ((texts.values & 0xC0) != 0x80)


def code_points(values: Array) -> Array:
    """Decode the code point that begins at each byte of valid UTF-8, INT64; undefined at continuation bytes.

    RFC 3629: a lead byte below 0x80 is the code point; lead bytes from 0xC0, 0xE0 and 0xF0 begin sequences of two,
    three and four bytes; each continuation byte carries six bits.
    """
    xp = namespace(values)
    padded = xp.concat([xp.astype(values, xp.int64), xp.zeros(3, dtype=xp.int64, device=device_of(values))])
    lead = padded[:-3]
    second, third, fourth = (padded[k : k + lead.shape[0]] & 0x3F for k in (1, 2, 3))
    two = ((lead & 0x1F) << 6) | second
    three = ((lead & 0x0F) << 12) | (second << 6) | third
    four = ((lead & 0x07) << 18) | (second << 12) | (third << 6) | fourth
    points = xp.where(lead < 0x80, lead, xp.where(lead < 0xE0, two, xp.where(lead < 0xF0, three, four)))
    return xp.minimum(points, sys.maxunicode)


@dataclass(frozen=True)
class Words:
    """Tokens of a batch of normalised texts; ``num_tokens`` is their number, which the host needs for array shapes."""

    texts: Texts
    begun: Array  # INT64 [bytes]: how many tokens have begun up to and including each byte
    num_tokens: int

    @classmethod
    def find(cls, texts: Texts, device: Device) -> Words:
        """Find the tokens of ``texts``; their number, 8 bytes, is copied to the host."""
        begun = count_begun(texts)
        return cls(texts, begun, int(device.fetch(begun[-1:], CONTROL)[0]) if begun.shape[0] else 0)

    @cached_property
    def _is_inside(self) -> Array:
        return self.texts.values > _SPACE

    @property
    def offsets(self) -> Array:
        """Index of each row's first token: INT64 ``[rows + 1]``."""
        xp = namespace(self.begun)
        begun = xp.concat([xp.zeros_like(self.texts.offsets[:1]), self.begun])
        return xp.take(begun, self.texts.offsets)

    @cached_property
    def _starts(self) -> Array:
        """Index of each token's first byte: INT64 ``[num_tokens]``."""
        xp = namespace(self.begun)
        ordinals = xp.arange(1, self.num_tokens + 1, dtype=xp.int64, device=device_of(self.begun))
        return xp.searchsorted(self.begun, ordinals, side="left")

    @cached_property
    def _places(self) -> Array:
        """Position of each byte in its token: INT64 ``[bytes]``."""
        xp, number = namespace(self.begun), self.begun
        all_places = xp.arange(number.shape[0], dtype=xp.int64, device=device_of(number))
        if self.num_tokens == 0:
            return all_places
        return all_places - xp.take(self._starts, xp.maximum(number - 1, 0))

    def _sum(self, values: Array) -> Array:
        """Sum ``values`` over the bytes of each token: INT64 ``[num_tokens]``, wrapping around at 64 bits."""
        xp = namespace(values)
        end = xp.full((1,), values.shape[0], dtype=xp.int64, device=device_of(values))
        spans = Ragged(values, xp.concat([self._starts, end]))
        return spans.sum(xp.where(self._is_inside, xp.astype(values, xp.int64), xp.zeros_like(spans.offsets[:1])))

    def hashes(self, factors: Array) -> Array:
        """Hash each token of at most 100 bytes to 64 bits: INT64 ``[num_tokens]``.

        Multilinear over the bytes (Lemire and Kaser, 2014): with random odd ``factors``, two given words agree with a
        probability of at most 2^-57.
        """
        xp, values = namespace(self.texts.values), self.texts.values
        place = xp.minimum(xp.maximum(self._places, 0), MAX_WORD_CHARS - 1)
        return self._sum((xp.astype(values, xp.int64) + 1) * xp.take(factors, place))

    def are_words(self, word_characters: CodePoints) -> Array:
        """Whether each token contains a letter or a digit: BOOL ``[num_tokens]``."""
        return self._sum(word_characters.find(self.texts)) > 0

    @property
    def has_long(self) -> Array:
        """Whether each row has a token of more than 100 bytes: BOOL ``[rows]``."""
        return self.texts.sum(self._is_inside & (self._places >= MAX_WORD_CHARS)) > 0


class WordList:
    """Hash lookup of listed tokens; an unlisted word matches a given listed one with a probability of 2^-57.

    libcudf's ``tokenize_with_vocabulary`` is not used: its kernel for long rows (26.10) loses or adds tokens at the
    edges of some rows.
    """

    def __init__(self, tokens: Sequence[str], device: Device) -> None:
        self._factors = hash_factors(device)
        texts = to_texts(tokens).to(device, SETUP)
        hashes = self.hashes(Words(texts, count_begun(texts), len(tokens)))
        xp = namespace(hashes)
        self._places = xp.argsort(hashes)
        self._sorted = xp.take(hashes, self._places)

    def hashes(self, words: Words) -> Array:
        """Hash the tokens of ``words`` with this list's factors: INT64 ``[num_tokens]``."""
        return words.hashes(self._factors)

    def find(self, hashes: Array) -> Array:
        """Return the index of each token in the list, INT64 ``[num_tokens]``; -1 for tokens that are not listed."""
        xp = namespace(hashes)
        # Binary search in the sorted hashes, then compare: a fixed number of steps, without probing or branches.
        nearest = xp.minimum(xp.searchsorted(self._sorted, hashes, side="left"), self._sorted.shape[0] - 1)
        is_listed = xp.take(self._sorted, nearest) == hashes
        return xp.where(is_listed, xp.take(self._places, nearest), xp.full_like(hashes[:1], -1))
