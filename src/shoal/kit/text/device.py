"""Tokens and word statistics of texts on a GPU, in array code; libcudf's functions are called in ``gpu_text.py``.

A batch of texts is uploaded once, as one array of bytes, for the tokenizer and the features. libcudf's normalizer puts
spaces around tokens, so most functions here take *normalised texts*: UTF-8 with spaces between tokens. The same code
runs on a GPU and, in the tests, on NumPy and torch. The host waits for the device only to read the number of tokens; no
other array shape depends on a value on the device.

libcudf's normalizer and WordPiece may differ from Hugging Face's in three kinds of text: with a special token such as
``[SEP]``, with a word of more than 100 bytes, or with a code point that the Unicode tables of the two libraries treat
differently (``exact_codepoints.json``). ``Routing`` finds these rows. The host tokenizes them: the *exact path*.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from array_api_compat import device as device_of

from shoal.kit.component.ledger import CONTROL, SETUP
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device, namespace
from shoal.kit.text.tokens import MAX_WORD_CHARS, SPECIAL_TOKENS, WIDTH_MULTIPLE, SpecialIds
from shoal.kit.text.words import Lexicon

CODE_POINTS = Path(__file__).with_name("exact_codepoints.json")
_SPACE = 0x20
_MOST_CODES = 2**40  # more than a batch can have


@dataclass(frozen=True)
class Ragged:
    """Ragged array; row i is ``values[offsets[i]:offsets[i + 1]]``.

    ``values`` is one-dimensional; ``offsets`` is INT64 ``[rows + 1]``, ascending from 0 to ``len(values)``. Both are on
    the same device.
    """

    values: Array
    offsets: Array

    def __len__(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def lengths(self) -> Array:
        """Length of each row: INT64 ``[rows]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def row_ids(self) -> Array:
        """Row index of each value: INT64 ``[len(values)]``."""
        xp = namespace(self.offsets)
        places = xp.arange(self.values.shape[0], dtype=xp.int64, device=device_of(self.offsets))
        return xp.searchsorted(self.offsets[1:], places, side="right")  # repeat() by counts would wait for the device

    def sum(self, values: Array) -> Array:
        """Sum ``values``, which has the length of ``self.values``, over each row: INT64 ``[rows]``."""
        xp = namespace(values)
        # A row's sum is the difference of two prefix sums: no loop over rows, and no shape depends on a value.
        total = _from_zero(xp.cumulative_sum(xp.astype(values, xp.int64)))
        return xp.take(total, self.offsets[1:]) - xp.take(total, self.offsets[:-1])

    def pad(self, width: int, fill: int) -> Array:
        """Return an array ``[rows, width]``, with each row cut or padded with ``fill``."""
        xp = namespace(self.values)
        columns = xp.arange(width, dtype=self.offsets.dtype, device=device_of(self.values))
        if self.values.shape[0] == 0:
            return xp.full((len(self), width), fill, dtype=self.values.dtype, device=device_of(self.values))
        index = xp.minimum(self.offsets[:-1, None] + columns, self.values.shape[0] - 1)
        gathered = xp.reshape(xp.take(self.values, xp.reshape(index, (-1,))), index.shape)
        return xp.where(columns < self.lengths[:, None], gathered, xp.full_like(gathered[:1, :1], fill))


def _from_zero(totals: Array) -> Array:
    """Prepend a 0 to running totals."""
    xp = namespace(totals)
    return xp.concat([xp.zeros(1, dtype=totals.dtype, device=device_of(totals)), totals])


def upload(strings: Sequence[str], device: Device, edge: str) -> Ragged:
    """Copy texts to ``device`` as UTF-8 bytes (UINT8), with offsets, in one copy that the ledger counts at ``edge``."""
    texts = [string.encode() for string in strings]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    both = device.put(np.frombuffer(offsets.tobytes() + b"".join(texts), np.uint8), edge)
    return Ragged(both[offsets.nbytes :], both[: offsets.nbytes].view(device.xp.int64))


def round_up(longest: Array) -> Array:
    """Return how many steps of 8 tokens have room for ``longest`` tokens, ``[CLS]`` and ``[SEP]``."""
    return -(-(longest + 2) // WIDTH_MULTIPLE)


def frame(pieces: Ragged, ids: SpecialIds, width: int) -> tuple[Array, Array]:
    """Put ``[CLS]`` and ``[SEP]`` around each row, cut or padded to ``width`` tokens.

    ``pieces`` has INT64 token ids. Returns ids and attention mask, INT64 ``[rows, width]``.
    """
    xp = namespace(pieces.values)
    lengths = xp.minimum(pieces.lengths, width - 2)
    position = xp.arange(width, dtype=xp.int64, device=device_of(pieces.values))[None, :]
    last = lengths[:, None] + 1
    body = pieces.pad(width, ids.pad)
    shifted = xp.concat([xp.full_like(body[:, :1], ids.cls), body[:, :-1]], axis=1)
    pad, sep = (xp.full_like(body[:1, :1], token) for token in (ids.pad, ids.sep))
    framed = xp.where(position < last, shifted, xp.where(position == last, sep, pad))
    return framed, xp.astype(position <= last, xp.int64)


# --- tokens of normalised texts ----------------------------------------------------------------------------------


def count_begun(texts: Ragged) -> Array:
    """For each byte of normalised texts, count the tokens that begin at it or before it: INT64 ``[bytes]``."""
    xp, inside, rows = namespace(texts.values), texts.values > _SPACE, texts.row_ids
    goes_on = inside[:-1] & (rows[1:] == rows[:-1])
    begins = inside & ~xp.concat([xp.zeros_like(inside[:1]), goes_on])
    return xp.cumulative_sum(xp.astype(begins, xp.int64))


def hash_factors(device: Device) -> Array:
    """Return a random odd factor for each byte of a token, the same in every process: INT64 ``[100]``."""
    return device.put(np.random.default_rng(1).integers(-(2**62), 2**62, MAX_WORD_CHARS) * 2 + 1, SETUP)


@dataclass(frozen=True)
class CodePoints:
    """Set of Unicode code points; ``table`` says for each code point whether it is in the set: BOOL ``[0x110000]``."""

    table: Array

    @classmethod
    def words(cls, device: Device) -> CodePoints:
        """Return the set of letters (L*) and decimal digits (Nd): a token with one of them is a word."""
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

    def find(self, texts: Ragged) -> Array:
        """Mark the first byte of each character of ``texts`` that is in the set: BOOL ``[len(texts.values)]``."""
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
    """Tokens of a batch of normalised texts. The host needs the number of tokens, ``num_tokens``, for array shapes."""

    texts: Ragged
    begun: Array  # INT64 [bytes]: how many tokens have begun up to and including each byte
    num_tokens: int

    @classmethod
    def find(cls, texts: Ragged, device: Device) -> Words:
        """Find the tokens of ``texts``; the number of tokens (8 bytes) is copied to the host."""
        begun = count_begun(texts)
        return cls(texts, begun, int(device.fetch(begun[-1:], CONTROL)[0]) if begun.shape[0] else 0)

    @cached_property
    def _is_inside(self) -> Array:
        return self.texts.values > _SPACE

    @property
    def offsets(self) -> Array:
        """Index of each row's first token, then the number of tokens: INT64 ``[rows + 1]``."""
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

        The hash is multilinear over the bytes (Lemire and Kaser, 2014). Different tokens may have the same hash, for
        example if a client chose them so; ``differ`` compares the bytes.
        """
        xp, values = namespace(self.texts.values), self.texts.values
        place = xp.minimum(xp.maximum(self._places, 0), MAX_WORD_CHARS - 1)
        return self._sum((xp.astype(values, xp.int64) + 1) * xp.take(factors, place))

    @cached_property
    def lengths(self) -> Array:
        """Number of bytes of each token: INT64 ``[num_tokens]``."""
        return self._sum(self._is_inside)

    def differ(self, index: Array, others: Words) -> Array:
        """Whether each token differs from token number ``index`` of ``others``: BOOL ``[num_tokens]``."""
        xp, values = namespace(index), self.texts.values
        if self.num_tokens == 0:
            return xp.zeros_like(index, dtype=xp.bool)
        starts = xp.take(xp.take(others._starts, index), xp.maximum(self.begun - 1, 0))
        places = xp.minimum(starts + xp.maximum(self._places, 0), others.texts.values.shape[0] - 1)
        num_other_bytes = self._sum(values != xp.take(others.texts.values, places))
        return (num_other_bytes > 0) | (self.lengths != xp.take(others.lengths, index))

    def are_words(self, word_characters: CodePoints) -> Array:
        """Whether each token contains a letter or a digit: BOOL ``[num_tokens]``."""
        return self._sum(word_characters.find(self.texts)) > 0

    @property
    def has_long(self) -> Array:
        """Whether each row has a token of more than 100 bytes: BOOL ``[rows]``."""
        return self.texts.sum(self._is_inside & (self._places >= MAX_WORD_CHARS)) > 0


class WordList:
    """List of known tokens, found by hash. An unknown token with the hash of a known one is taken for it.

    libcudf's ``tokenize_with_vocabulary`` is not used: its kernel for long rows (26.10) loses or adds tokens at the
    edges of some rows.
    """

    def __init__(self, tokens: Sequence[str], device: Device) -> None:
        self._factors = hash_factors(device)
        texts = upload(tokens, device, SETUP)
        self.words = Words(texts, count_begun(texts), len(tokens))
        hashes = self.hashes(self.words)
        xp = namespace(hashes)
        self._places = xp.argsort(hashes)
        self._sorted = xp.take(hashes, self._places)

    def hashes(self, words: Words) -> Array:
        """Hash the tokens of ``words`` with this list's factors: INT64 ``[num_tokens]``."""
        return words.hashes(self._factors)

    def find(self, hashes: Array) -> Array:
        """Return the index of each token in the list, INT64 ``[num_tokens]``; -1 for tokens that are not in it."""
        xp = namespace(hashes)
        # Binary search in the sorted hashes, then compare: a fixed number of steps, without probing or branches.
        nearest = xp.minimum(xp.searchsorted(self._sorted, hashes, side="left"), self._sorted.shape[0] - 1)
        is_listed = xp.take(self._sorted, nearest) == hashes
        return xp.where(is_listed, xp.take(self._places, nearest), xp.full_like(hashes[:1], -1))


class DeviceCoder:
    """Encoder from tokens to integer codes on a GPU, as ``words.TokenCoder`` on the host.

    The code of an unknown word comes from the rank of its hash among the hashes of the batch. The second result, BOOL
    ``[1]``, is true if two different tokens have the same hash; then the host must read the whole batch. Tokens of more
    than 100 bytes do not count: the host reads their rows anyway.
    """

    def __init__(self, lexicon: Lexicon, device: Device) -> None:
        self._num_known = lexicon.num_known
        self._word_list = WordList(lexicon.tokens, device)
        self._word_characters = CodePoints.words(device)

    def __call__(self, words: Words) -> tuple[Ragged, Array]:
        """Return the codes of the tokens, INT64, one row per text, and whether they are wrong."""
        hashes = self._word_list.hashes(words)
        xp, listed = namespace(hashes), self._word_list.find(hashes)
        ranks, twins = _rank(hashes)
        own = self._num_known + ranks
        unlisted = xp.where(words.are_words(self._word_characters), own, xp.full_like(listed[:1], -1))
        is_taken = (listed >= 0) & words.differ(xp.maximum(listed, 0), self._word_list.words)
        is_wrong = (is_taken | words.differ(twins, words)) & (words.lengths <= MAX_WORD_CHARS)
        return Ragged(xp.where(listed >= 0, listed, unlisted), words.offsets), xp.reshape(xp.any(is_wrong), (1,))


def _rank(values: Array) -> tuple[Array, Array]:
    """Return the rank of each value, from 0, without gaps; equal values have equal ranks: INT64.

    The second array, INT64, is the index of another equal value. These indices link all equal values to a chain, whose
    first value has its own index.
    """
    xp = namespace(values)
    # In sorted order the rank grows by 1 wherever a value differs from the one before; then undo the sort.
    order = xp.argsort(values)
    is_new = _differs(xp.take(values, order))
    before = xp.where(is_new, order, xp.concat([order[:1], order[:-1]]))
    rank, back = xp.cumulative_sum(xp.astype(is_new, xp.int64)) - 1, xp.argsort(order)
    return xp.take(rank, back), xp.take(before, back)


def count_tokens(codes: Ragged, lexicon: Lexicon) -> tuple[Array, Array]:
    """Return statistics and word counts of texts, given as token codes, as ``words.TokenCounter`` does on the host."""
    xp = namespace(codes.values)
    num_known, num_rows = lexicon.num_known, len(codes)
    rows = codes.row_ids
    kind = xp.where(codes.values < 0, xp.full_like(codes.values[:1], num_known + 1), codes.values)
    kind = xp.where(codes.values > num_known, xp.full_like(codes.values[:1], num_known), kind)
    is_word, is_end = xp.take(lexicon.is_word, kind), xp.take(lexicon.is_end, kind)

    def count(where: Array) -> Array:
        return xp.astype(codes.sum(where), xp.float64)

    words = count(is_word)
    sentences = count(_run_starts(is_end, rows)) + _has_open_end(is_word, is_end, codes)
    stops = count(xp.take(lexicon.is_stop, kind))
    statistics = [
        words,
        _distinct(codes, is_word, rows),
        count(~is_word),
        sentences,
        words / xp.maximum(sentences, 1.0),
        stops,
        stops / xp.maximum(sentences, 1.0),
    ]
    width = lexicon.num_listed + 1  # one column more, for the tokens in neither list
    cells = count_keys(rows * width + xp.take(lexicon.column, kind), num_rows * width)
    return xp.stack(statistics, axis=1), xp.reshape(cells, (num_rows, width))[:, :-1]


def count_keys(keys: Array, num_keys: int) -> Array:
    """Count how often each number from 0 to ``num_keys`` - 1 occurs in ``keys``: INT64 ``[num_keys]``."""
    # bincount would wait for the device to read the greatest key. In sorted keys each key is one run.
    xp = namespace(keys)
    ends = xp.searchsorted(xp.sort(keys), xp.arange(num_keys, dtype=keys.dtype, device=device_of(keys)), side="right")
    return xp.concat([ends[:1], ends[1:] - ends[:-1]])


def _run_starts(is_end: Array, rows: Array) -> Array:
    """Mark the first token of each run of sentence ends.

    It is a sentence end whose previous token is not a sentence end or is in another row.
    """
    xp = namespace(is_end)
    goes_on = is_end[:-1] & (rows[1:] == rows[:-1])
    return is_end & ~xp.concat([xp.zeros_like(is_end[:1]), goes_on])


def _has_open_end(is_word: Array, is_end: Array, codes: Ragged) -> Array:
    """Return 1 for each row with a word after its last sentence end, else 0: FP64 ``[rows]``."""
    xp = namespace(is_word)
    seen = xp.cumulative_sum(xp.astype(is_end, xp.int64))
    # Sentence ends up to the end of each row: if as many precede a word, none follows it.
    total = xp.cumulative_sum(codes.sum(is_end))
    return xp.astype(codes.sum(is_word & (seen == xp.take(total, codes.row_ids))) > 0, xp.float64)


def _distinct(codes: Ragged, is_word: Array, rows: Array) -> Array:
    """Count the distinct words of each row: FP64 ``[rows]``."""
    xp = namespace(is_word)
    if is_word.shape[0] == 0:
        return xp.zeros(len(codes), dtype=xp.float64, device=device_of(codes.offsets))
    # One sort of (row, word) keys puts equal words of a row side by side; each first occurrence differs from its left.
    words = xp.where(is_word, codes.values + 1, xp.zeros_like(codes.values[:1]))
    keys = xp.sort(rows * _MOST_CODES + words)  # sorted by row, so that sums over rows hold
    has_others = codes.sum(~is_word) > 0  # all other tokens share one code, 0
    return xp.astype(codes.sum(_differs(keys)) - xp.astype(has_others, xp.int64), xp.float64)


def _differs(values: Array) -> Array:
    """Whether each value differs from the previous value; true for the first value."""
    xp = namespace(values)
    return xp.concat([xp.ones_like(values[:1], dtype=xp.bool), values[1:] != values[:-1]])


# --- rows for the host -------------------------------------------------------------------------------------------


def read_code_points() -> list[tuple[int, int]]:
    """Read the ranges of code points, first and last included; the host tokenizes a row that contains one of them."""
    ranges: list[tuple[int, int]] = [
        (first, last) for first, last in json.loads(CODE_POINTS.read_text(encoding="utf-8"))["ranges"]
    ]
    return ranges


class Routing:
    """Finds the rows that the host must tokenize (the exact path), in array code that never waits for the device."""

    def __init__(self, device: Device) -> None:
        self._differing = CodePoints.ranges(read_code_points(), device)

    def find(self, texts: Ragged, words: Words) -> Array:
        """Mark the rows that the host must tokenize: BOOL ``[rows]``.

        ``texts`` are the texts before normalisation, ``words`` the tokens of the normalised texts.
        """
        has_special = texts.sum(_begin_special(texts)) > 0
        has_differing = texts.sum(self._differing.find(texts)) > 0
        return has_special | has_differing | words.has_long


def _begin_special(texts: Ragged) -> Array:
    """Mark the bytes at which a special token such as ``[SEP]`` begins, in upper case: BOOL ``[len(texts.values)]``."""
    xp, values, rows = namespace(texts.values), texts.values, texts.row_ids
    found = xp.zeros_like(values, dtype=xp.bool)
    for token in SPECIAL_TOKENS:
        pattern = token.encode()
        last = values.shape[0] - len(pattern) + 1
        if last <= 0:
            continue
        here = rows[:last] == rows[len(pattern) - 1 :]
        for place, byte in enumerate(pattern):
            here = here & (values[place : place + last] == byte)
        found = found | xp.concat([here, xp.zeros_like(values[last:], dtype=xp.bool)])
    return found
