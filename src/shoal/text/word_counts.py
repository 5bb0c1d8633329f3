"""Counts of listed words in texts, with or without the seven statistics of ``word_statistics``.

The host turns texts into codes. For a GPU they are uploaded in one copy and counted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shorten

from shoal.component.artifact_files import find_repeated, read_text, refusal
from shoal.component.tensors import Array, Device, namespace
from shoal.text.lexicon import BasicTokenizer, Lexicon
from shoal.text.ragged import Ragged, Texts
from shoal.text.word_statistics import NUM_STATISTICS, TokenCoder, TokenCounter, count_tokens

VALUES = ("count", "share", "presence")
_KIND = "list of words"


def read_words(path: Path) -> tuple[str, ...]:
    """Read the words of a text file, one per line.

    Raises:
        ArtifactError: it is not such a file, a word is repeated, or a word can never occur in a text: texts are read
            as basic tokens, in lower case and without accents.
    """
    words, tokenize = read_text(path, _KIND).removesuffix("\n").split("\n"), BasicTokenizer()
    for number, word in enumerate(words, 1):
        if not word.strip():
            raise refusal(path, _KIND, f"line {number:,} is blank")
        if (tokens := tokenize(word)) != [word]:
            raise refusal(path, _KIND, f"line {number:,} is {shorten(word)}, which texts hold as {shorten(tokens)}")
    if repeated := find_repeated(words):
        raise refusal(path, _KIND, f"it holds {shorten(repeated)} twice")
    return tuple(words)


class WordCounts:
    """Counter of listed words in texts; ``value`` is one of ``VALUES``, and ``edge`` names the upload to a GPU.

    A *share* is the count divided by the text's number of words, 0 if it has none; *presence* is 1 or 0.
    """

    def __init__(
        self,
        words: Sequence[str],
        stop_words: Sequence[str],
        device: Device,
        *,
        value: str = "count",
        has_statistics: bool = False,
        edge: str,
    ) -> None:
        self._value, self._has_statistics = value, has_statistics
        here = Lexicon.build(stop_words, words, Device())
        self._encode, self._count = TokenCoder(here), TokenCounter(here)
        self._there = None if device.is_host else Lexicon.build(stop_words, words, device)
        self._device, self._edge = device, edge
        self.num_columns = len(words) + (NUM_STATISTICS if has_statistics else 0)

    def __call__(self, texts: Texts) -> Array:
        """Return FP32 ``[rows, columns]`` for texts on the host; statistics first, all 0 in a text without a word."""
        rows = self._encode(texts)
        if self._there is None:
            statistics, counts = self._count(rows)
        else:
            statistics, counts = count_tokens(Ragged.from_rows(rows).to(self._device, self._edge), self._there)
        xp, words = namespace(counts), statistics[:, :1]
        if self._value == "share":
            counts = counts / xp.maximum(words, 1.0) * (words > 0)
        elif self._value == "presence":
            counts = counts > 0
        values = xp.astype(counts, xp.float32)
        if not self._has_statistics:
            return values
        first = xp.where(words > 0, statistics, xp.zeros_like(statistics))
        return xp.concat([xp.astype(first, xp.float32), values], axis=1)
