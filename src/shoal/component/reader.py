"""Texts to token ids, attention mask and features, on either device, from one upload of the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from shoal.component.bundle import Bundle
from shoal.component.features import Features, device_codes
from shoal.component.gpu_text import GpuText, TextEngine
from shoal.component.ledger import CONTROL, EXACT, EXACT_ROWS
from shoal.component.ragged import Ragged, Texts
from shoal.component.routing import Routing
from shoal.component.tensors import Array, Device, namespace
from shoal.component.wordpiece import WIDTH_MULTIPLE, WordPiece, frame, round_up
from shoal.component.words import CodePoints, Words, hash_factors


class Reading(NamedTuple):
    """What a batch of texts is to the models: ids and mask INT64 ``[rows, width]``, features FP32 ``[rows, 207]``.

    ``width`` is that of the longest row, a multiple of 8 unless the bundle's ``max_length`` is smaller.
    """

    ids: Array
    mask: Array
    features: Array


class Reader:
    """Reads texts on the host, with Hugging Face's tokenizer: the exact path. What it gives lies on the device."""

    def __init__(self, vocabulary: Sequence[str], bundle: Bundle, device: Device) -> None:
        self._device, self._max_length = device, bundle.max_length
        self._wordpiece = WordPiece(vocabulary, is_lowercase=bundle.is_lowercase, max_length=bundle.max_length)
        self._features = Features(bundle, device)

    def __call__(self, texts: Texts) -> Reading:
        """Read a batch of texts that lie on the host."""
        pieces, steps = self._pieces(texts)
        return self._finish(pieces, self._features.code(texts), steps)

    def _pieces(self, texts: Texts) -> tuple[Ragged, int]:
        """Token ids on the host, and the width that holds the longest row, in steps of 8."""
        pieces = self._wordpiece.pieces(texts)
        return pieces, int(round_up(np.minimum(pieces.lengths, self._max_length - 2).max()))

    def _finish(self, pieces: Ragged, codes: Ragged, steps: int) -> Reading:
        width = min(self._max_length, steps * WIDTH_MULTIPLE)
        ids, mask = frame(pieces.to(self._device, EXACT), self._wordpiece.ids, width)
        return Reading(ids, mask, self._features.of_codes(codes.to(self._device, EXACT)))


class DeviceReader(Reader):
    """Reads texts on a device; rows that its tokenizer would get wrong are read on the host and put in their places.

    ``edge`` names the upload of the texts in the ledger.
    """

    def __init__(
        self, vocabulary: Sequence[str], bundle: Bundle, device: Device, edge: str, engine: TextEngine | None = None
    ) -> None:
        super().__init__(vocabulary, bundle, device)
        self._engine = engine or GpuText(vocabulary, self._features.lexicon.tokens, device)
        self._edge = edge
        self._routing = Routing(device)
        characters, factors = CodePoints.words(device), hash_factors(device)
        self._codes = partial(device_codes, lexicon=self._features.lexicon, word_characters=characters, factors=factors)

    def __call__(self, texts: Texts) -> Reading:
        """Read a batch of texts that lie on the host."""
        here = texts.to(self._device, self._edge)
        clean = self._engine.normalise(here)
        pieces = self._engine.pieces(clean)
        listed = self._engine.listed(clean)
        words = Words(clean, int(listed.values.shape[0]))
        codes = Ragged(self._codes(words, listed.values), listed.offsets)

        is_exact = self._routing.find(here, words)
        rows, steps = self._decide(pieces, is_exact)
        if not rows.size:
            return self._finish(pieces, codes, steps)
        self._device.ledger.count(EXACT_ROWS, rows.size)
        exact_texts = texts.select(rows)
        exact_pieces, exact_steps = self._pieces(exact_texts)
        steps = max(steps, exact_steps)
        exact = self._finish(exact_pieces, self._features.code(exact_texts), steps)
        return _merge(self._finish(pieces, codes, steps), exact, is_exact)

    def _decide(self, pieces: Ragged, is_exact: Array) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], int]:
        """What the host must know: which rows are its own, and the width of the others in steps of 8.

        One copy of a byte a row and one more: the only wait for the device in a batch.
        """
        xp = namespace(is_exact)
        lengths = xp.minimum(pieces.lengths, self._max_length - 2)
        steps = round_up(xp.max(xp.where(is_exact, xp.zeros_like(lengths[:1]), lengths)))
        both = xp.concat([xp.astype(is_exact, xp.uint8), xp.astype(xp.reshape(steps, (1,)), xp.uint8)])
        known = self._device.fetch(both, CONTROL)
        return np.flatnonzero(known[:-1]), int(known[-1])


def _merge(fast: Reading, exact: Reading, is_exact: Array) -> Reading:
    """The rows of both in the order of the batch."""
    xp, num_rows = namespace(is_exact), fast.ids.shape[0]
    counted = xp.cumulative_sum(xp.astype(is_exact, xp.int64))
    own = xp.cumulative_sum(xp.ones_like(counted)) - 1
    source = xp.where(is_exact, num_rows - 1 + counted, own)
    ids, mask, features = (xp.take(xp.concat([a, b]), source, axis=0) for a, b in zip(fast, exact, strict=True))
    return Reading(ids, mask, features)


def make_reader(vocabulary: Sequence[str], bundle: Bundle, device: Device, edge: str) -> Reader:
    """The reader for a device.

    On a GPU an encoder that keeps case is read on the host: the device's normalizer was compared for lower case alone.
    """
    if device.is_host or not bundle.is_lowercase:
        return Reader(vocabulary, bundle, device)
    return DeviceReader(vocabulary, bundle, device, edge)
