"""BERT-family encoders: loading, export, and length bucketing."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.encoders.encoder import Trunked as Trunked
    from shoal.encoders.export import export_encoder as export_encoder
    from shoal.encoders.length_bucketing import find_mask as find_mask
    from shoal.encoders.length_bucketing import run_by_length as run_by_length
    from shoal.encoders.packaged import SMALL_ENCODER as SMALL_ENCODER

__getattr__, __dir__, __all__ = face(__name__, __file__)
