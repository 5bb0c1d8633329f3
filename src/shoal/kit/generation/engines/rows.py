"""Whole answers to a batch of requests, with one call of transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shoal.errors import ServerError
from shoal.kit.component.context import Context
from shoal.kit.generation.contract import TokenRequest
from shoal.kit.generation.engines.loading import find_place, load_model
from shoal.kit.generation.sampler import NOT_FINITE, Sampler, choose
from shoal.kit.generation.weights import Weights


def load_rows(
    weights: Weights, dtype: str, context: Context, *, quantized: str
) -> Callable[[Sequence[TokenRequest]], list[list[int]]]:
    """Load a model onto the component's device, as ``load_model`` does, and return its ``continue_rows``."""
    model = load_model(weights, dtype, context.num_threads, find_place(context.device), quantized=quantized)
    return partial(continue_rows, model)


def continue_rows(model: Any, requests: Sequence[TokenRequest]) -> list[list[int]]:
    """Return the new tokens of each request, with its own settings and random numbers.

    ``model`` is a decoder, on any device. In FP32, a row's tokens do not depend on the other rows.

    Raises:
        ServerError: the model's logits are not finite.
    """
    widest, end_ids = max(len(request.ids) for request in requests), requests[0].end_ids
    ids, mask = (torch.zeros((len(requests), widest), dtype=torch.int64) for _ in range(2))
    for row, request in enumerate(requests):  # padded on the left: the answer follows the prompt
        ids[row, widest - len(request.ids) :] = torch.tensor(request.ids)
        mask[row, widest - len(request.ids) :] = 1
    samplers = [Sampler(request) for request in requests]

    def pick(sequences: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Leave only the chosen token of each row, which greedy decoding then takes."""
        rows = list(zip(samplers, sequences[:, widest:].tolist(), strict=True))
        tokens = [token for token, _ in choose(logits, rows)]
        if min(tokens) < 0:
            raise ServerError(*NOT_FINITE)
        chosen = torch.tensor(tokens, device=logits.device)[:, None]
        return torch.full_like(logits, -torch.inf).scatter(1, chosen, 0.0)

    found = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(request.max_tokens for request in requests),
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=end_ids[0] if end_ids else 0,
        logits_processor=[pick],
    )
    return [row[: request.max_tokens] for row, request in zip(found[:, widest:].tolist(), requests, strict=True)]
