"""Bound of how much longer the parts of a ``tokenizer.json`` make a text: a chain of replacements can double it often.

Each part is a list of pieces, which run one after the other. A piece multiplies what it reads by its factor, and reads
what an earlier piece wrote only if they have a character in common: ten pieces that each write out another ligature
make no text ten times as long, but ten pieces that each double the letter a make it 1,024 times as long.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_GROWTH, MAX_PIECES, MAX_PADDING = 256, 1000, 2**20
_EMPTY = re.compile(r"[*?|^$]|\\[bBAGzZ]|\{[0,]|\A\Z")  # signs of an expression that may match between characters


def find_growth(tokenizer: Mapping[str, Any]) -> str:
    """Return how texts grow beyond the bound, as a clause; empty if they do not.

    Raises:
        LookupError, TypeError, ValueError: a part has another form than that of ``tokenizers``.
    """
    for part in PARTS:
        pieces = list(_find_pieces(tokenizer.get(part)))
        growth = _find_longest(pieces[:MAX_PIECES])
        if growth > MAX_GROWTH:
            return f"its {part} makes texts up to {growth:.3g} times as long, and at most {MAX_GROWTH} is accepted"
        if len(pieces) > MAX_PIECES:
            return f"its {part} has {len(pieces):,} pieces, and at most {MAX_PIECES:,} are accepted"
    padding = tokenizer.get("padding") or {}
    strategy = padding.get("strategy")
    sizes = [padding.get("pad_to_multiple_of"), strategy.get("Fixed") if isinstance(strategy, dict) else None]
    if any(size is not None and size > MAX_PADDING for size in sizes):
        return f"it pads texts to more than {MAX_PADDING:,} tokens"
    return ""


def _find_pieces(part: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [part]
    while waiting:
        piece = waiting.pop()
        if piece and piece.get("type") == "Sequence":
            waiting += [inner for value in piece.values() if isinstance(value, list) for inner in reversed(value)]
        elif piece:
            yield piece


def _find_longest(pieces: list[Mapping[str, Any]]) -> float:
    """Return the greatest product of factors of pieces that read what the one before wrote."""
    before: list[tuple[set[str] | None, float]] = []  # what each piece wrote (None: anything), and its product
    for piece in pieces:
        factor, reads, writes = _describe(piece)
        products = [n for w, n in before if w is None or reads is None or not w.isdisjoint(reads)]
        before.append((writes, max(1.0, factor) * max(products, default=1.0)))
    return max((product for _, product in before), default=1.0)


def _describe(piece: Mapping[str, Any]) -> tuple[float, set[str] | None, set[str] | None]:
    """Return a piece's factor, and the characters that it reads and writes; None for any."""
    match piece:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            factor = len(content) / len(pattern) if pattern else 1 + len(content)
            return factor, set(pattern) or None, set(content) if pattern else None
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)}:
            return len(content) + bool(_EMPTY.search(pattern)), None, None
        case {"type": "TemplateProcessing", "single": single, "pair": pair}:
            names = [[item["Sequence"]["id"] for item in form if "Sequence" in item] for form in (single, pair)]
            return max(form.count(name) for form in names for name in "AB"), None, None
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            # A trie with its size before it, then the replacements, each with NUL behind it (sentencepiece).
            data = base64.b64decode(charsmap)
            texts = data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", "replace").split("\0")
            return max(map(len, texts)), None, None
        case {"type": "ByteLevel"} | {"type": "BPEDecoder", "suffix": ""} | {"type": "CTC", "word_delimiter_token": ""}:
            return 2, None, None
    return 1, None, None
