"""Pieces in which the answer of a language model comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """One of the parts in which an answer comes, or a whole answer: its text, and counts of tokens.

    ``finish_reason`` is empty until the answer ends: then it is ``stop`` (a stop string, or the model's end token),
    ``length`` (the greatest number of tokens) or ``cancelled`` (the client asked for the end). ``num_input_tokens``
    counts the tokens of the prompt. ``num_output_tokens`` counts the tokens from the beginning of the answer up to this
    part. If a stop string ends the answer, it counts up to the token that completes the stop string, whatever the
    engine computed; later parts are empty.

    If the request asks for log probabilities, ``cumulative_logprob`` is the sum over these tokens, and ``logprobs`` has
    a dictionary for each token of this part: the chosen token first, then the most probable ones. Its keys are token
    ids as text, its values have ``logprob``, ``rank`` (None for a chosen token that is not one of the most probable
    ones), ``decoded_token``, the token's text, and ``bytes`` if these are not the text's: of a part of a character, or
    with a space before it. Otherwise they are None and empty.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[str, Any]] = ()


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Join the pieces of a stream to its whole answer."""
    logprobs = [place for piece in pieces for place in piece.logprobs]
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), logprobs=logprobs or ())
