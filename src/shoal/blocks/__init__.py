"""Building blocks of configurable components: labels, scores, z-scores."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.blocks.class_labels import Choices as Choices
    from shoal.blocks.class_labels import check_finite as check_finite
    from shoal.blocks.class_labels import check_numbers as check_numbers
    from shoal.blocks.scores import blend as blend
    from shoal.blocks.scores import check_weight as check_weight
    from shoal.blocks.zscores import normalise as normalise
    from shoal.blocks.zscores import read_zscore as read_zscore

__getattr__, __dir__, __all__ = face(__name__, __file__)
