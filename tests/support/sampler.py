"""Choice of tokens row by row in NumPy: the reference of ``shoal.kit.generation.sampler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.kit.generation.contract import TokenRequest
from shoal.kit.generation.sampler import Sampler, choose
from shoal.kit.generation.sampling import Sampling
from tests.conftest import Scale


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


Put = Callable[[NDArray[np.float32]], Any]  # returns logits as an engine has them
PROMPT = (5, 9, 9, 40, 7)


def take(sampler: Sampler, logits: NDArray[np.float32], ids: list[int]) -> int:
    """Choose the token of one row, with the sampler's next random number."""
    return choose(logits[None], [(sampler, ids)])[0][0]


def draw_request(generator: np.random.Generator, size: int) -> TokenRequest:
    """Draw the settings of a request for a vocabulary of ``size`` tokens."""
    pick: Any = generator.choice
    sampling = Sampling(
        float(pick([0, 0.001, 0.5, 0.8, 1, 1.5, 10])), int(pick([0, 0, 1, 2, 50, size, size + 5])),
        float(pick([1, 1, 0.9, 0.5, 0.01, 0.999])), float(pick([1, 1, 1.3, 0.8])), int(generator.integers(2**63)),
        int(pick([0, 0, 3])), float(pick([0, 0, 1, -2])), float(pick([0, 0, 0.5])),
    )  # fmt: skip
    bans = tuple(tuple(generator.integers(size, size=pick([1, 2])).tolist()) for _ in range(pick([0, 0, 3])))
    bias = tuple((token, float(generator.normal() * 5)) for token in generator.permutation(size)[: pick([0, 0, 3])])
    prompt, ends = generator.integers(size, size=4).tolist(), generator.integers(size, size=pick([0, 1])).tolist()
    return TokenRequest(tuple(prompt), 9, tuple(ends), sampling, bans=bans, bias=bias)


def check_all_rows(size: int, kind: str, scale: Scale, put: Put) -> None:
    generator = np.random.default_rng([size, len(kind)])
    for _ in range(scale(12, 400)):
        rows = int(generator.choice([1, 2, 5, 16]))
        logits = generator.normal(size=(rows, size)) * {"flat": 0.1, "peaked": 30.0}.get(kind, 2.0)
        if kind == "half is -inf":
            logits[generator.random((rows, size)) < 0.5] = -np.inf
        requests = [draw_request(generator, size) for _ in range(rows)]
        references = [Reference(request) for request in requests]
        hosts, tensors, alone = ([Sampler(request) for request in requests] for _ in range(3))
        new: list[list[int]] = [[] for _ in requests]
        for step in range(3):
            given = np.roll(logits, step, 1).astype(np.float32)
            before = given.copy()
            wanted = [one.choose(given[row], new[row]) for row, one in enumerate(references)]
            assert [token for token, _ in choose(given, list(zip(hosts, new, strict=True)))] == wanted
            found = choose(put(given), list(zip(tensors, new, strict=True)))
            assert [token for token, _ in found] == wanted
            assert [take(one, given[row], new[row]) for row, one in enumerate(alone)] == wanted
            np.testing.assert_array_equal(given, before)
            for ids, token in zip(new, wanted, strict=True):
                ids.append(token)


def check_not_finite(put: Put) -> None:
    given = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
    given[1, 5] = np.nan
    given[3] = np.nan
    given[5] = -np.inf
    given[6, :200] = -np.inf
    for settings in ({}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}):
        requests = [TokenRequest(PROMPT, 9, (), Sampling(**settings, seed=1)) for _ in given]
        chosen = choose(put(given), [(Sampler(request), []) for request in requests])
        none = [row for row, (token, _) in enumerate(chosen) if token == -1]
        assert none == [1, 3, 5]


def check_log_probabilities(number: int, put: Put) -> None:
    generator = np.random.default_rng(number)
    given = np.round(generator.normal(size=(4, 300)) * 4).astype(np.float32) / 2  # with many ties
    request = TokenRequest(PROMPT, 9, (), Sampling(0.0, top_logprobs=number), returns=("logprobs",))
    rows: list[tuple[Sampler, list[int]]] = [(Sampler(request), []) for _ in range(4)]
    host, device = choose(given, rows), choose(put(given), rows)
    for (token, place), (other, found) in zip(host, device, strict=True):
        assert token == other
        assert place is not None
        assert found is not None
        assert list(place.top_ids) == list(found.top_ids)
        np.testing.assert_allclose([found.chosen, *found.top], [place.chosen, *place.top], rtol=0, atol=1e-9)
