"""Fallback for rows that the GPU's tokenizer would get wrong: they take the exact path, Hugging Face's on the host.

libcudf's normalizer and WordPiece may differ from Hugging Face's for three kinds of text: with a special token such as
``[SEP]``, with a word of more than 100 bytes, or with a code point that their Unicode tables treat differently
(``exact_codepoints.json``).
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.component.tensors import Array, Device, namespace
from shoal.text.device.device_tokens import CodePoints, Words
from shoal.text.ragged import Texts
from shoal.text.wordpiece import SPECIAL_TOKENS

CODE_POINTS = Path(__file__).with_name("exact_codepoints.json")


def read_code_points() -> list[tuple[int, int]]:
    """Read the ranges of code points, first and last included, whose rows take the exact path."""
    ranges: list[tuple[int, int]] = [
        (first, last) for first, last in json.loads(CODE_POINTS.read_text(encoding="utf-8"))["ranges"]
    ]
    return ranges


class Routing:
    """Finder of the rows for the host's tokenizer, in array code that never waits for the device."""

    def __init__(self, device: Device) -> None:
        self._differing = CodePoints.ranges(read_code_points(), device)

    def find(self, texts: Texts, words: Words) -> Array:
        """Mark the rows that take the exact path, BOOL ``[rows]``; ``words`` are the tokens of the normalised texts."""
        has_special = texts.sum(_begin_special(texts)) > 0
        has_differing = texts.sum(self._differing.find(texts)) > 0
        return has_special | has_differing | words.has_long


def _begin_special(texts: Texts) -> Array:
    """Whether a special token, in its exact case, begins at each byte: BOOL ``[len(texts.values)]``."""
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
