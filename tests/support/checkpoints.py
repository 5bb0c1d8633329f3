"""Files of a small checkpoint."""

from __future__ import annotations

CONFIG = {"vocab_size": 6, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
TOKENIZER = {
    "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 1, "content": "</s>"}, {"id": 5, "content": "<|end|>"}],
    "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3}},
}
