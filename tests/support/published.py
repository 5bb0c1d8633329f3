"""Checkpoints of no size with trained heads, as they lie in folders of transformers'."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

LABELS = {0: "billing", 1: "urgent", 2: "sonst'ges"}
NUM_TOKENS = 6005  # of the fixture tiny_bert
SIZES: dict[str, Any] = {"vocab_size": NUM_TOKENS, "max_position_embeddings": 64}
# Weights of a size that gives different answers to different texts.
BERT = BertConfig(
    **SIZES, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, initializer_range=0.5
)


def publish(tiny_bert: Path, root: Path) -> Path:
    """A folder for each checkpoint, with the tokenizer of ``tiny_bert``."""
    torch.manual_seed(0)
    distil = DistilBertConfig(**SIZES, dim=16, n_layers=2, n_heads=2, hidden_dim=32, initializer_range=0.5)
    distil.num_labels, distil.id2label = 3, LABELS
    models = {
        "triage": DistilBertForSequenceClassification(distil),
        "score": BertForSequenceClassification(BertConfig.from_dict({**BERT.to_dict(), "num_labels": 1})),
        "unnamed": BertForSequenceClassification(BertConfig.from_dict({**BERT.to_dict(), "num_labels": 4})),
        "many": BertForSequenceClassification(
            BertConfig.from_dict(
                {**BERT.to_dict(), "problem_type": "multi_label_classification", "id2label": LABELS, "num_labels": 3}
            )
        ),
    }
    for name, model in models.items():
        shutil.copytree(tiny_bert, root / name)
        (root / name / "model.safetensors").unlink()
        model.save_pretrained(root / name)
    return root


def publish_roberta(folder: Path) -> Path:
    """A tokenizer that is not a WordPiece, with its encoder."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        ["some words and other words"] * 9, vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        show_progress=False,
    )  # fmt: skip
    trained.save_model(str(folder))
    RobertaTokenizerFast.from_pretrained(folder, model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=80, initializer_range=0.5,
    )  # fmt: skip
    RobertaForSequenceClassification(config).save_pretrained(folder)
    return folder
