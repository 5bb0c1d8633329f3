"""Answers to one token request: new tokens in, answers out, until a stop, the length, or the client's leaving."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.component import Stream
from shoal.generation.contract import TokenRequest, new_stream_id, pack_answer


class Answering:
    """The answers of one request: sends tokens that cannot be part of a stop sequence, and ends the stream.

    Tokens that may begin a stop sequence are held back until the next ones decide. Neither the end token nor a stop
    sequence is sent, and neither ends the answer before it has ``min_tokens`` tokens. Calls come from one thread at a
    time.
    """

    def __init__(self, request: TokenRequest, stream: Stream) -> None:
        self.request, self.stream = request, stream
        self.ids: list[int] = []  # all new tokens, stops included
        self._held: list[int] = []  # of these, those not sent
        self._carry = request.carry
        self._stream_id = new_stream_id()

    def add(self, token: int) -> bool:
        """Take the next token; returns whether more are wanted."""
        request, held = self.request, self._held
        self.ids.append(token)
        if token in request.end_ids and len(self.ids) > request.sampling.min_tokens:
            return self._finish("stop")
        held.append(token)
        if stopped := max(map(self._stop_length, request.stops), default=0):
            del held[-stopped:]
            return self._finish("stop")
        if len(self.ids) == request.max_tokens:
            return self._finish("length")
        ready = len(held) - max((_overlap(held, stop) for stop in request.stops), default=0)
        if not request.is_streaming or not ready:
            return self.stream.is_open
        sent, self._held = held[:ready], held[ready:]
        return self._send(sent)

    def _stop_length(self, stop: tuple[int, ...]) -> int:
        """Return the length of a stop sequence if the answer ends with it and may end before it."""
        is_over = len(self.ids) >= len(stop) + self.request.sampling.min_tokens
        return len(stop) if is_over and tuple(self._held[-len(stop) :]) == stop else 0

    def _finish(self, reason: str) -> bool:
        self._send(self._held, is_last=True, reason=reason)
        self.stream.end()
        return False

    def _send(self, ids: Sequence[int], *, is_last: bool = False, reason: str = "") -> bool:
        carry, self._carry = self._carry, ""
        return self.stream.send(
            pack_answer(ids, stream_id=self._stream_id, carry=carry, is_last=is_last, reason=reason)
        )


def _overlap(held: list[int], stop: tuple[int, ...]) -> int:
    """Return the length of the longest end of ``held`` that begins ``stop``, without being all of it."""
    longest = min(len(held), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if tuple(held[-size:]) == stop[:size]), 0)
