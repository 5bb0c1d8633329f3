"""Sampling settings: what is refused, in the client's words, and what engines get."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.errors import InputError
from shoal.kit.generation.sampling import NUMBERS, Sampling


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.5}, "temperature is -0.5. Send 0 or 0.001 or more."),
        ({"temperature": math.nan}, "temperature is nan."),
        ({"temperature": math.inf}, "temperature is inf."),
        ({"temperature": 1e-9}, "temperature is 1e-09."),
        ({"top_k": -1}, "runtime_top_k is -1."),
        ({"top_p": 0.0}, "runtime_top_p is 0.0. Send more than 0, and at most 1."),
        ({"top_p": 1.5}, "runtime_top_p is 1.5."),
        ({"top_p": math.nan}, "runtime_top_p is nan."),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0."),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf."),
        ({"seed": -1}, "seed is -1."),
        ({"seed": 2**64}, f"seed is {2**64}."),
        ({"min_tokens": -1}, "min_tokens is -1."),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5. Send from -2 to 2."),
        ({"presence_penalty": -2.5}, "presence_penalty is -2.5."),
        ({"presence_penalty": math.nan}, "presence_penalty is nan."),
        ({"min_tokens": 9}, "min_tokens is 9, and request_output_len is 8."),
    ],
)
def test_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        Sampling(**settings).check(8, by_tensor=True)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "is_greedy"),
    [
        ({}, False),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 50, "top_p": 0.9, "seed": 1}, True),  # clients send all settings
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
        ({"temperature": 0.001, "seed": 2**64 - 1, "min_tokens": 8}, False),
    ],
)
def test_greedy_or_not(settings: dict[str, Any], is_greedy: bool) -> None:
    assert Sampling(**settings).check(8).is_greedy is is_greedy


def test_an_engine_refuses_what_it_does_not_apply() -> None:
    names = {row.name for row in NUMBERS}
    Sampling(0.5, top_k=4, presence_penalty=1.0).check_applied(names)
    Sampling(0.5, top_p=1.0).check_applied(names - {"top_k", "top_p"})  # these have their defaults
    with pytest.raises(InputError) as error:
        Sampling(0.5, top_k=4).check_applied(names - {"top_k"})
    assert str(error.value) == "runtime_top_k is 4, and this model's engine does not apply it. Leave it out."
