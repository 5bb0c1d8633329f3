"""Texts as arrays: words, tokens and counts of them, on the host and on a GPU."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.text.ragged import Ragged as Ragged
    from shoal.text.ragged import Texts as Texts
    from shoal.text.ragged import check_texts as check_texts
    from shoal.text.tokens import make_encoder as make_encoder
    from shoal.text.word_counts import VALUES as VALUES
    from shoal.text.word_counts import WordCounts as WordCounts
    from shoal.text.word_counts import read_words as read_words
    from shoal.text.wordpiece import WordPiece as WordPiece
    from shoal.text.wordpiece import read_vocabulary as read_vocabulary

HOMES = {
    "check_texts": "shoal.text.ragged",
    "make_encoder": "shoal.text.tokens",
    "Ragged": "shoal.text.ragged",
    "read_vocabulary": "shoal.text.wordpiece",
    "read_words": "shoal.text.word_counts",
    "Texts": "shoal.text.ragged",
    "VALUES": "shoal.text.word_counts",
    "WordCounts": "shoal.text.word_counts",
    "WordPiece": "shoal.text.wordpiece",
}
__all__ = [*HOMES]
__getattr__, __dir__ = face(__name__, HOMES)
