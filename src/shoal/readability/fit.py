"""Training of the encoder.

The loss is the RMSE of a batch, and the optimizer is AdamW with linear warm-up and decay of the learning rate. Training
stops early when the RMSE on the inner split, texts held out of the training rows, no longer improves; the best step is
kept. Every step depends only on the seed and the step's number, so a training resumed from a checkpoint gives the same
result as an uninterrupted training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import InputError, SetupError
from shoal.kit.encoders.encoder import POOLINGS
from shoal.kit.text.tokens import WordPiece
from shoal.readability.batches import OnStep, count_batches, draw_batches, encode, predict
from shoal.readability.corpus import Corpus
from shoal.readability.encoder import Candidates, Encoder
from shoal.readability.folds import Rows
from shoal.readability.work import Checkpoint
from shoal.system.machine import computes_bf16

MAX_NORM = 1.0  # of the gradient
SMALLEST = 1e-12  # RMSE: at 0 its gradient has no bound


@dataclass(frozen=True)
class EncoderSettings:
    """Hyperparameters of encoder training.

    ``max_epochs`` may be a fraction; ``max_steps``, if given, limits the steps. The inner split, texts held out of the
    training rows, is scored ``evaluations`` times per epoch; after ``patience`` evaluations in a row without
    improvement, training stops. A batch of ``batch_size`` texts is processed in ``accumulation`` parts, and with
    ``gradient_checkpointing`` activations are computed twice: both save memory and give the same gradient. ``dtype`` is
    fp32, bf16, or auto, which is BF16 if the device computes it faster than FP32.
    """

    max_epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 16
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    warm_up: float = 0.1  # share of the steps
    evaluations: int = 3
    patience: int = 3
    dropout: float = 0.0
    accumulation: int = 1
    gradient_checkpointing: bool = False
    dtype: str = "auto"

    def count_steps(self, num_rows: int) -> int:
        """Return the number of optimizer steps for this many training rows."""
        num_steps = max(1, round(self.max_epochs * count_batches(num_rows, self.batch_size)))
        return min(num_steps, self.max_steps or num_steps)


@dataclass
class Progress:
    """Progress of a training, without its weights; ``history`` has the RMSE on training rows and inner split.

    ``best_rmse`` is the lowest RMSE on the inner split, reached at ``best_step``, which is 0 without an inner split.
    """

    step: int = 0
    best_step: int = 0
    best_rmse: float = math.inf
    head: str = POOLINGS[0]
    num_worse: int = 0
    squares: float = 0.0  # sum of the batches' mean squared errors since the last evaluation
    num_squares: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether this device multiplies BF16 matrices faster than FP32 ones."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return computes_bf16()


def find_device() -> torch.device:
    """Return the GPU if torch finds one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Training:
    """Training of one encoder: candidate heads, optimizer, progress."""

    def __init__(self, candidates: Candidates, tokenizer: WordPiece, settings: EncoderSettings, *, seed: int) -> None:
        self.device = find_device()
        self.candidates = candidates.to(self.device)
        self.tokenizer, self.settings, self.seed = tokenizer, settings, seed
        self.is_bf16 = settings.dtype == "bf16" or (settings.dtype == "auto" and has_fast_bf16(self.device))
        if settings.gradient_checkpointing:
            trunk: Any = candidates.trunk  # transformers renamed it in 5.23
            enable = getattr(trunk, "activation_checkpointing_enable", None) or trunk.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            trunk.config.use_cache = False  # not used here; transformers warns about the combination
        self.optimizer = torch.optim.AdamW(
            candidates.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}

    def run(
        self,
        known: Corpus,
        inner: Corpus | None,
        *,
        num_steps: int,
        stop_at: int | None = None,
        checkpoint: Checkpoint | None = None,
        on_step: OnStep = lambda done, total: None,
    ) -> Encoder:
        """Train on ``known``; return the encoder with the head and at the step that have the lowest RMSE on ``inner``.

        Without ``inner``, the head is ``progress.head`` and the last step is kept. The learning rate follows a schedule
        of ``num_steps``; training ends after ``stop_at`` steps, if given.
        """
        self.candidates.start_at(float(known.targets.mean()))
        if checkpoint:
            self._resume(checkpoint)
        progress, last = self.progress, stop_at or num_steps
        on_step(progress.step, last)
        batches = self._draw(known)
        while progress.step < last and (inner is None or progress.num_worse < self.settings.patience):
            with self._explain_memory():
                self._step(known.take(next(batches)), num_steps)
                if inner is not None and self._is_evaluated(len(known), last):
                    self._evaluate(inner, len(known))
            on_step(progress.step, last)
            if checkpoint and checkpoint.is_due():
                self._save(checkpoint)
        if checkpoint and progress.step:
            self._save(checkpoint)
        if self.best:
            self.candidates.load_state_dict(self.best)
        self._check_finite(float(sum(weights.sum() for weights in self.candidates.state_dict().values())))
        return self.candidates.pick(progress.head).eval()

    def _draw(self, known: Corpus) -> Iterator[Rows]:
        """Yield the row numbers of each batch, from the current step on, epoch after epoch without end."""
        num_batches = count_batches(len(known), self.settings.batch_size)
        epoch, number = divmod(self.progress.step, num_batches)
        while True:
            yield from draw_batches(known, self.settings.batch_size, seed=self.seed, epoch=epoch)[number:]
            epoch, number = epoch + 1, 0

    def _step(self, batch: Corpus, num_steps: int) -> None:
        progress, settings = self.progress, self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(progress.step, num_steps, settings.warm_up)
        self.candidates.train()
        self.optimizer.zero_grad(set_to_none=True)
        squares = self.accumulate(batch)
        self._check_finite(squares)
        torch.nn.utils.clip_grad_norm_(self.candidates.parameters(), MAX_NORM)
        self.optimizer.step()
        progress.step += 1
        progress.squares += squares
        progress.num_squares += 1

    def _check_finite(self, error: float) -> None:
        if not math.isfinite(error):
            raise InputError(
                f"The training has diverged: at step {self.progress.step} of an encoder the error is {error}.",
                f"Give a smaller --learning-rate than {self.settings.learning_rate:g}, and --fresh.",
            )

    @contextmanager
    def _explain_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise SetupError(
                f"A batch of {self.settings.batch_size} texts does not fit into the GPU's memory.",
                "Add --gradient-checkpointing, or --accumulation 2 or more, and --fresh.",
            ) from None

    def accumulate(self, batch: Corpus) -> float:
        """Add the gradient of the sum of the heads' RMSEs over ``batch``; return the mean of their mean squared errors.

        The gradient of an RMSE is the gradient of the mean squared error, divided by twice the RMSE. If the batch has
        several parts, the RMSE is known only after all parts, so a first pass computes it without gradients.
        """
        rows = np.array_split(np.arange(len(batch)), min(self.settings.accumulation, len(batch)))
        parts = [batch.take(part) for part in rows]
        means: Tensor | None = None
        if len(parts) > 1:
            with torch.no_grad():
                means = torch.stack([self._squares(part, k) for k, part in enumerate(parts)]).sum(0) / len(batch)
        for k, part in enumerate(parts):
            squares = self._squares(part, k)
            means = squares.detach() / len(batch) if means is None else means
            (squares / (2 * len(batch) * means.sqrt().clamp_min(SMALLEST))).sum().backward()
        assert means is not None
        return float(means.mean())

    def _squares(self, part: Corpus, number: int) -> Tensor:
        """Return each head's sum of squared errors over ``part``, the ``number``-th of the batch: FP32 ``[2]``."""
        ids, mask = encode(self.tokenizer, part.texts)
        targets = torch.from_numpy(part.targets).float().unsqueeze(1).to(self.device)
        torch.manual_seed(hash((self.seed, self.progress.step, number)))  # dropout's, if there is any
        with self._autocast():
            scores = self.candidates(ids.to(self.device), mask.to(self.device))
        squares: Tensor = (scores.float() - targets).square().sum(0)
        return squares

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16)

    def _is_evaluated(self, num_rows: int, last: int) -> bool:
        every = max(1, round(count_batches(num_rows, self.settings.batch_size) / self.settings.evaluations))
        return self.progress.step % every == 0 or self.progress.step == last

    def _evaluate(self, inner: Corpus, num_rows: int) -> None:
        progress = self.progress
        scores = predict(self.candidates, self.tokenizer, inner.texts, autocast=self._autocast())
        squares = (scores - inner.targets[:, None]) ** 2
        rmses = dict(zip(POOLINGS, np.sqrt(squares.mean(axis=0)).tolist(), strict=True))
        head = min(rmses, key=lambda pooling: rmses[pooling])
        progress.history.append(
            {
                "step": progress.step,
                "epoch": round(progress.step / count_batches(num_rows, self.settings.batch_size), 3),
                "train_rmse": round(math.sqrt(progress.squares / progress.num_squares), 4),
                "inner_rmse": {pooling: round(rmse, 4) for pooling, rmse in rmses.items()},
            }
        )
        progress.squares, progress.num_squares = 0.0, 0
        if rmses[head] < progress.best_rmse:
            progress.best_rmse, progress.best_step = rmses[head], progress.step
            progress.head, progress.num_worse = head, 0
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in self.candidates.state_dict().items()}
        else:
            progress.num_worse += 1

    def _save(self, checkpoint: Checkpoint) -> None:
        state = self.optimizer.state_dict()["state"]
        tensors = {f"weights.{name}": tensor for name, tensor in self.candidates.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        tensors |= {f"optimizer.{k}.{name}": tensor for k, entry in state.items() for name, tensor in entry.items()}
        checkpoint.save(tensors, vars(self.progress))

    def _resume(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.load()
        if saved is None:
            return
        tensors, facts = saved
        self.progress = Progress(**facts)
        self.candidates.load_state_dict(_under("weights", tensors))
        self.best = _under("best", tensors)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimizer", tensors).items():
            index, _, entry = name.partition(".")
            state.setdefault(int(index), {})[entry] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


def _rate(step: int, num_steps: int, warm_up: float) -> float:
    """Return the factor of the learning rate at a step: a linear rise to 1 (warm-up), then a linear decay."""
    rising = max(1, round(warm_up * num_steps))
    return min((step + 1) / rising, (num_steps - step) / max(1, num_steps - rising))
