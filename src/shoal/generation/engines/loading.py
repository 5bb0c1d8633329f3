"""Loading of transformers' models, for the engines that use them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from shoal.errors import ArtifactError
from shoal.generation.weights import Weights

DTYPES = ("float32", "bfloat16", "float16")


def load_model(weights: Weights, dtype: str, threads: int | None = None) -> Any:
    """Load a model on the host, without the sampling settings of its folder: each request has its own.

    ``threads`` is the number of compute threads of this process; None keeps the present number.

    Raises:
        ArtifactError: transformers does not know the model, or the files of the folder do not fit each other.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # of this process, which a server's log would keep
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            weights.folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds, by file and model
        raise ArtifactError(
            f"transformers cannot load {weights.folder}: {error}", "Take all files of the same model."
        ) from error
    model, found = loaded  # since output_loading_info
    if missing := sorted(found["missing_keys"]):  # transformers makes these up
        raise ArtifactError(
            f"{weights.folder} misses {len(missing)} of the model's weights: {missing[0]}.",
            "Take all files of the same model.",
        )
    model.generation_config = GenerationConfig()
    return model.eval()
