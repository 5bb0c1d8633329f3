"""TensorRT-LLM's models, with an engine of ours."""

from __future__ import annotations

from tests.support.llm import SENTENCES

PROMPTS = [f"{sentence[:12]} {number}" for number in range(10) for sentence in SENTENCES][:48]
SWAP = {"tensorrt_llm": "llm-hf"}
FOLDERS = ("models/tensorrt_llm", "models/tensorrt_llm_bls")
