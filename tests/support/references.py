"""The same answers by another way: written from the definitions, one text at a time, without a thought for speed."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

SENTENCE_ENDS = {".", "!", "?", "…"}


def basic_tokens(text: str) -> list[str]:
    """BERT's basic tokenization of Devlin et al., `tokenization.py`: clean, lower-case, strip accents, split."""
    kept = []
    for c in text:
        if c in "\0\ufffd" or (c not in "\t\n\r" and unicodedata.category(c) in ("Cc", "Cf", "Cn", "Co", "Cs")):
            continue
        if _is_space(c):
            kept.append(" ")
        elif _is_cjk(ord(c)):
            kept.append(f" {c} ")
        else:
            kept.append(c)
    lowered = "".join(kept)
    stripped = "".join(c for c in unicodedata.normalize("NFD", lowered) if unicodedata.category(c) != "Mn").lower()
    tokens: list[str] = []
    is_open = False
    for c in stripped:
        if _is_space(c):
            is_open = False
        elif _is_punctuation(c):
            tokens.append(c)
            is_open = False
        else:
            tokens[-1:] = [tokens[-1] + c] if is_open else [*tokens[-1:], c]
            is_open = True
    return tokens


def _is_space(c: str) -> bool:
    return c in "\t\n\r" or c.isspace()


def _is_punctuation(c: str) -> bool:
    is_ascii_sign = c.isascii() and c.isprintable() and not c.isalnum() and c != " "
    return is_ascii_sign or unicodedata.category(c).startswith("P")


def _is_cjk(code: int) -> bool:
    blocks = (
        (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
        (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
    )  # fmt: skip
    return any(first <= code <= last for first, last in blocks)


def word_pieces(token: str, vocabulary: dict[str, int]) -> list[int]:
    """Greedy longest match first."""
    if len(token) > 100:
        return [vocabulary["[UNK]"]]
    pieces, start = [], 0
    while start < len(token):
        for end in range(len(token), start, -1):
            piece = ("##" if start else "") + token[start:end]
            if piece in vocabulary:
                pieces.append(vocabulary[piece])
                start = end
                break
        else:
            return [vocabulary["[UNK]"]]
    return pieces


def raw_features(tokens: Sequence[str], stop_words: Sequence[str], listed: Sequence[str]) -> list[float]:
    """The raw features of one text, from the definitions."""
    words = [t for t in tokens if any(unicodedata.category(c)[0] == "L" or unicodedata.category(c) == "Nd" for c in t)]
    if not words:
        return [0.0] * (7 + len(listed))
    sentences, has_open_word, was_end = 0, False, False
    for token in tokens:
        is_end = token in SENTENCE_ENDS
        if is_end and not was_end:
            sentences += 1
        has_open_word = False if is_end else has_open_word or token in words
        was_end = is_end
    sentences += has_open_word
    stops = sum(word in stop_words for word in words)
    return [
        len(words), len(set(words)), len(tokens) - len(words), sentences, len(words) / sentences, stops,
        stops / sentences, *(words.count(word) / len(words) for word in listed),
    ]  # fmt: skip
