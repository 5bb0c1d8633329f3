"""A language model that counts: after each number below 99 it writes the next one, and after 99 the end token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.kit.encoders.encoder import quiet_transformers

END = "<|endoftext|>"
MOST = 99


def make_counter(folder: Path) -> Path:
    """Write a Llama with hand-made weights, and a tokenizer with GPT-2's files, vocab.json and merges.txt, as well.

    The only layer adds nothing to a token's embedding, one number of its own, and the head reads the successor there.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    numbers = [f"Ġ{number}" for number in range(MOST + 1)]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *numbers, END]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [(word[:-1], word[-1]) for word in numbers]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), encoding="utf-8")

    size = len(words) + -len(words) % 8
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=256, eos_token_id=vocabulary[END], bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    follows = {"1": "Ġ2", f"Ġ{MOST}": END} | {f"Ġ{number}": f"Ġ{number + 1}" for number in range(MOST)}
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.ndim == 1 else 0.0)  # norms, and matrices
        for word, number in vocabulary.items():
            model.model.embed_tokens.weight[number, number] = 1.0
            model.lm_head.weight[vocabulary[follows.get(word, word)], number] = 1.0
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder
