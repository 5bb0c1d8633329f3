"""Choice of the next token of every row of a step, in the library of the logits: NumPy, or torch on any device.

The settings are applied in the order of transformers' ``generate``. A row's token is that of its own settings and
random number: other rows influence it only by the rounding of its logits. Only token ids, the log probabilities that
were asked for, and one flag per row leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.generation.contract import Place, TokenRequest

_BLOCK = 256  # tokens whose probabilities are summed before the running sum
_BEST = 1024  # most tokens that are sorted, unless a row needs more

Rows = Sequence["tuple[Chooser, list[int]] | None"]


class Chooser:
    """Settings and random numbers of one request.

    The n-th token is drawn with the n-th random number of the request's seed. ``generate`` has no frequency and
    presence penalties: they are those of OpenAI and vLLM, over the new tokens.
    """

    SETTINGS = frozenset({  # those that this module applies
        "temperature", "top_k", "top_p", "repetition_penalty", "seed", "min_tokens", "frequency_penalty",
        "presence_penalty", "top_logprobs",
    })  # fmt: skip

    def __init__(self, request: TokenRequest) -> None:
        self.request, self.sampling = request, request.sampling
        self.random = np.random.default_rng(request.sampling.seed)
        # As in transformers, a ban on an end token does not count.
        self._bans = [word for word in request.bans if len(word) > 1 or word[0] not in request.end_ids]

    def follow(self, logits: Any, ids: list[int]) -> int | None:  # noqa: ARG002
        """Return the token to take whatever ``logits`` [vocabulary] are, or None."""
        return None

    def adjust(self, scores: Any, ids: list[int], ops: _Ops) -> None:
        """Apply the bias, the penalties, the banned words and ``min_tokens`` to ``scores`` [vocabulary], in place."""
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
        banned += request.end_ids if len(ids) < sampling.min_tokens else ()
        if banned:
            scores[ops.put(banned)] = -np.inf

    def is_adjusting(self, ids: list[int]) -> bool:
        """Whether ``adjust`` may change anything."""
        sampling = self.sampling
        is_early = bool(self.request.end_ids) and len(ids) < sampling.min_tokens
        is_penalized = bool(sampling.frequency_penalty or sampling.presence_penalty)
        return sampling.repetition_penalty != 1 or is_penalized or bool(self._bans or self.request.bias) or is_early


class _Ops:
    """Operations that NumPy and torch name differently: those of NumPy."""

    xp: Any = np

    def put(self, values: Any) -> Any:
        """Return the values, integers unless they are an array, where the logits are."""
        return np.asarray(values)

    def read(self, values: Any) -> Any:
        """Return an array on the host."""
        return values

    def single(self, values: Any) -> Any:
        """Return FP32."""
        return values.astype(np.float32, copy=False)

    def double(self, values: Any) -> Any:
        """Return FP64."""
        return values.astype(np.float64)

    def copy(self, values: Any) -> Any:
        """Return a copy."""
        return values.copy()

    def gather(self, values: Any, places: Any) -> Any:
        """Return ``values[row, places[row]]`` of each row."""
        return np.take_along_axis(values, places, -1)

    def order(self, values: Any) -> Any:
        """Return the places of the values, ascending; of equal ones, the first comes first."""
        return np.argsort(values, -1, kind="stable")

    def power(self, values: Any) -> Any:
        """Replace the values by their powers of e."""
        return np.exp(values, out=values)

    def top(self, scores: Any, number: int) -> Any:
        """Return the places of the ``number`` greatest scores of each row, ascending."""
        rows, size = scores.shape
        fold = max(1, size // (4 * number))
        width = size // fold
        # As many columns have a score of this bound or more: few of the others do.
        bests = scores[:, : width * fold].reshape(rows, fold, width).max(1)
        bounds = np.partition(bests, width - number, axis=1)[:, width - number]
        found = np.empty((rows, number), np.int64)
        for row, bound in enumerate(bounds):
            able = np.flatnonzero(scores[row] >= bound)
            if len(able) < number:  # NaN
                able = np.arange(size)
            found[row] = able[np.argpartition(scores[row, able], len(able) - number)[len(able) - number :]]
        found.sort()
        return found

    def log_probs(self, logits: Any, token: Any, number: int) -> Any:
        """Return a row of ``choose``'s: the log probability of the token, then the best ids, then theirs; FP64."""
        place = read_logits(logits, int(token), number)
        return np.array([place.chosen, *place.top_ids, *place.top])


HOST = _Ops()


class _TorchOps(_Ops):
    def __init__(self, device: Any) -> None:
        import torch

        self.xp, self._device = torch, device

    def put(self, values: Any) -> Any:
        return self.xp.from_numpy(np.asarray(values)).to(self._device)

    def read(self, values: Any) -> Any:
        return values.cpu().numpy()

    def single(self, values: Any) -> Any:
        return values.float()

    def double(self, values: Any) -> Any:
        return values.double()

    def copy(self, values: Any) -> Any:
        return values.clone()

    def gather(self, values: Any, places: Any) -> Any:
        return values.gather(-1, places)

    def order(self, values: Any) -> Any:
        return self.xp.sort(values, dim=-1, stable=True)[1]

    def power(self, values: Any) -> Any:
        return values.exp_()

    def top(self, scores: Any, number: int) -> Any:
        return self.xp.sort(scores.topk(number, sorted=False)[1], dim=-1)[0]

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


def choose(logits: Any, rows: Rows) -> list[tuple[int, Place | None]]:
    """Return the next token of each row, and its log probabilities if the request asks for them.

    ``logits``, [rows, vocabulary], is an array of NumPy or a tensor of torch, of any precision; it is not changed.
    ``rows`` has each row's chooser and its new tokens so far; a row without them gets token 0.
    """
    ops = HOST if isinstance(logits, np.ndarray) else _TorchOps(logits.device)
    given = ops.single(logits)
    held = [(place, *row) for place, row in enumerate(rows) if row is not None]
    if not held:
        return [(0, None)] * len(rows)
    scores = given
    if adjusted := [each for each in held if each[1].is_adjusting(each[2])]:
        scores = ops.copy(given)
        for place, chooser, ids in adjusted:
            chooser.adjust(scores[place], ids, ops)
    groups: dict[str, list[tuple[int, Chooser]]] = {"greedy": [], "all": [], "top_k": [], "top_p": []}
    for place, chooser, _ in held:
        groups[_kind(chooser, given.shape[1])].append((place, chooser))
    places = [place for group in groups.values() for place, _ in group]
    tokens = _choose_groups(scores, groups, ops)
    order = {place: row for row, place in enumerate(places)}
    asking = [(place, chooser.sampling.top_logprobs) for place, chooser, _ in held if chooser.request.returns]
    parts = [ops.double(tokens)]
    for place, number in asking:
        parts.append(ops.log_probs(given[place], tokens[order[place]], number))
    found = ops.read(ops.xp.concatenate(parts)).tolist()
    chosen: list[tuple[int, Place | None]] = [(0, None)] * len(rows)
    for row, place in enumerate(places):
        chosen[place] = int(found[row]), None
    start = len(places)
    for place, number in asking:
        ids = [int(each) for each in found[start + 1 : start + 1 + number]]
        top = found[start + 1 + number : start + 1 + 2 * number]
        chosen[place] = chosen[place][0], Place(found[start], ids, top) if number else Place(found[start])
        start += 1 + 2 * number
    for place, chooser, new in held:
        if (token := chooser.follow(given[place], new)) is not None:
            chosen[place] = token, None
    return chosen


def _kind(chooser: Chooser, vocabulary: int) -> str:
    if chooser.sampling.is_greedy:
        return "greedy"
    if chooser.sampling.top_k and chooser.sampling.top_k < vocabulary:
        return "top_k"
    return "top_p" if chooser.sampling.top_p < 1 else "all"


def _choose_groups(scores: Any, groups: dict[str, list[tuple[int, Chooser]]], ops: _Ops) -> Any:
    """Return the tokens, INT64, of one group after another."""
    size = scores.shape[1]
    tokens, flags, tried = [], [], []
    for kind, group in groups.items():
        if not group:
            continue
        rows = [place for place, _ in group]
        part = scores if rows == [*range(len(scores))] else scores[ops.put(rows)]
        if kind == "greedy":
            tokens.append(part.argmax(-1))
            continue
        settings = _settings([chooser for _, chooser in group], size)
        heats, points = ops.put(settings[0].astype(np.float32)), ops.put(settings[3])
        totals = None
        if kind != "top_k":
            powers = part / heats
            powers -= ops.xp.amax(powers, -1)[:, None]
            powers = ops.power(powers)
            found, totals = _draw(powers, points, ops)
        if kind != "all":
            most = max(128, 2 * int(settings[1].max())) if kind == "top_k" else _BEST
            most = most if most <= _BEST and 2 * most <= size else size
            found, is_settled = _narrow(part, settings, totals, most, ops)
            if most < size:
                flags.append(is_settled)
                tried.append((len(tokens), part, settings))
        tokens.append(found)
    if flags:  # rows whose best tokens were too few, which is rare
        settled = ops.read(ops.xp.concatenate(flags))
        for at, part, settings in tried:
            rest = np.flatnonzero(~settled[: len(part)])
            settled = settled[len(part) :]
            if len(rest):
                tokens[at][ops.put(rest)] = _narrow(part[ops.put(rest)], settings[:, rest], None, size, ops)[0]
    return tokens[0] if len(tokens) == 1 else ops.xp.concatenate(tokens)


def _settings(choosers: Sequence[Chooser], size: int) -> NDArray[np.float64]:
    """Return temperature, top_k (0: all), top_p and the random number of each row: FP64 [4, rows, 1]."""
    each = [(one.sampling.temperature, one.sampling.top_k, one.sampling.top_p, one.random.random()) for one in choosers]
    found = np.array(each).T[:, :, None]
    found[1, found[1] >= size] = 0
    return found


def _place(weights: Any, points: Any, ops: _Ops) -> tuple[Any, Any]:
    """Return where the running sum of ``weights``, FP64, exceeds ``points`` [rows, 1], and the sum.

    A weight of 0 is never chosen, whatever the rounding.
    """
    ends = weights.cumsum(-1)
    return ops.xp.minimum((ends <= points).sum(-1), (ends < ends[:, -1:]).sum(-1))[:, None], ends


def _draw(powers: Any, points: Any, ops: _Ops) -> tuple[Any, Any]:
    """Draw a token with each random number of ``points`` [rows, 1]; ``powers`` is FP32 [rows, vocabulary].

    Return the tokens, and the sums of the powers, FP64 [rows, 1].
    """
    xp, (rows, size) = ops.xp, powers.shape
    whole = size // _BLOCK * _BLOCK
    sums = powers[:, :whole].reshape(rows, whole // _BLOCK, _BLOCK).sum(-1)
    if whole < size:
        sums = xp.concatenate([sums, powers[:, whole:].sum(-1)[:, None]], -1)
    sums = ops.double(sums)
    totals = sums.cumsum(-1)[:, -1:]
    points = points * totals
    block, ends = _place(sums, points, ops)
    points = points - xp.where(block > 0, ops.gather(ends, block - (block > 0) * 1), 0.0)
    places = block * _BLOCK + ops.put(np.arange(_BLOCK))
    inside = ops.double(ops.gather(powers, places.clip(0, size - 1)))
    place, _ = _place(xp.where(places < size, inside, 0.0), points, ops)
    return xp.where(totals == totals, block * _BLOCK + place, size - 1)[:, 0], totals  # NaN: the last token


def _narrow(scores: Any, settings: NDArray[Any], totals: Any, most: int, ops: _Ops) -> tuple[Any, Any]:
    """Draw from the tokens that ``top_k`` and ``top_p`` allow, of the ``most`` best of each row of ``scores``.

    ``totals``, [rows, 1], are the sums of the powers of whole rows. Return the tokens, and whether they are right: all
    allowed tokens, and those that equal them, were among the best.
    """
    xp, size = ops.xp, scores.shape[1]
    heats, (tops, shares, points) = ops.put(settings[0].astype(np.float32)), map(ops.put, settings[1:])
    ids = None if most == size else ops.top(scores, most)
    values = (scores if ids is None else ops.gather(scores, ids)) / heats
    order = ops.order(values)
    rising = ops.gather(values, order)
    least = ops.gather(rising, ops.put(np.where(settings[1] > 0, most - settings[1], 0).astype(np.int64)))
    weights = xp.where(values >= least, xp.exp(ops.double(values) - ops.double(rising[:, -1:])), 0.0)
    sums = ops.gather(weights, order).cumsum(-1)
    whole = sums[:, -1:] if ids is None or totals is None else totals
    dropped = (whole - sums[:, -1:] + sums <= (1 - shares) * whole).sum(-1)[:, None].clip(0, most - 1)
    weights = xp.where(ops.order(order) >= dropped, weights, 0.0)
    ends = weights.cumsum(-1)
    place, _ = _place(weights, points * ends[:, -1:], ops)
    bound = xp.where(tops > 0, least, ops.gather(rising, dropped))
    is_right = ((bound > rising[:, :1]) | (rising[:, :1] == -np.inf))[:, 0]
    return (place if ids is None else ops.gather(ids, place))[:, 0], is_right


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
