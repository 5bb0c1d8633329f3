"""WordPiece tokenizer whose ids and attention mask equal those of Hugging Face's ``BertTokenizer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

import numpy as np
from array_api_compat import device as device_of

from shoal.component.artifact_files import MAKE_AGAIN, describe_bytes, find_repeated, read_text, refusal
from shoal.component.tensors import Array, namespace
from shoal.errors import ArtifactError
from shoal.text.ragged import Ragged, Texts
from shoal.text.word_cache import WordCache, flatten

CLS, SEP, PAD, UNK, MASK = SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
MAX_WORD_CHARS = 100  # BERT's max_input_chars_per_word: longer words are [UNK]
LENGTHS = range(3, 65_537)  # [CLS], a token and [SEP]; texts of more than 65,536 bytes are refused
WIDTH_MULTIPLE = 8  # widths in steps: at most 32 shapes up to 256 tokens, each compiled once by the encoder


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens that frame and pad a row."""

    cls: int
    sep: int
    pad: int


def read_vocabulary(path: Path) -> list[str]:
    """Read the tokens of a ``vocab.txt``, in the order of their ids.

    Raises:
        ArtifactError: it is not such a file, a special token is missing, a line is blank, or a token is repeated.
    """
    text = read_text(path, "vocabulary")
    if what := describe_bytes(text[:32].encode()):
        raise refusal(path, "vocabulary", what)
    vocabulary = text.split("\n")
    if vocabulary[-1] == "":
        vocabulary.pop()
    fault = ""
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        fault = f"lacks {', '.join(missing)}"
    elif blank := [number for number, token in enumerate(vocabulary, 1) if not token.strip(" \t\0")]:
        fault = f"has a blank line, number {blank[0]:,}"
    elif repeated := find_repeated(vocabulary):
        fault = f"holds a token twice: {shorten(repeated)}"
    if fault:
        raise ArtifactError(f"{path} {fault}.", f"Take vocab.txt from the encoder's own tokenizer. {MAKE_AGAIN}")
    return vocabulary


def round_up(longest: Any) -> Any:
    """Return the width, in steps of 8, for ``longest`` pieces, ``[CLS]`` and ``[SEP]``; takes ints or arrays."""
    return -(-(longest + 2) // WIDTH_MULTIPLE)


def frame(pieces: Ragged, ids: SpecialIds, width: int) -> tuple[Array, Array]:
    """Put ``[CLS]`` and ``[SEP]`` around each row, cut or padded to ``width`` tokens.

    ``pieces`` holds INT64 token ids. Returns ids and mask, INT64 ``[rows, width]``.
    """
    if isinstance(pieces.values, np.ndarray):
        return _frame_here(pieces, ids, width)
    xp = namespace(pieces.values)
    lengths = xp.minimum(pieces.lengths, width - 2)
    position = xp.arange(width, dtype=xp.int64, device=device_of(pieces.values))[None, :]
    last = lengths[:, None] + 1
    body = pieces.pad(width, ids.pad)
    shifted = xp.concat([xp.full_like(body[:, :1], ids.cls), body[:, :-1]], axis=1)
    pad, sep = (xp.full_like(body[:1, :1], token) for token in (ids.pad, ids.sep))
    framed = xp.where(position < last, shifted, xp.where(position == last, sep, pad))
    return framed, xp.astype(position <= last, xp.int64)


def _frame_here(pieces: Ragged, ids: SpecialIds, width: int) -> tuple[Array, Array]:
    """``frame`` on the host, where arrays may be written in place."""
    columns, last = np.arange(width), np.minimum(pieces.lengths, width - 2) + 1
    is_token = columns <= last[:, None]
    # The first column and the columns after a row's last piece read values of other rows; they are overwritten below.
    padded = np.concatenate([pieces.values, [ids.pad]])
    framed = padded.take((pieces.offsets[:-1, None] - 1) + columns, mode="clip")
    framed[~is_token] = ids.pad
    framed[:, 0] = ids.cls
    framed[np.arange(len(last)), last] = ids.sep
    return framed, is_token.astype(np.int64)


class WordPiece:
    """BERT's basic tokenization and WordPiece over a vocabulary.

    It runs on the host. ``max_length`` counts ``[CLS]`` and ``[SEP]``.
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        *,
        is_lowercase: bool = True,
        max_length: int = 256,
    ) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        vocab = {token: index for index, token in enumerate(vocabulary)}
        model = models.WordPiece(vocab, unk_token=UNK, max_input_chars_per_word=MAX_WORD_CHARS)
        self._tokenizer = Tokenizer(model)
        # strip_accents follows lowercase where it is not given, as in the published BERT models
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lowercase)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        self.ids = SpecialIds(vocab[CLS], vocab[SEP], vocab[PAD])
        self.max_length = max_length
        self._words = WordCache(lambda: self.find)

    def encode(self, texts: Texts) -> tuple[Array, Array]:
        """Token ids and attention mask of ``texts``: INT64 ``[len(texts), width]`` each.

        The width is that of the longest row, a multiple of 8 unless ``max_length`` is smaller.
        """
        pieces = self.pieces(texts)
        return self.frame(pieces, self.width(pieces))

    def pieces(self, texts: Texts) -> Ragged:
        """Return the token ids of each text, without special tokens and not truncated."""
        return Ragged.from_rows(flatten(self._words(texts)))

    def width(self, pieces: Ragged) -> int:
        """Return the padded width that ``encode`` uses for these pieces, which are on the host."""
        steps = round_up(min(int(pieces.lengths.max()), self.max_length - 2))
        return min(self.max_length, int(steps) * WIDTH_MULTIPLE)

    def frame(self, pieces: Ragged, width: int) -> tuple[Array, Array]:
        """Return ids and mask of pieces, on their device: INT64 ``[rows, width]`` each."""
        return frame(pieces, self.ids, width)

    def find(self, words: list[str]) -> list[list[int]]:
        """Return the token ids of each word."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(words, add_special_tokens=False)]
