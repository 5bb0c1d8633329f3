"""How often the words of any list stand in texts, with or without the seven statistics of ``features``.

The host turns texts into codes, which go up as one copy where the component is on a GPU, and array code counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shorten

from shoal.component.artifact_files import find_repeated, read_text, refusal
from shoal.component.tensors import Array, Device, namespace
from shoal.text.lexicon import BasicTokenizer, Lexicon
from shoal.text.ragged import Texts
from shoal.text.word_statistics import NUM_STATISTICS, TokenCoder, count_tokens

VALUES = ("count", "share", "presence")
_KIND = "list of words"


def read_words(path: Path) -> tuple[str, ...]:
    """The words of a text file, one a line.

    Raises:
        ArtifactError: it is no such file, or a word stands there twice, or could never be found in a text: texts are
            read as basic tokens, in lower case and without accents.
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
    """Texts to the counts of listed words, as one of ``VALUES`` has them; ``edge`` names the upload to a GPU.

    A *share* is that of the text's words, 0 where it has none; *presence* is 1 or 0.
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
        self._encode = TokenCoder(Lexicon.build(stop_words, words, Device()))
        self._lexicon, self._device, self._edge = Lexicon.build(stop_words, words, device), device, edge
        self.num_columns = len(words) + (NUM_STATISTICS if has_statistics else 0)

    def __call__(self, texts: Texts) -> Array:
        """FP32 ``[rows, columns]`` of texts on the host; statistics come first, all 0 in a text without a word."""
        statistics, counts = count_tokens(self._encode(texts).to(self._device, self._edge), self._lexicon)
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
