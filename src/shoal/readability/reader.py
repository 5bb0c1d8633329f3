"""Conversion of texts to token ids, attention mask and features, on the host or on a GPU.

The *exact path* is Hugging Face's tokenizer on the host. On a GPU, `shoal.kit.text.device` says which rows take it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shoal.errors import SetupError
from shoal.kit.blocks import normalise
from shoal.kit.component.ledger import CONTROL, EXACT, EXACT_ROWS, SETUP
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device, namespace
from shoal.kit.text.device import DeviceCoder, Ragged, Routing, Words, count_tokens, frame, round_up, upload
from shoal.kit.text.gpu_text import GpuText, TextEngine
from shoal.kit.text.tokens import WIDTH_MULTIPLE, WordCache, WordPiece, flatten
from shoal.kit.text.words import Lexicon, TokenCodes, TokenCounter, make_features
from shoal.readability.preprocess_config import Bundle

_SAMPLES = (
    "A cat sat on the mat. " * 9,
    "",
    " ",
    "a",
    "Naïve café, 1984… isn't it?",
    "漢字 [SEP] " + "x" * 101,
    "\n Blank at both ends. \n",
    "I",
)


class Reading(NamedTuple):
    """Model inputs of a batch of texts: ids and mask INT64 ``[rows, width]``, features FP32 ``[rows, 207]``.

    ``width`` is the longest row's number of tokens rounded up to a multiple of 8, at most the ``max_length`` in
    ``preprocess.json``.
    """

    ids: Array
    mask: Array
    features: Array


Read: TypeAlias = Callable[[Sequence[str]], Reading]


class Features:
    """Converter from word codes of texts (see `TokenCodes`) to the forest's input, with the settings in a `Bundle`."""

    def __init__(self, bundle: Bundle) -> None:
        self.lexicon = Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], Device())
        self._count = TokenCounter(self.lexicon)
        self._mean, self._std = np.array(bundle.mean), np.array(bundle.std)

    def __call__(self, rows: Sequence[Sequence[int]]) -> Array:
        """Compute features FP32 ``[rows, 207]`` from one list of word codes per text."""
        return normalise(make_features(*self._count(rows)), self._mean, self._std)


class Reader:
    """Reader on the host, by Hugging Face's tokenizer; the token ids and feature codes of each word are cached."""

    def __init__(self, vocabulary: Sequence[str], bundle: Bundle) -> None:
        self.wordpiece = WordPiece(vocabulary, is_lowercase=bundle.is_lowercase, max_length=bundle.max_length)
        self._features = Features(bundle)
        self._find_codes = TokenCodes(self._features.lexicon.tokens)
        self._words = WordCache(self._find, self._find_codes.forget)

    def _find(self, words: list[str]) -> list[tuple[list[int], list[int]]]:
        return list(zip(self.wordpiece.find(words), self._find_codes(words), strict=True))

    def __call__(self, texts: Sequence[str], width: int = 0) -> Reading:
        """Read a batch of texts; the width of ids and mask is at least ``width``."""
        found = self._words(texts)
        pieces, codes = (flatten([[word[k] for word in row] for row in found]) for k in (0, 1))
        return Reading(*self.wordpiece.frame(pieces, width), self._features(codes))


class DeviceReader:
    """Reader on a GPU. Rows that the GPU's tokenizer would get wrong are read on the host and merged into the batch.

    ``edge`` is the name of the text tensor; under this name, the device's ledger (its record of copies) counts the
    upload.
    """

    def __init__(
        self, vocabulary: Sequence[str], bundle: Bundle, device: Device, edge: str, engine: TextEngine | None = None
    ) -> None:
        self._device, self._edge, self._max_length = device, edge, bundle.max_length
        self._host = Reader(vocabulary, bundle)
        self._lexicon = Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], device)
        self._mean, self._std = (device.put(np.array(v), SETUP) for v in (bundle.mean, bundle.std))
        self._engine = engine or GpuText(vocabulary, device)
        self._routing = Routing(device)
        self._code = DeviceCoder(self._lexicon, device)
        self._rehearse()

    def _rehearse(self) -> None:
        """Read sample texts on GPU and host, to compile kernels before the first request and to find wrong results."""
        for texts in (_SAMPLES, _SAMPLES[-1:]):
            here, there = self._host(texts), self(texts)
            for name, expected, array in zip(Reading._fields, here, there, strict=True):
                found = self._device.fetch(array, SETUP)
                if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
                    raise SetupError(
                        f"The text functions of GPU {self._device.index} give other {name} than the host's.",
                        "Compose with --placement cpu or hybrid, and report the version of pylibcudf.",
                    )

    def __call__(self, texts: Sequence[str]) -> Reading:
        """Return the model inputs, on the GPU, of a batch of texts that are on the host."""
        here = upload(texts, self._device, self._edge)
        clean = self._engine.normalise(here)
        pieces = self._engine.pieces(clean)
        words = Words.find(clean, self._device)
        codes, is_wrong = self._code(words)

        is_exact = self._routing.find(here, words) | is_wrong
        rows, steps = self._decide(pieces, is_exact)
        width = min(self._max_length, steps * WIDTH_MULTIPLE)
        if not rows.size:
            return self._finish(pieces, codes, width)
        exact = upload_reading(self._host([texts[row] for row in rows], width), self._device)
        return _merge(self._finish(pieces, codes, exact.ids.shape[1]), exact, is_exact)

    def _finish(self, pieces: Ragged, codes: Ragged, width: int) -> Reading:
        raw = make_features(*count_tokens(codes, self._lexicon))
        return Reading(*frame(pieces, self._host.wordpiece.ids, width), normalise(raw, self._mean, self._std))

    def _decide(self, pieces: Ragged, is_exact: Array) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], int]:
        """Return the numbers of the rows to read on the host, and the width of the other rows in units of 8 tokens.

        Both come to the host in one copy: one byte per row, and one byte for the width.
        """
        xp = namespace(is_exact)
        lengths = xp.minimum(pieces.lengths, self._max_length - 2)
        steps = round_up(xp.max(xp.where(is_exact, xp.zeros_like(lengths[:1]), lengths)))
        both = xp.concat([xp.astype(is_exact, xp.uint8), xp.astype(xp.reshape(steps, (1,)), xp.uint8)])
        known = self._device.fetch(both, CONTROL)
        return np.flatnonzero(known[:-1]), int(known[-1])


def upload_reading(reading: Reading, device: Device) -> Reading:
    """Upload rows that were read on the host to a GPU, in two copies, and count the rows in the device's ledger."""
    device.ledger.count(EXACT_ROWS, len(reading.ids))
    both = device.put(np.stack([reading.ids, reading.mask]), EXACT)
    return Reading(both[0], both[1], device.put(reading.features, EXACT))


def _merge(fast: Reading, exact: Reading, is_exact: Array) -> Reading:
    """Merge the rows read on the GPU (``fast``) and on the host (``exact``) in the order of the batch."""
    # Stack the exact rows below the GPU's rows, then gather: the k-th exact row of the batch comes from row
    # num_rows - 1 + k of the stack, any other row i from row i.
    xp, num_rows = namespace(is_exact), fast.ids.shape[0]
    counted = xp.cumulative_sum(xp.astype(is_exact, xp.int64))
    own = xp.cumulative_sum(xp.ones_like(counted)) - 1
    source = xp.where(is_exact, num_rows - 1 + counted, own)
    ids, mask, features = (xp.take(xp.concat([a, b]), source, axis=0) for a, b in zip(fast, exact, strict=True))
    return Reading(ids, mask, features)


def make_reader(vocabulary: Sequence[str], bundle: Bundle, device: Device, edge: str) -> Read:
    """Create the reader of texts for a device.

    Raises:
        SetupError: the device is a GPU, and texts of this bundle are read on the host only.
    """
    if device.is_host:
        return Reader(vocabulary, bundle)
    if why := bundle.host_reason:
        raise SetupError(f"This model is on GPU {device.index}, and {why}.", "Compose with --place preprocess=cpu")
    return DeviceReader(vocabulary, bundle, device, edge)
