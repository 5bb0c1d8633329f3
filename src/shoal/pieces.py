"""Pieces in which the answer of a language model comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """One of the parts in which an answer comes, or a whole answer: its text, and counts of tokens.

    ``finish_reason`` is empty until the answer ends: then it is ``stop`` (a stop string, or the model's end token),
    ``length`` (the greatest number of tokens) or ``cancelled`` (the client asked for the end). ``num_input_tokens``
    counts the tokens of the prompt. ``num_output_tokens`` counts the tokens from the beginning of the answer up to this
    part. If a stop string ends the answer, it counts up to the token that completes the stop string, whatever the
    engine computed; later parts are empty.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Join the pieces of a stream to its whole answer."""
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces))
