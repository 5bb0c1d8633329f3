"""transformers' ``generate`` as the oracle of engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

TIE = 1e-4  # logits nearer than this may be exchanged by another order of summation


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(4, 480, random.integers(1, 90)).tolist() for _ in range(number)]


def expect(oracle: Any, ids: list[int], new: int, **settings: Any) -> tuple[list[int], list[float]]:
    """The greedy tokens, and by how much the best logit exceeds the second at each."""
    out = oracle.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones((1, len(ids)), dtype=torch.int64),
        generation_config=GenerationConfig(
            max_new_tokens=new, pad_token_id=0, output_scores=True, return_dict_in_generate=True, **settings
        ),
    )
    gaps = [float(best[0] - best[1]) for best in (scores[0].topk(2).values for scores in out.scores)]
    return out.sequences[0, len(ids) :].tolist(), gaps


def expect_penalized(
    oracle: Any, ids: list[int], new: int, frequency: float, presence: float
) -> tuple[list[int], list[float]]:
    """As ``expect``, with penalties over the new tokens as OpenAI and vLLM define them."""
    tokens: list[int] = []
    gaps = []
    for _ in range(new):
        logits = oracle(torch.tensor([[*ids, *tokens]])).logits[0, -1].detach()
        for token in set(tokens):
            logits[token] -= frequency * tokens.count(token) + presence
        best = logits.topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens, gaps


PENALTIES = [(0.9, 0.0), (0.0, 1.5), (0.4, 0.6), (-2.0, -2.0)]


def check_equal(found: list[int], expected: tuple[list[int], list[float]]) -> None:
    tokens, gaps = expected
    for place, (token, right) in enumerate(zip(found, tokens, strict=False)):
        if token != right:
            assert gaps[place] <= TIE, f"token {place} is {token}, generate has {right}"
            return
    assert len(found) == len(tokens)


def wait_for(is_so: Callable[[], bool], seconds: float) -> float:
    """Return the seconds until it is so."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() - start < seconds
        time.sleep(0.002)
    return time.monotonic() - start
