"""Language models: prompts, chat templates, requests of token ids, sampling, weights, and token ids back to text."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.generation.chats import llama2 as llama2
    from shoal.generation.chats import read_messages as read_messages
    from shoal.generation.completions import Completions as Completions
    from shoal.generation.completions import RowTexts as RowTexts
    from shoal.generation.completions import StopCutter as StopCutter
    from shoal.generation.completions import TextStream as TextStream
    from shoal.generation.contract import Limits as Limits
    from shoal.generation.contract import TokenRequest as TokenRequest
    from shoal.generation.contract import pack_answer as pack_answer
    from shoal.generation.contract import read_streaming as read_streaming
    from shoal.generation.detokenizer import Detokenizer as Detokenizer
    from shoal.generation.prompts import Prompts as Prompts
    from shoal.generation.prompts import rows as rows
    from shoal.generation.prompts import stack as stack
    from shoal.generation.sampling import Sampling as Sampling
    from shoal.generation.templates import ChatTemplate as ChatTemplate
    from shoal.generation.trtllm import Postprocessing as Postprocessing
    from shoal.generation.trtllm import Preprocessing as Preprocessing
    from shoal.generation.weights import Weights as Weights
    from shoal.generation.weights import find_weights as find_weights
    from shoal.pieces import Piece as Piece
    from shoal.pieces import join_pieces as join_pieces

__getattr__, __dir__, __all__ = face(__name__, __file__)
