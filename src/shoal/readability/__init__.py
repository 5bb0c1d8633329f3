"""The first application: how hard a passage is to read, from corpus and training to served scores."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.readability.preprocess_config import Bundle as Bundle
    from shoal.readability.preprocess_config import read_weight as read_weight
    from shoal.readability.reader import make_reader as make_reader

HOMES = {
    "Bundle": "shoal.readability.preprocess_config",
    "make_reader": "shoal.readability.reader",
    "read_weight": "shoal.readability.preprocess_config",
}
__all__ = [*HOMES]
__getattr__, __dir__ = face(__name__, HOMES)
