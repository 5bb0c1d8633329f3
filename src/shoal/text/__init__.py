"""Text processing: tokenization and word counts, on the host and on a GPU."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.text.tokens import WordPiece as WordPiece
    from shoal.text.tokens import check_texts as check_texts
    from shoal.text.tokens import decode_texts as decode_texts
    from shoal.text.tokens import make_encoder as make_encoder
    from shoal.text.tokens import read_vocabulary as read_vocabulary
    from shoal.text.words import VALUES as VALUES
    from shoal.text.words import WordCounts as WordCounts
    from shoal.text.words import read_words as read_words

__getattr__, __dir__, __all__ = face(__name__, __file__)
