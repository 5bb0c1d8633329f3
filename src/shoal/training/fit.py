"""Training the encoder, and predicting with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.component.ragged import to_texts
from shoal.component.wordpiece import WordPiece
from shoal.training.corpus import Corpus
from shoal.training.encoder import Encoder

BATCH_SIZE = 16
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # share of the steps
WIDTH_MULTIPLE = 64  # few widths: every new shape is compiled anew, which costs more than the padding

OnStep = Callable[[int, int], None]  # steps done, steps in all


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies BF16 matrices faster than FP32 ones."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def train_encoder(
    encoder: Encoder,
    tokenizer: WordPiece,
    corpus: Corpus,
    *,
    num_steps: int,
    seed: int,
    on_step: OnStep = lambda done, total: None,
) -> None:
    """Minimise the root of the mean squared error, in place: AdamW, linear warm-up and decay, BF16 where it is fast."""
    torch.manual_seed(seed)
    encoder.train()
    with torch.no_grad():  # start at the mean: the first steps would only learn it
        encoder.head.bias.fill_(float(corpus.targets.mean()))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    batches = _batches(len(corpus), seed)
    for step in range(num_steps):
        rows = next(batches)
        batch = corpus.take(rows)
        ids, mask = _encode(tokenizer, batch.texts)
        wanted = torch.from_numpy(batch.targets).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bf16()):
            scores = encoder(ids, mask)
        loss = torch.nn.functional.mse_loss(scores.float().squeeze(1), wanted).sqrt()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, num_steps)
    encoder.eval()


def _rate(step: int, num_steps: int) -> float:
    warm_up = max(1, round(WARM_UP * num_steps))
    return min((step + 1) / warm_up, (num_steps - step) / max(1, num_steps - warm_up))


def num_batches(num_rows: int) -> int:
    """Batches in one epoch."""
    return math.ceil(num_rows / BATCH_SIZE)


def _batches(num_rows: int, seed: int) -> Iterator[np.ndarray[Any, Any]]:
    """Rows of one batch after another, for ever; every epoch in a new order."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(num_rows)
        yield from np.array_split(order, num_batches(num_rows))


def _encode(tokenizer: WordPiece, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    ids, mask = map(torch.from_numpy, tokenizer.encode(to_texts(texts)))
    missing = min(-ids.shape[1] % WIDTH_MULTIPLE, tokenizer.max_length - ids.shape[1])
    return torch.nn.functional.pad(ids, (0, missing)), torch.nn.functional.pad(mask, (0, missing))


def predict(encoder: Encoder, tokenizer: WordPiece, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Scores FP64 ``[len(texts)]``, in order; rows of like length share a batch."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    scores = np.zeros(len(texts))
    with torch.inference_mode():
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            ids, mask = map(torch.from_numpy, tokenizer.encode(to_texts([texts[i] for i in rows])))
            scores[rows] = encoder(ids, mask).squeeze(1).numpy()
    return scores
