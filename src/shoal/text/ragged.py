"""Ragged arrays: rows of different lengths as flat values and offsets; a batch of texts is a ragged array of bytes.

A text batch is uploaded to a device once, as one blob, and shared by the tokenizer and the features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Self

import numpy as np
from array_api_compat import device as device_of

from shoal.component.tensors import Array, Device, namespace
from shoal.errors import InputError


@dataclass(frozen=True)
class Ragged:
    """Ragged array; row i is ``values[offsets[i]:offsets[i + 1]]``.

    ``values`` is one-dimensional; ``offsets`` is INT64 ``[rows + 1]``, ascending from 0 to ``len(values)``. Both are on
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
        """Return the same rows on ``device``; from the host, offsets and values are uploaded in one copy."""
        if device.is_host or not isinstance(self.values, np.ndarray):
            return type(self)(device.put(self.values, edge), device.put(self.offsets, edge))
        xp, size = device.xp, self.offsets.nbytes
        both = device.put(np.concatenate([self.offsets.view(np.uint8), self.values.view(np.uint8)]), edge)
        dtype = getattr(xp, self.values.dtype.name)
        return type(self)(both[size:].view(dtype), both[:size].view(xp.int64))

    @property
    def lengths(self) -> Array:
        """Length of each row: INT64 ``[rows]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def row_ids(self) -> Array:
        """Row index of each value: INT64 ``[len(values)]``."""
        if isinstance(self.offsets, np.ndarray):
            return np.repeat(np.arange(len(self)), self.lengths)
        xp = namespace(self.offsets)
        places = xp.arange(self.values.shape[0], dtype=xp.int64, device=device_of(self.offsets))
        return xp.searchsorted(self.offsets[1:], places, side="right")  # repeat() by counts would wait for the device

    def sum(self, values: Array) -> Array:
        """Sum ``values``, one per value of this array, over each row: INT64 ``[rows]``."""
        xp = namespace(values)
        # A row's sum is the difference of two prefix sums: no loop over rows, and no shape depends on a value.
        total = _from_zero(xp.cumulative_sum(xp.astype(values, xp.int64)))
        return xp.take(total, self.offsets[1:]) - xp.take(total, self.offsets[:-1])

    def pad(self, width: int, fill: int) -> Array:
        """Return ``[rows, width]``: each row cut, or padded with ``fill``."""
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
        """Join texts into one blob on the host."""
        texts = list(texts)
        made = cls(np.frombuffer(b"".join(texts), np.uint8), _offsets(texts))
        made.__dict__["rows"] = texts  # the cached property: what was just joined need not be cut again
        return made

    @cached_property
    def rows(self) -> list[bytes]:
        """Bytes of each text; only for a blob on the host."""
        blob, ends = self.values.tobytes(), self.offsets.tolist()
        return [blob[start:stop] for start, stop in pairwise(ends)]

    @cached_property
    def strings(self) -> list[str]:
        """Decoded texts; only for a blob on the host."""
        return [row.decode() for row in self.rows]

    def select(self, rows: Iterable[int]) -> Texts:
        """Return the texts with these row numbers; only for a blob on the host."""
        return Texts.from_bytes(self.rows[row] for row in rows)


def to_texts(strings: Iterable[str]) -> Texts:
    """Encode strings as a batch of texts on the host."""
    return Texts.from_bytes(string.encode() for string in strings)


def _from_zero(totals: Array) -> Array:
    """Prepend a 0 to running totals."""
    xp = namespace(totals)
    return xp.concat([xp.zeros(1, dtype=totals.dtype, device=device_of(totals)), totals])


def _offsets(rows: Sequence[Sequence[int]]) -> Array:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    return offsets


def check_texts(texts: Iterable[bytes], *, name: str, max_bytes: int) -> None:
    """Check that each text is UTF-8 and not too long.

    Raises:
        InputError: a text is not; the error names the tensor, the row and the fault.
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
