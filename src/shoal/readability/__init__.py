"""Readability application: trains, evaluates and serves models that score how hard a passage is to read."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.readability.preprocess_config import Bundle as Bundle
    from shoal.readability.preprocess_config import read_weight as read_weight
    from shoal.readability.reader import make_reader as make_reader

__getattr__, __dir__, __all__ = face(__name__, __file__)
