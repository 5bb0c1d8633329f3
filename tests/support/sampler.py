"""Choice of tokens row by row in NumPy: the reference of ``shoal.kit.generation.sampler``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.kit.generation.contract import TokenRequest


class Reference:
    """Chooses the tokens of one request as transformers' ``generate`` does, but with its own random numbers.

    The settings are applied in the same order as in ``generate``. The n-th token is drawn with the n-th random number
    of the request's seed, so other requests in the batch influence the token only by the rounding of its logits.
    ``generate`` has no frequency and presence penalties: they are those of OpenAI and vLLM, over the new tokens.
    """

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
            order = large[shares[large].argsort(kind="stable")]
            is_kept = rest + shares[order].cumsum() > 1 - sampling.top_p
            is_kept[-1] = True
            tokens = tokens[np.sort(order[is_kept])]
        return tokens, scores[tokens]


def _softmax(scores: NDArray[Any]) -> NDArray[Any]:
    powers = np.exp(scores.astype(np.float64) - scores.max())
    return np.asarray(powers / powers.sum())
