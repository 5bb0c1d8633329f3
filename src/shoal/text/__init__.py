"""Text processing on arrays: tokenization and word counts, on the host and on a GPU."""

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

__getattr__, __dir__, __all__ = face(__name__, __file__)
