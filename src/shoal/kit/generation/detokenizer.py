"""Detokenizer for tokens that come one by one, in constant time per token; the text is as if all were decoded at once.

A decoder of Hugging Face's `tokenizers` is a sequence of steps over a list of tokens. Here each step is a function that
takes new tokens, keeps the state that it needs, and returns the tokens that later ones cannot change. A kind of
tokenizer is a combination of steps: byte-level BPE has one step, SentencePiece with byte fallback three, WordPiece one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MOST_PEEKED = 256  # bytes or tokens
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# Byte-level BPE writes each byte as one printable character; the other bytes are characters from 256 on, in order.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}

Step = Callable[[list[str], bool], list[str]]  # new tokens, and whether they are the last ones -> tokens that are final


class Detokenizer:
    """Converts the token ids of one stream to text, piece by piece.

    Joined, the pieces are the text of ``tokenizer.decode(ids, skip_special_tokens=True)`` for all ids. A character is
    returned when its last byte is there. SentencePiece's byte tokens (``<0x0A>``) are returned with the next token that
    is not a byte token: if a run of them is not UTF-8, ``decode`` replaces every byte of the run.

    This holds for byte-level, SentencePiece and WordPiece decoders. With any other decoder, the whole text is returned
    with the last ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, keeps_specials: bool = False) -> None:
        """Take the tokenizer, which must not change from now on. Many detokenizers may share it.

        With ``keeps_specials``, the text is that with ``skip_special_tokens=False``, and the tokenizer has all ids.
        """
        self._tokenizer, self._keeps_specials = tokenizer, keeps_specials
        self._steps = _find_steps(tokenizer)
        self._holder = next((step for step in self._steps if isinstance(step, _ByteFallback | _AtEnd)), None)
        self._specials = {} if keeps_specials else find_specials(tokenizer)

    def step(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Take any number of next ids; return the text that is complete.

        Special tokens and ids beyond the vocabulary are skipped. With ``last`` nothing is held back: an incomplete
        character becomes U+FFFD, as in ``tokenizer.decode``.

        Raises:
            InputError: an id is negative, or unknown to a tokenizer that has all ids; nothing of ``ids`` was taken.
        """
        if min(ids, default=0) < 0:
            raise InputError(f"A token id is {min(ids)}.", "Send ids from 0, without padding.")
        found = [*map(self._tokenizer.id_to_token, ids)]
        if self._keeps_specials and None in found:
            raise InputError(f"The tokenizer has no token {ids[found.index(None)]}.", "Send ids that it has.")
        tokens = [token for token in found if token is not None and token not in self._specials]
        for step in self._steps:
            tokens = step(tokens, last)
        return "".join(tokens)

    def peek(self) -> str:
        """Return the complete text that is held back only because later tokens could still change it.

        It is empty if more than 256 bytes, or tokens, are held back, because each further token decodes all of them
        again.
        """
        if self._holder is None or not 0 < len(self._holder.held) <= _MOST_PEEKED:
            return ""
        tokens: list[str] = []
        for step in self._steps:
            tokens = copy(step)(tokens, True)
        return "".join(tokens).rstrip(UNKNOWN)


@lru_cache(maxsize=8)  # tokenizers; some have a thousand added tokens, and each stream has a detokenizer
def find_specials(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, by name."""
    return {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def spell(tokenizer: Tokenizer, number: int, *, is_first: bool) -> bytes:
    """Return the bytes of a token, which may be a part of a character; ``is_first``: at the beginning of a text.

    The bytes of all tokens, joined, are the text in UTF-8, unless the decoder is one that reads the whole text.
    """
    token = tokenizer.id_to_token(number) or ""
    steps = _find_steps(tokenizer)
    if token in find_specials(tokenizer):
        return token.encode()
    if any(isinstance(step, _ByteLevel) for step in steps):
        return _to_bytes(token)
    if (found := _BYTE.fullmatch(token)) and any(isinstance(step, _ByteFallback) for step in steps):
        return bytes.fromhex(found[1])
    before = "" if is_first else "x"
    tokens = [*before, token]
    for step in steps:
        tokens = step(tokens, True)
    return "".join(tokens).removeprefix(before).encode()


def _find_steps(tokenizer: Tokenizer) -> list[Step]:
    decoder = tokenizer.decoder
    if decoder is None:
        return [_ByPlace(str, " {}".format)]
    return _make_steps(json.loads(decoder.__getstate__())) or [_AtEnd(decoder.decode)]


def _make_steps(decoder: Mapping[str, Any]) -> list[Step]:
    """Return the steps of ``decoder``, an object as in tokenizer.json; an empty list if one of its parts is unknown.

    ``Fuse`` and ``ByteLevel`` join all tokens to one. After them, only stripping the front of the text is supported.
    """
    steps: list[Step] = []
    is_one = False
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        match part:
            case {"type": "Fuse"}:
                is_one = True
            case {"type": "Strip", "content": content, "start": start, "stop": 0} if is_one:
                steps.append(_StripFront(content, start))
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not is_one:
                steps.append(_make_replace(pattern, content))
            case {"type": "ByteFallback"} if not is_one:
                steps.append(_ByteFallback())
            case {"type": "ByteLevel"} if not is_one:
                steps.append(_ByteLevel())
                is_one = True
            case {"type": "Metaspace", "replacement": sign, "prepend_scheme": scheme} if not is_one:
                steps.append(_make_metaspace(sign, scheme))
            case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup} if not is_one:
                steps.append(_make_wordpiece(prefix, cleanup))
            case _:
                return []
    return steps


class _ByPlace:
    """Step that converts each token by itself: a stream's first token with ``first``, the others with ``later``."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._next, self._later = first, later

    def __call__(self, tokens: list[str], _: bool) -> list[str]:
        texts = []
        for token in tokens:
            texts.append(self._next(token))
            self._next = self._later
        return texts


def _make_replace(pattern: str, content: str) -> Step:
    return lambda tokens, last: [token.replace(pattern, content) for token in tokens]


def _make_metaspace(sign: str, scheme: str) -> Step:
    return _ByPlace(
        lambda token: token.replace(sign, " " if scheme == "never" else ""), lambda token: token.replace(sign, " ")
    )


def _make_wordpiece(prefix: str, cleanup: bool) -> Step:
    from tokenizers import decoders

    decode = decoders.WordPiece(prefix=prefix, cleanup=cleanup).decode  # it looks at tokens one by one
    return _ByPlace(lambda token: decode([token]), lambda token: decode(["", token]))


class _StripFront:
    """Step that removes up to ``count`` characters ``content`` from the front of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    def __call__(self, tokens: list[str], _: bool) -> list[str]:
        text = "".join(tokens)
        while self._count and text:
            if text.startswith(self._content):
                text, self._count = text[1:], self._count - 1
            else:
                self._count = 0
        return [text]


class _ByteFallback:
    """Step that joins runs of byte tokens to characters; each byte of a run that is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self.held = bytearray()

    def __call__(self, tokens: list[str], last: bool) -> list[str]:
        texts: list[str] = []
        for token in tokens:
            if found := _BYTE.fullmatch(token):
                self.held.append(int(found[1], 16))
            else:
                texts += [*self._end_run(), token]
        return [*texts, *self._end_run()] if last else texts

    def _end_run(self) -> list[str]:
        run, self.held = self.held, bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [UNKNOWN] * len(run)


class _ByteLevel:
    """Step that converts each character of a token to a byte, and the bytes to text."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __call__(self, tokens: list[str], last: bool) -> list[str]:
        return [self._decode(b"".join(map(_to_bytes, tokens)), last)]


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # an added token, which is written as it is
        return token.encode()


class _AtEnd:
    """Step for any other decoder: keeps all tokens, and decodes them together with the last tokens."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self.held: list[str] = []

    def __call__(self, tokens: list[str], last: bool) -> list[str]:
        self.held += tokens
        if not last:
            return []
        held, self.held = self.held, []
        return [self._decode(held)]
