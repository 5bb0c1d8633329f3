"""Answers of an engine (a language model that continues token ids) to one request.

Tokens are chosen and sent until a stop sequence or an end token, until ``max_tokens``, or until the client leaves.

``Answering`` takes new tokens and sends answers. ``Seat`` holds it and a ``Chooser`` for one request, in engines that
compute logits in this process; ``step`` chooses the next tokens of all seats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.errors import ServerError
from shoal.kit.component.streaming import Stream
from shoal.kit.generation.choosing import NOT_FINITE, Chooser, choose
from shoal.kit.generation.contract import Place, TokenRequest, new_stream_id, pack_answer, pack_places


class Answering:
    """Sends the answers of one request, and ends its stream.

    The end token is not sent; the tokens of a stop sequence are, because only their text shows where the answer ends.
    Neither ends the answer within its first ``min_tokens`` tokens. One thread at a time may use this object.
    """

    def __init__(self, request: TokenRequest, stream: Stream) -> None:
        self.request, self.stream = request, stream
        self.ids: list[int] = []  # all new tokens, the end token included
        self._waiting: list[int] = []  # new tokens that are not sent yet
        self._places: list[Place] = []  # their log probabilities, if the request asks for them
        self._total = 0.0
        self._carry = request.carry
        self._stream_id = new_stream_id()
        stream.farewell = pack_answer(
            (), stream_id=self._stream_id, is_last=True, reason="cancelled", dtype=request.dtype
        )

    def add(self, token: int, place: Place | None = None) -> bool:
        """Take the next token; return whether the request needs more tokens.

        ``place`` has its log probabilities, if the request asks for them.
        """
        request, ids = self.request, self.ids
        ids.append(token)
        may_end = len(ids) > request.sampling.min_tokens
        if may_end and token in request.end_ids:
            return self._finish("stop")
        self._waiting.append(token)
        if place is not None:
            self._places.append(place)
        if may_end and any(tuple(ids[-len(stop) :]) == stop for stop in request.stops):
            return self._finish("stop")
        if len(ids) == request.max_tokens:
            return self._finish("length")
        if not request.is_streaming:
            return self.stream.is_open
        return self._send()

    def _finish(self, reason: str) -> bool:
        self._send(is_last=True, reason=reason)
        self.stream.end()
        return False

    def _send(self, *, is_last: bool = False, reason: str = "") -> bool:
        """Send the waiting tokens."""
        carry, self._carry = self._carry, ""
        ids, self._waiting = self._waiting, []
        answer = pack_answer(
            ids, stream_id=self._stream_id, carry=carry, is_last=is_last, reason=reason, dtype=self.request.dtype
        )
        if self.request.returns:
            places, self._places = self._places, []
            self._total += sum(place.chosen for place in places)
            answer |= pack_places(self.request, places, self._total)
        return self.stream.send(answer)


class Seat:
    """State of one request that an engine computes: the choice of its tokens, and its answers."""

    def __init__(self, request: TokenRequest, stream: Stream, chooser: Chooser | None = None) -> None:
        self.request, self.stream = request, stream
        self.is_done = False
        self._answering, self._chooser = Answering(request, stream), chooser or Chooser(request)

    def take(self, token: int, place: Place | None) -> None:
        """Send the next token, with its log probabilities if the request asks for them; -1 is an error.

        An error ends the stream of this request; it is not raised, so the engine goes on with the other requests.
        """
        try:
            if token < 0:
                raise ServerError(*NOT_FINITE)
            self.is_done = not self._answering.add(token, place)
        except Exception as error:
            self.is_done = True
            self.stream.end(error)


def step(logits: Any, seats: Sequence[Seat | None]) -> list[int]:
    """Choose the next token of each seat from ``logits`` [seats, vocabulary], send it, and return it; 0 without one.

    ``logits`` is an array of NumPy or a tensor of torch. A seat whose logits are no numbers ends with an error.
    """
    rows = [None if seat is None else (seat._chooser, seat._answering.ids) for seat in seats]
    try:
        chosen = choose(logits, rows)
    except Exception as error:  # the streams end, and the engine goes on with other requests
        for seat in seats:
            if seat is not None:
                seat.is_done = True
                seat.stream.end(error)
        return [0] * len(seats)
    for seat, (token, place) in zip(seats, chosen, strict=True):
        if seat is not None:
            seat.take(token, place)
    return [max(token, 0) for token, _ in chosen]
