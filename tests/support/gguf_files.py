"""A GGUF file of a tiny Llama, as llama.cpp's converter writes it; the package gguf is not among the tests' own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM


def write_gguf(folder: Path, path: Path) -> Path:
    """Write the model and the byte-level BPE tokenizer in ``folder`` to the file ``path``, in FP32."""
    gguf: Any = importlib.import_module("gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    config, tokenizer = model.config, json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary, special = tokenizer["model"]["vocab"], {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    file = gguf.GGUFWriter(str(path), "llama")
    for name, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "token_list": tokens,
        "token_types": [3 if token in special else 1 for token in tokens],  # control, normal
        "token_merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "chat_template": json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"],
    }.items():
        getattr(file, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        array, heads = tensor.numpy(), 0
        heads = config.num_attention_heads if "q_proj" in key else heads
        heads = config.num_key_value_heads if "k_proj" in key else heads
        if heads:  # llama.cpp pairs neighbours where transformers pairs halves
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        file.add_tensor(names.get_name(key, (".weight",)), array)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
