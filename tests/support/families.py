"""Tiny models of many families, from transformers' own configurations: a few thousand seeded random weights each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from shoal.encoders.encoder import quiet_transformers
from tests.support.tokenizers import trained

CONTEXT = 128
VOCABULARY = 512
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
_WINDOW = {"sliding_window": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", _WINDOW),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 8, **_EXPERTS}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOW}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, **_WINDOW}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {}),
    "phi3-long": ("Phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 32}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
    "opt": ("OPT", {"num_key_value_heads": None, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "starcoder2": ("Starcoder2", _WINDOW),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {}),
    "stablelm": ("StableLm", {}),
    "diffllama": ("DiffLlama", {}),
    "recurrent-gemma": ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 16}),
}  # fmt: skip
# The way of batching, where it is not continuous; and the reason of those that are refused at the start.
STATIC = ("phi3-long", "stablelm", "diffllama")
REFUSED = {
    "gemma2": "does not support an attention implementation",
    "gpt2": "has max_position_embeddings None",
    "recurrent-gemma": r"cannot serve RecurrentGemmaForCausalLM: .* one request at a time: after a prompt of 1 token",
}


def make_family(name: str, folder: Path) -> Path:
    """Save the model of this family in ``folder``, with a byte-level tokenizer; return the folder."""
    kind, more = FAMILIES[name]
    given = {key: value for key, value in {**_SIZES, **more}.items() if value is not None}
    config = getattr(transformers, f"{kind}Config")(**given)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    trained("byte-level").save(str(folder / "tokenizer.json"))
    return folder
