"""Rows of different lengths as one flat array and offsets; texts are such rows of bytes.

One text batch is one blob that crosses to a device once and is shared by the tokenizer and the features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple, Self

import numpy as np
from array_api_compat import device as device_of
from numpy.typing import NDArray

from shoal.component.tensors import Array, Device, namespace
from shoal.errors import InputError

# ASCII's white space, among the bytes up to a space: the other control characters are dropped by BERT's normalizer, so
# they separate nothing, although Python's split() takes some of them for white space.
_SPACE, _LINE_FEED = 0x20, 0x0A
_SEPARATES = np.isin(np.arange(_SPACE + 1), np.frombuffer(b"\t\n\r ", np.uint8))
_KEY_BYTES = 16  # of a word, in two integers; one word in 1,500 of English prose is longer
# What is left of 8 bytes that were read as one integer, for a word of 0, 1, ... 8 bytes.
_MASKS = np.array([2 ** (8 * length) - 1 for length in range(9)], np.uint64)


@dataclass(frozen=True)
class Ragged:
    """``values[offsets[i]:offsets[i + 1]]`` is row i.

    ``values`` is one-dimensional; ``offsets`` is INT64 ``[rows + 1]``, ascending from 0 to ``len(values)``. Both lie on
    the same device.
    """

    values: Array
    offsets: Array

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Flatten rows of integers on the host: INT64 values."""
        offsets = _offsets(rows)
        return Ragged(np.fromiter(chain.from_iterable(rows), np.int64, int(offsets[-1])), offsets)

    def __len__(self) -> int:
        return int(self.offsets.shape[0]) - 1

    def to(self, device: Device, edge: str) -> Self:
        """The same rows on ``device``; from the host, offsets and values go up as one copy."""
        if device.is_host or not isinstance(self.values, np.ndarray):
            return type(self)(device.put(self.values, edge), device.put(self.offsets, edge))
        xp, size = device.xp, self.offsets.nbytes
        both = device.put(np.concatenate([self.offsets.view(np.uint8), self.values.view(np.uint8)]), edge)
        dtype = getattr(xp, self.values.dtype.name)
        return type(self)(both[size:].view(dtype), both[:size].view(xp.int64))

    @property
    def lengths(self) -> Array:
        """INT64 ``[rows]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def row_ids(self) -> Array:
        """INT64 ``[len(values)]``: the row that each value belongs to."""
        if isinstance(self.offsets, np.ndarray):
            return np.repeat(np.arange(len(self)), self.lengths)
        xp = namespace(self.offsets)
        places = xp.arange(self.values.shape[0], dtype=xp.int64, device=device_of(self.offsets))
        return xp.searchsorted(self.offsets[1:], places, side="right")  # repeat() by counts would wait for the device

    def sum(self, values: Array) -> Array:
        """Sums over the rows of ``values``, which has an element for each of this one's: INT64 ``[rows]``."""
        xp = namespace(values)
        total = _from_zero(xp.cumulative_sum(xp.astype(values, xp.int64)))
        return xp.take(total, self.offsets[1:]) - xp.take(total, self.offsets[:-1])

    def pad(self, width: int, fill: int) -> Array:
        """``[rows, width]``: each row cut or filled up with ``fill``."""
        xp = namespace(self.values)
        columns = xp.arange(width, dtype=self.offsets.dtype, device=device_of(self.values))
        if self.values.shape[0] == 0:
            return xp.full((len(self), width), fill, dtype=self.values.dtype, device=device_of(self.values))
        index = xp.minimum(self.offsets[:-1, None] + columns, self.values.shape[0] - 1)
        gathered = xp.reshape(xp.take(self.values, xp.reshape(index, (-1,))), index.shape)
        return xp.where(columns < self.lengths[:, None], gathered, xp.full_like(gathered[:1, :1], fill))


@dataclass(frozen=True)
class Texts(Ragged):
    """A batch of UTF-8 texts: UINT8 values."""

    @classmethod
    def from_bytes(cls, texts: Iterable[bytes]) -> Texts:
        """Join texts to one blob on the host."""
        texts = list(texts)
        return cls(np.frombuffer(b"".join(texts), np.uint8), _offsets(texts))

    @cached_property
    def strings(self) -> list[str]:
        """The texts decoded; only for a blob on the host."""
        return [row.decode() for row in self._rows()]

    @cached_property
    def cut(self) -> Cut:
        """The texts cut at white space, once for everybody who asks; only for a blob on the host."""
        return Cut.of(self._rows())

    def select(self, rows: Iterable[int]) -> Texts:
        """Some of the texts; only for a blob on the host."""
        texts = self._rows()
        return Texts.from_bytes(texts[row] for row in rows)

    def _rows(self) -> list[bytes]:
        blob, ends = self.values.tobytes(), self.offsets.tolist()
        return [blob[start:stop] for start, stop in pairwise(ends)]


@dataclass(frozen=True)
class Cut:
    """Texts on the host, cut at ASCII's white space: word i is the ``lengths[i]`` bytes from ``blob[begins[i]]``.

    BERT treats what stands between white space by itself, wherever it is cut; other white space stays within a word.
    Between two separators is an empty word, and each row has at least one word. ``begins`` and ``lengths`` are INT64
    ``[words]``, and row i has words ``offsets[i]`` to ``offsets[i + 1]``.
    """

    blob: bytes
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> Cut:
        """Cut UTF-8 texts."""
        # A separator after each row, and after the last as many bytes as are read for the key of an empty word there.
        blob = b" ".join(rows) + b" " * (_KEY_BYTES + bool(rows))
        values = np.frombuffer(blob, np.uint8)[: len(blob) - _KEY_BYTES]
        ends = (values <= _SPACE).nonzero()[0]
        found = values.take(ends)
        if not ((found == _SPACE) | (found == _LINE_FEED)).all():
            ends = ends[_SEPARATES.take(found)]
        begins = np.empty(len(ends), np.int64)
        begins[:1] = 0
        np.add(ends[:-1], 1, out=begins[1:])
        offsets = np.zeros(len(rows) + 1, np.int64)
        row_ends = (np.fromiter(map(len, rows), np.int64, len(rows)) + 1).cumsum() - 1
        offsets[1:] = ends.searchsorted(row_ends) + 1
        return cls(blob, begins, ends - begins, offsets)

    def words(self, indices: NDArray[np.intp]) -> list[bytes]:
        """Some of the words."""
        begins = self.begins[indices]
        ends = begins + self.lengths[indices]
        return [self.blob[start:stop] for start, stop in zip(begins.tolist(), ends.tolist(), strict=True)]

    def keys(self) -> Keys:
        """Every word as two integers."""
        # Eight bytes from wherever a word begins, as one integer.
        eight: NDArray[np.uint64] = np.ndarray((len(self.blob) - 7,), "<u8", self.blob, strides=(1,))
        first = eight[self.begins]
        first &= _MASKS.take(self.lengths, mode="clip")
        second = np.zeros(len(first), np.uint64)
        longer = (self.lengths > 8).nonzero()[0]
        second[longer] = eight[self.begins[longer] + 8] & _MASKS.take(self.lengths[longer] - 8, mode="clip")
        return Keys(first, second, self.lengths <= _KEY_BYTES)


class Keys(NamedTuple):
    """The first 16 bytes of words, filled up with NUL: UINT64 ``[words]`` each.

    ``are_whole`` says which words have no more bytes, BOOL ``[words]``. Such words are equal if their keys are, but for
    NUL at their ends, which BERT's normalizer drops.
    """

    first: NDArray[np.uint64]
    second: NDArray[np.uint64]
    are_whole: NDArray[np.bool_]

    def take(self, indices: NDArray[np.intp]) -> Keys:
        """Some of the keys."""
        return Keys(self.first[indices], self.second[indices], self.are_whole[indices])


def to_texts(strings: Iterable[str]) -> Texts:
    """A batch of strings on the host."""
    return Texts.from_bytes(string.encode() for string in strings)


def _from_zero(totals: Array) -> Array:
    """Running totals with a 0 before them."""
    xp = namespace(totals)
    return xp.concat([xp.zeros(1, dtype=totals.dtype, device=device_of(totals)), totals])


def _offsets(rows: Sequence[Sequence[int]]) -> Array:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    return offsets


def check_texts(texts: Iterable[bytes], *, name: str, max_bytes: int) -> None:
    """Check that each text is UTF-8 and not too long.

    Raises:
        InputError: it names the tensor, the row, and what stands there.
    """
    for row, text in enumerate(texts):
        if len(text) > max_bytes:
            raise InputError(
                f"{name}[{row}] has {len(text)} bytes; at most {max_bytes} are allowed.",
                "Split the text, or raise the max_text_bytes parameter in the model's config.pbtxt.",
            )
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}[{row}] is not valid UTF-8: byte 0x{text[error.start]:02x} at position {error.start}.",
                "Encode the text as UTF-8.",
            ) from None
