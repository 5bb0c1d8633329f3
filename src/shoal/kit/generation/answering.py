"""Answers of an engine (a language model that continues token ids) to one request.

Tokens are chosen and sent until a stop sequence or an end token, until ``max_tokens``, or until the client leaves.

``Answering`` takes new tokens and sends answers. ``RunningSequence`` holds it and a ``Sampler`` for one request, in
engines that compute logits in this process; ``step`` chooses the next tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.errors import ServerError
from shoal.kit.component.stream import Stream
from shoal.kit.generation.answers import new_stream_id, pack_answer, pack_log_probs
from shoal.kit.generation.contract import LogProbs, TokenRequest
from shoal.kit.generation.guides import COMPLETE, ENDED, GOES_ON
from shoal.kit.generation.sampler import NOT_FINITE, Sampler, choose

MANY = 8  # answers at a time from which on a token waits for the next one: less work for each, in all processes


class Answering:
    """Sends the answers of one request, and ends its stream.

    The end token is not sent; the tokens of a stop sequence are, because only their text shows where the answer ends.
    Neither ends the answer within its first ``min_tokens`` tokens. With ``echo``, the prompt's tokens are sent before
    the first new one. One thread at a time may use this object.
    """

    def __init__(self, request: TokenRequest, stream: Stream) -> None:
        self.request, self.stream = request, stream
        self.ids: list[int] = []  # all new tokens, the end token included
        self._waiting = [*request.ids] if request.sampling.echo else []  # tokens that are not sent yet
        self._log_probs = [*request.prompt_places]  # of these, if the request asks for them
        self._total = 0.0
        self._passthrough = request.passthrough
        self._stream_id = new_stream_id()
        stream.farewell = pack_answer(
            (), stream_id=self._stream_id, is_last=True, reason="cancelled", dtype=request.dtype
        )

    def begin(self, places: Sequence[LogProbs]) -> None:
        """Take the log probabilities of the prompt, of an engine that computes them with the first token."""
        self._log_probs = [*places]

    def add(self, token: int, log_probs: LogProbs | None = None, *, beside: int = 1, guided: str = GOES_ON) -> bool:
        """Take the next token; return whether the request needs more tokens.

        ``log_probs`` has its log probabilities, if the request asks for them. ``beside`` is the number of answers that
        the engine works on: from ``MANY`` on, every second token is sent with the next one, but never the first.
        ``guided`` says whether the request's guide, if it has one, ends with this token, whatever other settings say.
        """
        request, ids = self.request, self.ids
        ids.append(token)
        may_end = len(ids) > request.sampling.min_tokens
        if guided == ENDED if request.guide is not None else may_end and token in request.end_ids:
            return self._finish("stop")
        self._waiting.append(token)
        if log_probs is not None:
            self._log_probs.append(log_probs)
            self._total += log_probs.chosen
        if guided == COMPLETE or (may_end and any(tuple(ids[-len(stop) :]) == stop for stop in request.stops)):
            return self._finish("stop")
        if len(ids) == request.max_tokens:
            return self._finish("length")
        if not request.is_streaming or (beside >= MANY and len(ids) % 2 == 0):
            return self.stream.is_open
        return self._send()

    def _finish(self, reason: str) -> bool:
        self._send(is_last=True, reason=reason)
        self.stream.end()
        return False

    def _send(self, *, is_last: bool = False, reason: str = "") -> bool:
        """Send the waiting tokens."""
        passthrough, self._passthrough = self._passthrough, ""
        ids, self._waiting = self._waiting, []
        answer = pack_answer(
            ids,
            stream_id=self._stream_id,
            passthrough=passthrough,
            is_last=is_last,
            reason=reason,
            dtype=self.request.dtype,
        )
        if self.request.returns:
            log_probs, self._log_probs = self._log_probs, []
            answer |= pack_log_probs(self.request, log_probs, self._total)
        return self.stream.send(answer)


class RunningSequence:
    """State of one request that an engine computes: the choice of its tokens, and its answers."""

    def __init__(self, request: TokenRequest, stream: Stream, sampler: Sampler | None = None) -> None:
        self.request, self.stream = request, stream
        self.is_done = False
        self._answering, self._sampler = Answering(request, stream), sampler or Sampler(request)

    def take(self, token: int, log_probs: LogProbs | None, *, beside: int) -> None:
        """Send the next token, with its log probabilities if the request asks for them; -1 is an error.

        An error ends the stream of this request; it is not raised, so the engine goes on with the other requests.
        """
        try:
            follower = self.request.follower
            if token < 0:
                raise ServerError(*NOT_FINITE) if follower is None else follower.explain()
            guided = GOES_ON if follower is None else follower.take(token)
            self.is_done = not self._answering.add(token, log_probs, beside=beside, guided=guided)
        except Exception as error:
            self.is_done = True
            self.stream.end(error)


def step(logits: Any, sequences: Sequence[RunningSequence | None]) -> list[int]:
    """Choose each sequence's next token from ``logits`` [sequences, vocabulary], send it, and return it; 0 without one.

    ``logits`` is an array of NumPy or a tensor of torch. A sequence whose logits are no numbers ends with an error.
    """
    rows = [None if sequence is None else (sequence._sampler, sequence._answering.ids) for sequence in sequences]
    try:
        chosen = choose(logits, rows)
    except Exception as error:  # the streams end, and the engine goes on with other requests
        for sequence in sequences:
            if sequence is not None:
                sequence.is_done = True
                sequence.stream.end(error)
        return [0] * len(sequences)
    beside = len(sequences) - sequences.count(None)
    for sequence, (token, log_probs) in zip(sequences, chosen, strict=True):
        if sequence is not None:
            sequence.take(token, log_probs, beside=beside)
    return [max(token, 0) for token, _ in chosen]
