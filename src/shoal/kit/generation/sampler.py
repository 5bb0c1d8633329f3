"""Choice of the next token of every row of a step, in the library of the logits: NumPy, or torch on any device.

The settings are applied in the order of transformers' ``generate``. A row's token is that of its own settings and
random number: other rows influence it only by the rounding of its logits. Only token ids, the log probabilities that
were asked for, and one flag per row leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.kit.generation.contract import LogProbs, TokenRequest

NOT_FINITE = (  # what to say where there is no token
    "The model's logits are not finite, so that no token can be chosen.",
    "Set the engine's parameter dtype to bfloat16 or float32; if that does not help, the weights are damaged.",
)
_BLOCK = 256  # tokens whose probabilities are summed before the running sum

Rows = Sequence["tuple[Sampler, list[int]] | None"]


class Sampler:
    """Settings and random numbers of one request.

    The n-th token is drawn with the n-th random number of the request's seed. ``generate`` has no frequency and
    presence penalties: they are those of OpenAI and vLLM, over the new tokens.
    """

    SETTINGS = frozenset(  # those that this module applies
        """temperature top_k top_p repetition_penalty seed min_tokens frequency_penalty presence_penalty
        top_logprobs echo bad_words embedding_bias guide""".split()
    )

    # In trials: what returns the token to take, whatever the logits [vocabulary] are, from these and the new tokens.
    follow: Callable[[NDArray[np.float32], list[int]], int] | None = None

    def __init__(self, request: TokenRequest) -> None:
        self.request, self.sampling = request, request.sampling
        self.random = np.random.default_rng(request.sampling.seed)
        # As in transformers, a ban on an end token does not count.
        self._bans = [word for word in request.bans if len(word) > 1 or word[0] not in request.end_ids]

    def adjust(self, scores: Any, ids: list[int], ops: _Host) -> None:
        """Apply bias, penalties, banned words, ``min_tokens`` and the guide to ``scores`` [vocabulary], in place."""
        sampling, request = self.sampling, self.request
        seen = [*request.ids, *ids] if self._bans or sampling.repetition_penalty != 1 else []
        if request.bias:
            scores[ops.put([token for token, _ in request.bias])] += ops.put(
                np.array([weight for _, weight in request.bias], np.float32)
            )
        if sampling.repetition_penalty != 1:
            places, penalty = ops.put(np.unique(seen)), sampling.repetition_penalty
            found = scores[places]
            scores[places] = ops.xp.where(found < 0, found * penalty, found / penalty)
        if ids and (sampling.frequency_penalty or sampling.presence_penalty):
            tokens, counts = np.unique(ids, return_counts=True)
            places = ops.put(tokens)
            scores[places] -= ops.put(np.float32(sampling.frequency_penalty) * counts.astype(np.float32))
            scores[places] -= float(np.float32(sampling.presence_penalty))
        banned = [last for *begin, last in self._bans if seen[len(seen) - len(begin) :] == begin]
        if len(ids) < sampling.min_tokens and request.guide is None:  # what a guide leaves may be the end alone
            banned += request.end_ids
        if banned:
            scores[ops.put(banned)] = -np.inf
        if request.follower is not None:
            scores[ops.put(request.follower.find_banned())] = -np.inf

    def draw_settings(self, vocabulary: int) -> tuple[float, int, float, float]:
        """Return temperature, ``top_k`` (0: all), ``top_p`` and the next random number."""
        sampling = self.sampling
        top_k = sampling.top_k if sampling.top_k < vocabulary else 0
        return sampling.temperature, top_k, sampling.top_p, self.random.random()

    def is_adjusting(self, ids: list[int]) -> bool:
        """Whether ``adjust`` may change anything."""
        sampling = self.sampling
        is_early = bool(self.request.end_ids) and len(ids) < sampling.min_tokens
        is_penalized = bool(sampling.frequency_penalty or sampling.presence_penalty)
        is_changed = bool(self._bans or self.request.bias) or self.request.follower is not None
        return sampling.repetition_penalty != 1 or is_penalized or is_changed or is_early


class _Host:
    """Operations on arrays of NumPy, row by row, since a row stays in the processor's cache."""

    xp: Any = np

    def put(self, values: Any) -> Any:
        """Return the values, integers unless they are an array, where the logits are."""
        return np.asarray(values)

    def read(self, values: Any) -> Any:
        """Return an array on the host."""
        return values

    def double(self, values: Any) -> Any:
        """Return FP64."""
        return values.astype(np.float64)

    def copy(self, values: Any) -> Any:
        """Return a copy."""
        return values.copy()

    def argmax(self, scores: Any) -> Any:
        """Return the first token with the greatest score of each row, or -1 if that is not finite: INT64."""
        tokens = scores.argmax(1)
        return np.where(np.isfinite(scores[np.arange(len(scores)), tokens]), tokens, -1)

    def draw(self, scores: Any, settings: NDArray[np.float64]) -> Any:
        """Draw a token of each row; ``settings`` has temperature, top_k (0: all), top_p and random number: [rows, 4].

        Return INT64 [rows]; -1 where the greatest score is not finite.
        """
        return np.array([_draw_row(row, *own) for row, own in zip(scores, settings.tolist(), strict=True)])

    def log_probs(self, logits: Any, token: Any, number: int) -> Any:
        """Return a row of ``choose``'s: the log probability of the token, then the best ids, then theirs; FP64."""
        place = read_logits(logits, int(token), number)
        return np.array([place.chosen, *place.top_ids, *place.top])


HOST = _Host()


class _Device(_Host):
    """Operations on tensors of torch, on a device where a step of all rows costs as much as a step of one."""

    def __init__(self, device: Any) -> None:
        import torch

        self.xp, self._device = torch, device

    def put(self, values: Any) -> Any:
        return self.xp.from_numpy(np.asarray(values)).to(self._device)

    def read(self, values: Any) -> Any:
        return values.cpu().numpy()

    def double(self, values: Any) -> Any:
        return values.double()

    def copy(self, values: Any) -> Any:
        return values.clone()

    def argmax(self, scores: Any) -> Any:
        best, tokens = scores.max(-1)
        return self.xp.where(best.isfinite(), tokens, -1)

    def draw(self, scores: Any, settings: NDArray[np.float64]) -> Any:
        xp, most, size = self.xp, int(settings[:, 1].max()), scores.shape[1]
        _, tops, shares, points = self.put(settings).T[:, :, None]
        values = scores / self.put(settings[:, :1].astype(np.float32))
        if most:
            least = values.topk(most)[0].gather(-1, (tops.long() - 1).clamp(min=0))
            values = xp.where((tops > 0) & (values < least), -xp.inf, values)
        powers = (values - values.amax(-1, keepdim=True)).exp()
        if (settings[:, 2] < 1).any():  # to sort costs less, on a device, than what avoids it
            order = values.sort(dim=-1, stable=True)[1]
            rising = powers.gather(-1, order)
            sums = rising.double().cumsum(-1)
            dropped = (sums <= (1 - shares) * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=size - 1)
            rising = xp.where(self.put(np.arange(size)) < dropped, 0.0, rising)
            powers = powers.scatter(-1, order, rising)
        ends = powers.double().cumsum(-1)
        totals = ends[:, -1:]
        places = xp.minimum((ends <= points * totals).sum(-1), (ends < totals).sum(-1))
        return xp.where(totals[:, 0].isnan(), -1, places)

    def log_probs(self, logits: Any, token: Any, number: int) -> Any:
        xp = self.xp
        scores = logits.double()
        scores = scores - scores.max()
        scores = scores - scores.exp().sum().log()
        chosen = scores.gather(0, token[None])
        if not number:
            return chosen
        values, ids = scores.topk(number)
        # Of those that equal the last one, the least ids: they are not always those of topk.
        size = len(scores)
        ties, equal = xp.where(scores == values[-1], size - self.put(np.arange(size)), 0).topk(number)
        ids = xp.cat([xp.where(values > values[-1], ids, size), xp.where(ties > 0, equal, size)]).sort()[0]
        values = xp.where(ids < size, scores[ids.clamp(max=size - 1)], -np.inf)
        places = xp.sort(-values, stable=True)[1][:number]
        return xp.cat([chosen, ids[places].double(), values[places]])


def choose(logits: Any, rows: Rows) -> list[tuple[int, LogProbs | None]]:
    """Return the next token of each row, and its log probabilities if the request asks for them.

    ``logits``, [rows, vocabulary], is an array of NumPy or a tensor of torch, of any precision; it is not changed.
    ``rows`` has each row's sampler and its new tokens so far; a row without them gets token 0. A row gets -1 if its
    greatest logit is not finite, or one is NaN.
    """
    logits, ops = _read(logits)
    given = scores = logits.astype(np.float32, copy=False) if ops is HOST else logits
    held = [(place, *row) for place, row in enumerate(rows) if row is not None]
    if not held:
        return [(0, None)] * len(rows)
    if adjusted := [each for each in held if each[1].is_adjusting(each[2])]:
        scores = ops.copy(given)
        for place, sampler, ids in adjusted:
            sampler.adjust(scores[place], ids, ops)
    greedy = [place for place, sampler, _ in held if sampler.sampling.is_greedy]
    drawn = {place: sampler for place, sampler, _ in held if not sampler.sampling.is_greedy}
    tokens = []
    if greedy:
        tokens.append(ops.argmax(_take(scores, greedy, ops)))
    if drawn:
        settings = [sampler.draw_settings(given.shape[1]) for sampler in drawn.values()]
        tokens.append(ops.draw(_take(scores, [*drawn], ops), np.array(settings)))
    parts = [ops.xp.concatenate(tokens)]
    places = [*greedy, *drawn]
    asking = [(place, sampler.sampling.top_logprobs) for place, sampler, _ in held if sampler.request.returns]
    for place, number in asking:
        token = parts[0][places.index(place)]
        parts.append(ops.log_probs(given[place], ops.xp.clip(token, 0, None), number))
    found = ops.read(ops.xp.concatenate([ops.double(part) for part in parts])).tolist()  # one copy
    chosen: list[tuple[int, LogProbs | None]] = [(0, None)] * len(rows)
    for row, place in enumerate(places):
        chosen[place] = int(found[row]), None
    start = len(places)
    for place, number in asking:
        chosen[place] = chosen[place][0], _to_place(found[start : start + 1 + 2 * number])
        start += 1 + 2 * number
    for place, sampler, new in held:
        if sampler.follow is not None:
            chosen[place] = sampler.follow(ops.read(given[place]), new), None
    return chosen


def read_places(logits: Any, tokens: Sequence[int], number: int) -> list[LogProbs]:
    """Return the log probabilities of each token, and of the ``number`` most probable tokens at its place.

    ``logits``, [tokens, vocabulary], is an array of NumPy or a tensor of torch, of any precision.
    """
    logits, ops = _read(logits)
    rows = zip(logits, ops.put(np.array(tokens)), strict=True)
    found = ops.read(ops.xp.stack([ops.log_probs(row, token, number) for row, token in rows]))  # one copy
    return [*map(_to_place, found.tolist())]


def _read(logits: Any) -> tuple[Any, _Host]:
    """Return logits where they are computed with, and the operations there."""
    if not isinstance(logits, np.ndarray):
        logits = logits.float()
        if logits.device.type == "cpu":
            logits = logits.numpy()
    return logits, HOST if isinstance(logits, np.ndarray) else _Device(logits.device)


def _to_place(row: Sequence[float]) -> LogProbs:
    """Return the place of a row of ``log_probs``."""
    chosen, *top = row
    return LogProbs(chosen, [int(each) for each in top[: len(top) // 2]], top[len(top) // 2 :])


def _take(scores: Any, places: list[int], ops: _Host) -> Any:
    """Return the rows at ``places``, without a copy if they are all rows."""
    return scores if places == [*range(len(scores))] else scores[ops.put(places)]


def _draw_row(scores: NDArray[np.float32], temperature: float, top_k: float, top_p: float, point: float) -> int:
    best, able = scores.max(), None
    if not np.isfinite(best):
        return -1
    if top_k:
        able = _find_best(scores, int(top_k))
        scores = scores[able]
    values = scores / np.float32(temperature)
    if top_k:
        values[values < np.partition(values, -int(top_k))[-int(top_k)]] = -np.inf
    powers = values - best / np.float32(temperature)
    np.exp(powers, out=powers)
    if top_p < 1:
        _drop(powers, values, 1 - top_p)
    # A running sum of blocks, then of the tokens in one. Whatever the rounding, a power of 0 is never drawn.
    whole = len(powers) // _BLOCK * _BLOCK
    sums = np.append(powers[:whole].reshape(-1, _BLOCK).sum(-1), powers[whole:].sum()).cumsum(dtype=np.float64)
    point *= sums[-1]
    block = min(sums.searchsorted(point, "right"), sums.searchsorted(sums[-1]))
    inside = powers[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    point -= sums[block - 1] if block else 0
    place = block * _BLOCK + min(inside.searchsorted(point, "right"), inside.searchsorted(inside[-1]))
    return int(place if able is None else able[place])


def _find_best(scores: NDArray[np.float32], number: int) -> NDArray[np.int64]:
    """Return the places, ascending, of the ``number`` greatest scores, of those that equal them, and of few others."""
    fold = len(scores) // (4 * number)
    if fold < 2:
        return np.arange(len(scores))
    width = len(scores) // fold
    # As many columns have a score of this bound or more: few of the other scores do.
    bests = scores[: width * fold].reshape(fold, width).max(0)
    return np.flatnonzero(scores >= np.partition(bests, width - number)[width - number])


def _drop(powers: NDArray[np.float32], values: NDArray[np.float32], share: float) -> None:
    """Set the least ``powers`` to 0 that together have at most this share of their sum; of equal ones, the first.

    ``values`` has their logarithms, but for a constant. Most are dropped since all as small as they have that share at
    most. Of the others, sorted are only those whose first 16 bits are those of the greatest one dropped: numbers that
    are not negative are in the order of their bits.
    """
    total = float(powers.sum())
    large = np.flatnonzero(powers >= share * total / len(powers))
    found = powers[large]
    bits = found.view(np.uint16)[1::2]  # little-endian
    ends = np.bincount(bits, found).cumsum()
    ends += total - ends[-1]  # the others
    last = min(int(ends.searchsorted(share * total, "right")), len(ends) - 1)
    inside = large[bits == last]
    inside = inside[values[inside].argsort(kind="stable")]
    sums = powers[inside].cumsum(dtype=np.float64) + (ends[last - 1] if last else 0)
    powers[powers < np.array(last << 16, np.int32).view(np.float32)] = 0
    powers[inside[: min(int(sums.searchsorted(share * total, "right")), len(inside) - 1)]] = 0


def read_logits(logits: NDArray[Any], token: int, number: int) -> LogProbs:
    """Return the log probabilities of ``token`` and of the ``number`` most probable tokens.

    ``logits`` is FP32 [vocabulary], as the model gave it. Of equally probable tokens, the least id comes first.
    """
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    if not number:
        return LogProbs(float(scores[token]))
    able = np.flatnonzero(scores >= np.partition(scores, -number)[-number])
    top = able[np.argsort(-scores[able], kind="stable")][:number]
    return LogProbs(float(scores[token]), top.tolist(), scores[top].tolist())
