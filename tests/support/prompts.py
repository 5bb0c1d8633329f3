"""Requests to the component of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shoal.errors import ShoalError
from shoal.kit.component.base import Component
from shoal.kit.component.spec import Array

TEXT = "The cat sat on the mat. Olá, 😀! [INST] STOP \n" * 3
CHAT = [{"role": "user", "content": "The cat"}]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE, as those of Llama 3 and Qwen, with a token of begin."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def texts(*values: str | bytes) -> Array:
    return np.array([[v.encode() if isinstance(v, str) else v for v in values]], np.object_)


def ask(component: Component, **inputs: Any) -> dict[str, Array]:
    (answer,) = component.process([inputs])
    if isinstance(answer, ShoalError):
        raise answer
    return dict(answer)
