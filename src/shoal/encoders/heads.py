"""Modules for export: an encoder with a pooled embedding, or with the head that it was trained with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.encoders.encoder import Trunked, pool

SOFTMAX, SIGMOID, NOTHING = "softmax", "sigmoid", ""


class Embedder(Trunked):
    """Pooled last hidden states of a trunk; ``is_normalised``: each row is divided by its Euclidean length."""

    def __init__(self, trunk: nn.Module, pooling: str, *, is_normalised: bool) -> None:
        super().__init__(trunk)
        self.pooling, self.is_normalised = pooling, is_normalised

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings FP32 ``[rows, hidden_size]`` for token ids and mask, INT64 ``[rows, width]``."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled = pool(hidden, mask, self.pooling)
        return nn.functional.normalize(pooled, dim=1) if self.is_normalised else pooled


class Headed(Trunked):
    """Sequence classifier of transformers, split into its trunk and its head.

    The head computes in FP32, as published, whatever the trunk's dtype. ``activation`` turns its logits into
    probabilities. ``model`` cannot be used afterwards.
    """

    def __init__(self, model: Any, activation: str) -> None:
        prefix = model.base_model_prefix
        super().__init__(getattr(model, prefix))
        self._given = _Given()
        setattr(model, prefix, self._given)
        self.head, self.activation = model, activation

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return probabilities or scores FP32 ``[rows, num_labels]`` for ids and mask, INT64 ``[rows, width]``."""
        self._given.box.outputs = _in_fp32(self.trunk(input_ids=ids, attention_mask=mask))
        logits: Tensor = self.head(input_ids=ids, attention_mask=mask).logits
        self._given.box.outputs = None
        if self.activation == SOFTMAX:
            return logits.softmax(dim=-1)
        return logits.sigmoid() if self.activation == SIGMOID else logits


class _Box:
    """Container that hides the trunk's outputs from the tracer."""

    outputs: Any = None


class _Given(nn.Module):
    """Stand-in for the trunk inside a published model: it returns the outputs that the trunk already computed."""

    def __init__(self) -> None:
        super().__init__()
        self.box = _Box()

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.box.outputs


def _in_fp32(outputs: Any) -> Any:
    """Convert the tensors of a model's outputs to single precision, in place."""
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            outputs[name] = value.float()
    return outputs
