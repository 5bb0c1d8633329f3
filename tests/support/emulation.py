"""Emulation of libcudf's text functions on the host, from its published rules: a TextEngine for tests.

A table gives each code point its normal form, whatever is beside it; punctuation and CJK get spaces around them;
words end at spaces; a word of 200 bytes or more is unknown, any other the greedy longest match first. Code points whose
table entry differs from Hugging Face's are left as they are here, so that a row that should have been routed shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from shoal.kit.component.tensors import Device
from shoal.kit.text.device import Ragged, read_code_points, upload
from tests.support.pretend import PretendGpu

MAX_WORD_BYTES = 200  # max_word_size of libcudf's wordpiece_tokenize.cu
_NORMALIZER, _SPLITTER = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
_DIFFERING = {code for first, last in read_code_points() for code in range(first, last + 1)}


@cache
def normal_form(character: str) -> str:
    """One code point as libcudf's normalizer leaves it."""
    if ord(character) in _DIFFERING:
        return character
    between_letters = f"a{_NORMALIZER.normalize_str(character)}a"
    return " ".join(token for token, _ in _SPLITTER.pre_tokenize_str(between_letters))[1:-1]


class EmulatedText:
    """See ``shoal.kit.text.gpu_text.TextEngine``. Its arrays lie where ``device`` puts them."""

    def __init__(self, vocabulary: Sequence[str], device: Device | None = None) -> None:
        self._vocabulary = {token: index for index, token in enumerate(vocabulary)}
        self._device = device or PretendGpu()

    def normalise(self, texts: Ragged) -> Ragged:
        clean = ["".join(map(normal_form, text)) for text in to_strings(texts)]
        return self._inside(upload(clean, Device(), "TEXT"))

    def pieces(self, clean: Ragged) -> Ragged:
        rows = ([p for word in text.split(" ") if word for p in self._word(word)] for text in to_strings(clean))
        return self._inside(ragged([*rows]))

    def _word(self, word: str) -> list[int]:
        unknown = self._vocabulary["[UNK]"]
        if len(word.encode()) >= MAX_WORD_BYTES:
            return [unknown]
        pieces, start = [], 0
        while start < len(word):
            ends = (end for end in range(len(word), start, -1) if self._piece(word, start, end) in self._vocabulary)
            end = next(ends, 0)
            if not end:
                return [unknown]
            pieces.append(self._vocabulary[self._piece(word, start, end)])
            start = end
        return pieces

    @staticmethod
    def _piece(word: str, start: int, end: int) -> str:
        return ("##" if start else "") + word[start:end]

    def _inside(self, made: Ragged) -> Ragged:
        """Arrays made on the device, not copied to it."""
        if self._device.is_host:
            return made
        asarray = self._device.xp.asarray
        return Ragged(asarray(np.array(made.values)), asarray(np.array(made.offsets)))


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """Rows of integers as a ragged array on the host."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Ragged(np.array([*chain.from_iterable(rows)], np.int64), offsets)


def to_strings(texts: Ragged) -> list[str]:
    """The texts of a blob of UTF-8, which may be torch's."""
    blob, ends = np.asarray(texts.values).tobytes(), np.asarray(texts.offsets).tolist()
    return [blob[start:stop].decode() for start, stop in pairwise(ends)]
