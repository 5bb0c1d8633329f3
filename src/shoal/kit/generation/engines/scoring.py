"""Log probabilities of a prompt's tokens, which lm-evaluation-harness, for example, compares answers by."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from shoal.kit.generation.contract import LogProbs
from shoal.kit.generation.sampler import read_places

_PIECE = 256  # tokens for which there are logits at the same time


class PromptScorer:
    """Computes the log probabilities of prompts with a transformers model, while an engine computes answers with it.

    Continuous batches have logits for new tokens alone, and change the model's attention. So this has the modules
    again, with the same weights, and computes each prompt by itself, as ``generate`` begins.
    """

    def __init__(self, model: Any) -> None:
        weights = itertools.chain(model.parameters(), model.buffers())
        self._model = copy.deepcopy(model, {id(each): each for each in weights})
        self._lock = threading.Lock()  # some models keep a state

    def score(self, ids: Sequence[int], number: int) -> tuple[LogProbs, ...]:
        """Return the log probabilities of each token, and of the ``number`` most probable ones at its place."""
        given = torch.tensor([ids], device=self._model.device)
        places, cache = [LogProbs.make_first(number)], None
        with self._lock, torch.inference_mode():
            for start in range(0, len(ids) - 1, _PIECE):
                piece = given[:, start : min(start + _PIECE, len(ids) - 1)]
                found = self._model(input_ids=piece, past_key_values=cache, use_cache=True)
                cache = found.past_key_values
                places += read_places(found.logits[0], ids[start + 1 : start + 1 + piece.shape[1]], number)
        return tuple(places)
