"""Sampling settings of one request, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import InputError

COLDEST = 1e-3  # least temperature above 0: logits divided by less can exceed FP32
_MOST_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request; the defaults draw from the model's own distribution.

    With temperature 0 or ``top_k`` 1, decoding is greedy: the token with the greatest logit is taken. Other settings
    are then ignored and not refused, because many clients always send all settings. ``top_k`` 0 and ``top_p`` 1 keep
    every token. ``repetition_penalty`` divides positive logits, and multiplies negative ones, of tokens that are in the
    prompt or the answer. The random numbers depend on ``seed`` alone, and without a seed, each request has different
    ones. In FP32, the same request with the same seed gets the same tokens again; in half precision it does if it is
    computed alone, because rounding depends on the rest of a batch. Before there are ``min_tokens`` new tokens, the end
    token is not drawn, and stop words do not end the answer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the token with the greatest logit is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def check(self, max_tokens: int | None = None, names: Mapping[str, str] | None = None) -> Sampling:
        """Check the settings, and return them.

        ``max_tokens`` is the greatest number of new tokens, if it is known. ``names`` maps fields to the names that
        the client uses, such as ``{"top_k": "runtime_top_k"}``.

        Raises:
            InputError: a setting is out of range; the message has the client's name of the setting, and its value.
        """
        called = names or {}
        for name, is_valid, wanted in (
            ("temperature", self.temperature == 0 or COLDEST <= self.temperature < math.inf, f"0 or {COLDEST} or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "more than 0, and finite"),
            ("seed", self.seed is None or 0 <= self.seed <= _MOST_SEED, f"from 0 to {_MOST_SEED}"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
        ):
            if not is_valid:  # NaN is not, either
                raise InputError(f"{called.get(name, name)} is {getattr(self, name)}.", f"Send {wanted}.")
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise InputError(
                f"{called.get('min_tokens', 'min_tokens')} is {self.min_tokens}, and"
                f" {called.get('max_tokens', 'max_tokens')} is {max_tokens}.",
                "Send a min_tokens that is not greater.",
            )
        return self
