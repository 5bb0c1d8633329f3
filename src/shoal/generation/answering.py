"""Answers of an engine (a language model that continues token ids) to one request.

Tokens are chosen and sent until a stop sequence or an end token, until ``max_tokens``, or until the client leaves.

``Answering`` takes new tokens and sends answers. ``Chooser`` chooses a token from a row of logits, in NumPy. ``Seat``
holds both of them for one request, in engines that compute logits in this process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.component import Stream
from shoal.generation.contract import Place, TokenRequest, new_stream_id, pack_answer, pack_places


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


class Chooser:
    """Chooses the tokens of one request as transformers' ``generate`` does, but with its own random numbers.

    The settings are applied in the same order as in ``generate``. The n-th token is drawn with the n-th random number
    of the request's seed, so other requests in the batch influence the token only by the rounding of its logits.
    ``generate`` has no frequency and presence penalties: they are those of OpenAI and vLLM, over the new tokens.
    """

    SETTINGS = frozenset({  # those that this module applies
        "temperature", "top_k", "top_p", "repetition_penalty", "seed", "min_tokens", "frequency_penalty",
        "presence_penalty", "top_logprobs",
    })  # fmt: skip

    def __init__(self, request: TokenRequest) -> None:
        self._request, self._sampling = request, request.sampling
        self._random = np.random.default_rng(request.sampling.seed)
        # As in transformers, a ban on an end token does not count.
        self._bans = [word for word in request.bans if len(word) > 1 or word[0] not in request.end_ids]
        self._biased = [token for token, _ in request.bias]
        self._bias = np.array([weight for _, weight in request.bias], np.float32)

    def choose(self, logits: NDArray[Any], ids: list[int]) -> int:
        """Return the token that follows ``ids``, the new tokens so far; ``logits`` is FP32 [vocabulary]."""
        scores = self._adjust(logits, ids)
        if self._sampling.is_greedy:
            return int(scores.argmax())
        tokens, scores = self._narrow(scores)
        ends = _softmax(scores).cumsum()
        place = np.searchsorted(ends, self._random.random() * ends[-1], side="right")
        return int(tokens[min(place, len(tokens) - 1)])

    def _adjust(self, logits: NDArray[Any], ids: list[int]) -> NDArray[Any]:
        """Apply the bias, then the penalties, the banned words and ``min_tokens`` to the logits."""
        sampling, ends = self._sampling, self._request.end_ids
        is_early = bool(ends) and len(ids) < sampling.min_tokens
        is_penalized = bool(sampling.frequency_penalty or sampling.presence_penalty)
        if sampling.repetition_penalty == 1 and not (is_penalized or self._bans or self._biased or is_early):
            return logits
        scores = logits.copy()
        scores[self._biased] += self._bias
        seen = [*self._request.ids, *ids]
        if sampling.repetition_penalty != 1:
            found = scores[seen]
            penalty = sampling.repetition_penalty
            scores[seen] = np.where(found < 0, found * penalty, found / penalty)
        if is_penalized and ids:
            tokens, counts = np.unique(ids, return_counts=True)
            scores[tokens] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
            scores[tokens] -= np.float32(sampling.presence_penalty)
        for *begin, last in self._bans:
            if seen[len(seen) - len(begin) :] == begin:
                scores[last] = -np.inf
        if is_early:
            scores[list(ends)] = -np.inf
        return scores

    def _narrow(self, scores: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the tokens that ``top_k`` and ``top_p`` allow, ascending, and their scores divided by temperature."""
        sampling = self._sampling
        scores = scores / np.float32(sampling.temperature)
        tokens = np.arange(len(scores))
        if 0 < sampling.top_k < len(scores):
            least = np.partition(scores, -sampling.top_k)[-sampling.top_k]
            tokens = np.flatnonzero(scores >= least)
        if sampling.top_p < 1:
            shares = _softmax(scores[tokens])
            # Tokens below this share have 1 - top_p together at most: they are dropped without being sorted.
            cut = (1 - sampling.top_p) / len(shares)
            rest = shares[shares < cut].sum()
            large = np.flatnonzero(shares >= cut)
            order = large[shares[large].argsort()]
            is_kept = rest + shares[order].cumsum() > 1 - sampling.top_p
            is_kept[-1] = True
            tokens = tokens[np.sort(order[is_kept])]
        return tokens, scores[tokens]


def _softmax(scores: NDArray[Any]) -> NDArray[Any]:
    powers = np.exp(scores.astype(np.float64) - scores.max())
    return np.asarray(powers / powers.sum())


def read_logits(logits: NDArray[Any], token: int, number: int) -> Place:
    """Return the log probabilities of ``token`` and of the ``number`` most probable tokens.

    ``logits`` is FP32 [vocabulary], as the model gave it. Of equally probable tokens, the least id comes first.
    """
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    if not number:
        return Place(float(scores[token]))
    able = np.flatnonzero(scores >= np.partition(scores, -number)[-number])
    top = able[np.argsort(-scores[able], kind="stable")][:number]
    return Place(float(scores[token]), top.tolist(), scores[top].tolist())


class Seat:
    """State of one request that an engine computes: the choice of its tokens, and its answers."""

    def __init__(self, request: TokenRequest, stream: Stream, chooser: Chooser | None = None) -> None:
        self.request, self.stream = request, stream
        self.is_done = False
        self._answering, self._chooser = Answering(request, stream), chooser or Chooser(request)

    def step(self, logits: NDArray[Any]) -> int:
        """Choose the next token from ``logits``, FP32 [vocabulary], send it, and return it.

        An error ends the stream of this request; it is not raised, so the engine goes on with the other requests.
        """
        try:
            token = self._chooser.choose(logits, self._answering.ids)
            number = self.request.sampling.top_logprobs
            place = read_logits(logits, token, number) if self.request.returns else None
            self.is_done = not self._answering.add(token, place)
        except Exception as error:
            self.is_done = True
            self.stream.end(error)
            return 0
        return token
