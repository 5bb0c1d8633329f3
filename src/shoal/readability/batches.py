"""Batches of texts: drawn at random for training, sorted by length for prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.kit.text.tokens import WordPiece
from shoal.readability.corpus import Corpus
from shoal.readability.encoder import Candidates, Encoder
from shoal.readability.folds import Rows

WIDTH_MULTIPLE = 32  # few widths: every new shape is compiled again, which costs more than the padding
WINDOW = 8  # batches within which texts are sorted by length
PREDICTED = 32  # texts per batch of prediction

OnStep = Callable[[int, int], None]  # steps done, steps in all
Scores = np.ndarray[Any, np.dtype[np.float64]]


def count_batches(num_rows: int, batch_size: int) -> int:
    """Return the number of batches in one epoch."""
    return math.ceil(num_rows / batch_size)


def draw_batches(corpus: Corpus, batch_size: int, *, seed: int, epoch: int) -> list[Rows]:
    """Draw an epoch's batches, as row numbers. Each epoch has a new order; texts of similar length share a batch."""
    num_batches = count_batches(len(corpus), batch_size)
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(corpus))
    lengths = np.array([len(text) for text in corpus.texts])[order]
    window = np.arange(len(order)) // (WINDOW * batch_size)
    order = order[np.lexsort((lengths, window))]
    batches = np.array_split(order, num_batches)
    return [batches[k] for k in generator.permutation(num_batches)]


def encode(tokenizer: WordPiece, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return token ids and mask, INT64 ``[len(texts), width]``; the width is a multiple of 32, or ``max_length``."""
    ids, mask = map(torch.from_numpy, tokenizer.encode(texts))
    missing = min(-ids.shape[1] % WIDTH_MULTIPLE, tokenizer.max_length - ids.shape[1])
    return torch.nn.functional.pad(ids, (0, missing)), torch.nn.functional.pad(mask, (0, missing))


def predict(
    model: Candidates | Encoder,
    tokenizer: WordPiece,
    texts: Sequence[str],
    *,
    autocast: Any = None,
    on_step: OnStep = lambda done, total: None,
) -> Scores:
    """Return scores FP64 ``[len(texts), number of heads]``, in order of ``texts``; similar lengths share a batch."""
    device = next(model.parameters()).device
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    batches = [order[start : start + PREDICTED] for start in range(0, len(order), PREDICTED)]
    scores: list[tuple[list[int], Scores]] = []
    was_training = model.training
    model.eval()
    with torch.inference_mode(), autocast or torch.autocast(device.type, enabled=False):
        for number, rows in enumerate(batches):
            ids, mask = encode(tokenizer, [texts[i] for i in rows])
            scores.append((rows, model(ids.to(device), mask.to(device)).double().cpu().numpy()))
            on_step(number + 1, len(batches))
    model.train(was_training)
    result = np.zeros((len(texts), scores[0][1].shape[1] if scores else 1))
    for rows, values in scores:
        result[rows] = values
    return result
