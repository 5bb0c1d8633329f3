"""Clients of language models: text in, text out, whole or in pieces."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.llm.client import AsyncLlm as AsyncLlm
    from shoal.llm.client import Llm as Llm
    from shoal.pieces import Piece as Piece

__getattr__, __dir__, __all__ = face(__name__, __file__)
