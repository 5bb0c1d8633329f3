"""What stands on a published encoder, as modules to export: an embedding, or the head it was trained with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.encoders.encoder import Trunked, pool

SOFTMAX, SIGMOID, NOTHING = "softmax", "sigmoid", ""


class Embedder(Trunked):
    """A trunk, and its last hidden states pooled; ``is_normalised``: each row is divided by its Euclidean length."""

    def __init__(self, trunk: nn.Module, pooling: str, *, is_normalised: bool) -> None:
        super().__init__(trunk)
        self.pooling, self.is_normalised = pooling, is_normalised

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Embeddings FP32 ``[rows, hidden_size]`` of token ids and mask, INT64 ``[rows, width]``."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled = pool(hidden, mask, self.pooling)
        return nn.functional.normalize(pooled, dim=1) if self.is_normalised else pooled


class Headed(Trunked):
    """A model of transformers' for classifying sequences, taken apart into its trunk and its head.

    The head computes as it was published, in FP32, whatever the trunk does. ``activation`` makes probabilities of its
    logits. ``model`` cannot be used afterwards.
    """

    def __init__(self, model: Any, activation: str) -> None:
        prefix = model.base_model_prefix
        super().__init__(getattr(model, prefix))
        self._given = _Given()
        setattr(model, prefix, self._given)
        self.head, self.activation = model, activation

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Probabilities or scores FP32 ``[rows, num_labels]`` of token ids and mask, INT64 ``[rows, width]``."""
        self._given.box.outputs = _in_fp32(self.trunk(input_ids=ids, attention_mask=mask))
        logits: Tensor = self.head(input_ids=ids, attention_mask=mask).logits
        self._given.box.outputs = None
        if self.activation == SOFTMAX:
            return logits.softmax(dim=-1)
        return logits.sigmoid() if self.activation == SIGMOID else logits


class _Box:
    """Holds what no tracer should look for in a module."""

    outputs: Any = None


class _Given(nn.Module):
    """In the trunk's place within a published model: what the trunk gave, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.box = _Box()

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.box.outputs


def _in_fp32(outputs: Any) -> Any:
    """A model's outputs, their floating-point tensors in single precision."""
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            outputs[name] = value.float()
    return outputs
