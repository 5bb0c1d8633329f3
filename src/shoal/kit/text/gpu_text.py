"""BERT's normalizer and WordPiece on a GPU, by pylibcudf; no other module calls pylibcudf.

pylibcudf's columns and CuPy's arrays share memory, on the default stream; nothing is copied between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shoal.errors import needs
from shoal.kit.component.ledger import CONTROL, DOWN, SETUP, UP
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device
from shoal.kit.text.device import Ragged, upload


class TextEngine(Protocol):
    """Tokenizer on a GPU. ``Routing`` finds the rows that it might tokenize differently from the host's tokenizer."""

    def normalise(self, texts: Ragged) -> Ragged:
        """Lower-case texts, strip accents, and put spaces around tokens and punctuation."""

    def pieces(self, clean: Ragged) -> Ragged:
        """Return the token ids of normalised texts, not truncated: INT64, one row per text."""


# Number of copies (down, up) of at most 8 bytes that libcudf makes inside each call, to read and set sizes; counted in
# its source (26.10), not yet measured with a profiler.
_SIZES = {"normalise": (3, 1), "pieces": (4, 1)}
# libcudf's wordpiece_tokenize writes past its own buffer if a batch is almost only spaces (26.10); this row, put in
# front, prevents that.
_SENTINEL = "aaaa"


class GpuText:
    """BERT's tokenizer over a vocabulary, by pylibcudf.

    It always converts to lower case. libcudf can also keep case and accents, but its result was never compared with
    Hugging Face's tokenizer.
    """

    def __init__(self, vocabulary: Sequence[str], device: Device) -> None:
        with needs("gpu"):
            from pylibcudf.nvtext import normalize, wordpiece_tokenize

        self._device = device
        self._normalize, self._wordpiece = normalize, wordpiece_tokenize

        def column(strings: Sequence[str]) -> Any:
            return self._column(upload(strings, device, SETUP))

        self._normalizer = normalize.CharacterNormalizer(True, column([]))
        self._vocabulary = wordpiece_tokenize.WordPieceVocabulary(column(vocabulary))
        self._sentinel = upload([_SENTINEL], device, SETUP)
        alone = wordpiece_tokenize.wordpiece_tokenize(self._column(self._sentinel), self._vocabulary, 0)
        self._sentinel_pieces = int(alone.list_view().child().size())

    def normalise(self, texts: Ragged) -> Ragged:
        """See ``TextEngine``."""
        clean = self._normalize.normalize_characters(self._column(texts), self._normalizer)
        self._record("normalise")
        return Ragged(self._array(clean.data(), "uint8"), self._integers(clean.child(0)))

    def pieces(self, clean: Ragged) -> Ragged:
        """See ``TextEngine``."""
        xp, size = self._device.xp, len(_SENTINEL)
        guarded = Ragged(
            xp.concat([self._sentinel.values, clean.values]),
            xp.concat([self._sentinel.offsets[:1], clean.offsets + size]),
        )
        # 0, all words: a limit takes another kernel (26.10), which loses the last word of "a b" and of "Hello world. "
        found = self._ragged(self._wordpiece.wordpiece_tokenize(self._column(guarded), self._vocabulary, 0))
        self._record("pieces")
        return Ragged(found.values[self._sentinel_pieces :], found.offsets[1:] - self._sentinel_pieces)

    def _record(self, call: str) -> None:
        for direction, copies in zip((DOWN, UP), _SIZES[call], strict=True):
            self._device.ledger.record(CONTROL, direction, 8 * copies, copies=copies)

    def _column(self, texts: Ragged) -> Any:
        from pylibcudf import Column, DataType, TypeId, gpumemoryview

        xp = self._device.xp
        blob = texts.values if texts.values.shape[0] else xp.zeros(1, dtype=xp.uint8)  # an empty array has no address
        offsets = xp.astype(texts.offsets, xp.int32)
        ends = Column(DataType(TypeId.INT32), len(texts) + 1, gpumemoryview(offsets), None, 0, 0, [])
        return Column(DataType(TypeId.STRING), len(texts), gpumemoryview(blob), None, 0, 0, [ends])

    def _ragged(self, lists: Any) -> Ragged:
        view = lists.list_view()
        return Ragged(self._integers(view.child()), self._integers(view.offsets()))

    def _integers(self, column: Any) -> Array:
        """Convert an INT32 or INT64 column to an INT64 array."""
        from pylibcudf import TypeId

        name = "int64" if column.type().id() == TypeId.INT64 else "int32"
        return self._device.xp.astype(self._array(column.data(), name)[: column.size()], self._device.xp.int64)

    def _array(self, memory: Any, dtype: str) -> Array:
        """Return an array that shares a column's memory."""
        xp = self._device.xp
        if memory is None or memory.size == 0:
            return xp.zeros(0, dtype=getattr(xp, dtype))
        return xp.asarray(memory).view(getattr(xp, dtype))
