"""Conversion of texts to token ids, attention mask and features, on host or GPU, with one upload of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.component.ledger import CONTROL, EXACT, EXACT_ROWS, SETUP
from shoal.component.tensors import Array, Device, namespace
from shoal.errors import ArtifactError, SetupError
from shoal.readability.features import Features
from shoal.readability.preprocess_config import Bundle
from shoal.text.device.device_tokens import Words
from shoal.text.device.gpu_text import GpuText, TextEngine
from shoal.text.device.host_fallback import Routing
from shoal.text.lexicon import TokenCodes
from shoal.text.ragged import Ragged, Texts, to_texts
from shoal.text.word_cache import WordCache, flatten
from shoal.text.word_statistics import DeviceCoder
from shoal.text.wordpiece import WIDTH_MULTIPLE, WordPiece, frame, round_up

MAX_WIDTH = 255 * WIDTH_MULTIPLE  # the width in steps is copied as one byte
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

    ``width`` fits the longest row, a multiple of 8 unless the bundle's ``max_length`` is smaller.
    """

    ids: Array
    mask: Array
    features: Array


class _Finder:
    """Lookup of words' token ids and codes together."""

    def __init__(self, wordpiece: WordPiece, tokens: Sequence[str]) -> None:
        self._wordpiece, self._codes = wordpiece, TokenCodes(tokens)

    def __call__(self, words: list[str]) -> list[tuple[list[int], list[int]]]:
        return list(zip(self._wordpiece.find(words), self._codes(words), strict=True))


class Reader:
    """Host reader with Hugging Face's tokenizer, the exact path; its results are on the device."""

    def __init__(self, vocabulary: Sequence[str], bundle: Bundle, device: Device) -> None:
        self._device, self._max_length = device, bundle.max_length
        wordpiece = WordPiece(vocabulary, is_lowercase=bundle.is_lowercase, max_length=bundle.max_length)
        self._ids = wordpiece.ids
        self._features = Features(bundle, device)
        tokens = self._features.lexicon.tokens
        self._words = WordCache(lambda: _Finder(wordpiece, tokens))

    def __call__(self, texts: Texts) -> Reading:
        """Read a batch of texts that are on the host."""
        pieces, codes = self._look_up(texts)
        if self._device.is_host:
            ids, mask = frame(pieces, self._ids, self._width(self._steps(pieces)))
            return Reading(ids, mask, self._features.of_rows(codes))
        self._device.ledger.count(EXACT_ROWS, len(texts))
        return self._finish(pieces, Ragged.from_rows(codes), self._steps(pieces))

    def _look_up(self, texts: Texts) -> tuple[Ragged, list[list[int]]]:
        """Return token ids and codes, on the host."""
        found = self._words(texts)
        pieces, codes = (flatten([[word[k] for word in row] for row in found]) for k in (0, 1))
        return Ragged.from_rows(pieces), codes

    def _steps(self, pieces: Ragged) -> int:
        """Return the width for the longest row, in steps of 8, of pieces on the host."""
        return int(round_up(np.minimum(pieces.lengths, self._max_length - 2).max()))

    def _width(self, steps: int) -> int:
        return min(self._max_length, steps * WIDTH_MULTIPLE)

    def _finish(self, pieces: Ragged, codes: Ragged, steps: int) -> Reading:
        ids, mask = frame(pieces.to(self._device, EXACT), self._ids, self._width(steps))
        return Reading(ids, mask, self._features.of_codes(codes.to(self._device, EXACT)))


class DeviceReader(Reader):
    """Device reader; rows that the device's tokenizer would get wrong are read on the host and merged in.

    ``edge`` names the upload of the texts in the ledger.
    """

    def __init__(
        self, vocabulary: Sequence[str], bundle: Bundle, device: Device, edge: str, engine: TextEngine | None = None
    ) -> None:
        super().__init__(vocabulary, bundle, device)
        if bundle.max_length > MAX_WIDTH:
            raise ArtifactError(
                f"preprocess.json has max_length {bundle.max_length}; on a GPU at most {MAX_WIDTH} tokens are read.",
                "Compose with --placement cpu or hybrid.",
            )
        self._engine = engine or GpuText(vocabulary, device)
        self._edge = edge
        self._routing = Routing(device)
        self._code = DeviceCoder(self._features.lexicon, device)
        self._rehearse(Reader(vocabulary, bundle, Device()))

    def _rehearse(self, host: Reader) -> None:
        """Read sample texts on both devices: it compiles kernels before the first request and detects wrong results."""
        for texts in (_SAMPLES, _SAMPLES[-1:]):
            here, there = (read(to_texts(texts)) for read in (host, self))
            for name, expected, array in zip(Reading._fields, here, there, strict=True):
                found = self._device.fetch(array, SETUP)
                if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
                    raise SetupError(
                        f"The text functions of GPU {self._device.index} give other {name} than the host's.",
                        "Compose with --placement cpu or hybrid, and report the version of pylibcudf.",
                    )

    def __call__(self, texts: Texts) -> Reading:
        """Read a batch of texts that are on the host."""
        here = texts.to(self._device, self._edge)
        clean = self._engine.normalise(here)
        pieces = self._engine.pieces(clean)
        words = Words.find(clean, self._device)
        codes = self._code(words)

        is_exact = self._routing.find(here, words)
        rows, steps = self._decide(pieces, is_exact)
        if not rows.size:
            return self._finish(pieces, codes, steps)
        self._device.ledger.count(EXACT_ROWS, rows.size)
        exact_pieces, exact_codes = self._look_up(texts.select(rows))
        steps = max(steps, self._steps(exact_pieces))
        exact = self._finish(exact_pieces, Ragged.from_rows(exact_codes), steps)
        return _merge(self._finish(pieces, codes, steps), exact, is_exact)

    def _decide(self, pieces: Ragged, is_exact: Array) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], int]:
        """Return the rows to read on the host, and the width of the other rows in steps of 8.

        Both are copied to the host at once: one byte per row, and one for the width.
        """
        xp = namespace(is_exact)
        lengths = xp.minimum(pieces.lengths, self._max_length - 2)
        steps = round_up(xp.max(xp.where(is_exact, xp.zeros_like(lengths[:1]), lengths)))
        both = xp.concat([xp.astype(is_exact, xp.uint8), xp.astype(xp.reshape(steps, (1,)), xp.uint8)])
        known = self._device.fetch(both, CONTROL)
        return np.flatnonzero(known[:-1]), int(known[-1])


def _merge(fast: Reading, exact: Reading, is_exact: Array) -> Reading:
    """Merge the device's and the host's rows in the order of the batch."""
    # Gather from both stacked: row i comes from the k-th exact row behind the fast ones if it is the k-th exact row.
    xp, num_rows = namespace(is_exact), fast.ids.shape[0]
    counted = xp.cumulative_sum(xp.astype(is_exact, xp.int64))
    own = xp.cumulative_sum(xp.ones_like(counted)) - 1
    source = xp.where(is_exact, num_rows - 1 + counted, own)
    ids, mask, features = (xp.take(xp.concat([a, b]), source, axis=0) for a, b in zip(fast, exact, strict=True))
    return Reading(ids, mask, features)


def make_reader(vocabulary: Sequence[str], bundle: Bundle, device: Device, edge: str) -> Reader:
    """Create the reader for a device.

    For an encoder that keeps case a GPU's texts are read on the host: the device's normalizer was only verified for
    lower case.
    """
    if device.is_host or not bundle.is_lowercase:
        return Reader(vocabulary, bundle, device)
    return DeviceReader(vocabulary, bundle, device, edge)
