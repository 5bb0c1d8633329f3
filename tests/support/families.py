"""Tiny models of many families, from transformers' own configurations: a few thousand seeded random weights each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from shoal.kit.encoders.encoder import quiet_transformers
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
_ALL_HEADS = {"num_key_value_heads": None}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, **_ALL_HEADS}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
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
    "opt": ("OPT", {"num_key_value_heads": None, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": CONTEXT}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4, "num_key_value_heads": None}),
    "falcon": ("Falcon", {"num_key_value_heads": None}),
    "starcoder2": ("Starcoder2", _WINDOW),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {}),
    "stablelm": ("StableLm", {}),
    "diffllama": ("DiffLlama", {}),
    "gpt2": ("GPT2", _GPT),
    "gpt-bigcode": ("GPTBigCode", _GPT),
    "gpt-j": ("GPTJ", {**_GPT, "rotary_dim": 8}),
    "codegen": ("CodeGen", {**_GPT, "rotary_dim": 8}),
    "gpt-neo": (
        "GPTNeo",
        {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16, **_ALL_HEADS},
    ),
    "gpt-neox-japanese": ("GPTNeoXJapanese", {"intermediate_multiple_size": 2, **_ALL_HEADS}),
    "gpt-oss": ("GptOss", {"head_dim": 8, **_LOCAL, **_WINDOW}),
    "biogpt": ("BioGpt", _ALL_HEADS),
    "xglm": ("XGLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4, **_ALL_HEADS}),
    "persimmon": ("Persimmon", _ALL_HEADS),
    "mamba": ("Mamba", {"state_size": 8, **_ALL_HEADS}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2, **_ALL_HEADS}),
    "rwkv": ("Rwkv", {"context_length": CONTEXT, **_ALL_HEADS}),
    "jamba": (
        "Jamba",
        {
            "num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("Bamba", {"attn_layer_indices": [1], **_MAMBA, "mamba_n_groups": 1}),
    "falcon-h1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "granite-moe": ("GraniteMoe", _LOCAL),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**_LOCAL, **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16},
    ),
    "lfm2": ("Lfm2", {"full_attn_idxs": [1]}),
    "minimax": ("MiniMax", {**_LOCAL, "head_dim": 8, "block_size": 16}),
    "nemotron": ("Nemotron", {}),
    "jetmoe": ("JetMoe", {"kv_channels": 8, **_LOCAL}),
    "deepseek-v2": ("DeepseekV2", _LATENT),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "dots1": ("Dots1", _ROUTED),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "glm4-moe": ("Glm4Moe", {"head_dim": 8, **_ROUTED}),
    "llama4": (
        "Llama4Text",
        {
            "head_dim": 8, "num_local_experts": 2, "interleave_moe_layer_step": 1, "attention_chunk_size": 32,
            "intermediate_size_mlp": 48,
        },
    ),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "head_dim": 8, **_EXPERTS, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "phimoe": ("Phimoe", _LOCAL),
    "cohere2": ("Cohere2", _WINDOW),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", _WINDOW),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {}),
    "exaone4": ("Exaone4", _WINDOW),
    "ernie4.5": ("Ernie4_5", {"head_dim": 8}),
    "seed-oss": ("SeedOss", {"head_dim": 8}),
    "arcee": ("Arcee", {}),
    "helium": ("Helium", {"head_dim": 8}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "bitnet": ("BitNet", {}),
    "ministral": ("Ministral", {"head_dim": 8, **_WINDOW}),
    "apertus": ("Apertus", {}),
    "vaultgemma": ("VaultGemma", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOW}),
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
            "vocab_size_per_layer_input": VOCABULARY, "activation_sparsity_pattern": [0.0, 0.0, 0.0], **_WINDOW,
        },
    ),
    "recurrent-gemma": ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 16}),
}  # fmt: skip
# The way of batching, where it is not continuous; and the reason of those that are refused at the start. The table in
# docs/language-models.md has them, too.
STATIC = frozenset({
    "bamba", "bloom", "codegen", "deepseek-v2", "deepseek-v3", "diffllama", "falcon", "falcon-h1", "gemma2", "gpt-j",
    "gpt-neo", "gpt-neox-japanese", "granite-hybrid", "jamba", "jetmoe", "lfm2", "llama4", "mamba", "mamba2", "minimax",
    "mpt", "nemotron", "phi3-long", "qwen3-next", "stablelm", "vaultgemma", "xglm",
})  # fmt: skip
ALONE = frozenset({"rwkv"})
# The reason why a family is not exported to ONNX.
_STATE, _ALONE, _OPERATOR = "keeps another state", "does not compute as ONNX", "cannot be exported to ONNX: .*"
NOT_EXPORTED = {
    **dict.fromkeys(
        (
            "bamba", "falcon-h1", "granite-hybrid", "jamba", "lfm2", "mamba", "mamba2", "minimax", "qwen3-next",
            "recurrent-gemma", "rwkv",
        ),
        _STATE,
    ),
    "jetmoe": _ALONE, "phi3-long": f"{_OPERATOR}aten::copy", "diffllama": f"{_OPERATOR}aten::rms_norm",
    "deepseek-v2": f"{_OPERATOR}aten::polar", "llama4": f"{_OPERATOR}aten::polar", "apertus": f"{_OPERATOR}aten::expm1",
}  # fmt: skip
REFUSED = {
    "recurrent-gemma": r"cannot serve RecurrentGemmaForCausalLM: .* one request at a time: after a prompt of 1 token"
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
