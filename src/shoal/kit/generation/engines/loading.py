"""Loading of transformers' models, for the engines that use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging
from transformers.utils.import_utils import is_accelerate_available

from shoal.errors import ArtifactError
from shoal.kit.component.tensors import Device
from shoal.kit.generation.engines.base import AUTO
from shoal.kit.generation.engines.quantising import check_kind, quantize
from shoal.kit.generation.weights import INT4, NONE, Weights, choose_dtype


def find_place(device: Device) -> str:
    """Return torch's name of the device of an instance, such as ``cuda:0``; with KIND_MODEL, the first GPU if any.

    Raises:
        SetupError: the instance is placed on a GPU that this process does not see.
    """
    if device.kind == "model":
        device = replace(device, kind="gpu" if torch.cuda.is_available() else "cpu", index=0)
    there = replace(device, library="torch")
    there.prepare()
    return there.torch_name


def load_model(
    weights: Weights, dtype: str, threads: int | None = None, place: str = "cpu", *, quantized: str = NONE
) -> Any:
    """Load a model onto a device, without the sampling settings of its folder: each request has its own.

    ``dtype`` is one of ``DTYPES``, or ``auto``: the weights' own, but FP32 on a host that does not compute in it.
    ``threads`` is the number of compute threads of this process; None keeps the present number. ``place`` is torch's
    name of the device; without the package accelerate, the weights go through the host's memory. ``quantized`` is
    ``none``, ``int8`` or ``int4``; loading needs the memory of the weights before they are quantised.

    Raises:
        ArtifactError: transformers does not know the model, the files of the folder do not fit each other, or the model
            cannot be quantised so.
        SetupError: the device or this environment cannot compute in ``quantized``.
    """
    if quantized != NONE:
        check_kind(quantized, dtype, place)
        dtype = "bfloat16" if quantized == INT4 else dtype
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # of this process, which a server's log would keep
    options: dict[str, Any] = {
        "dtype": getattr(torch, choose_dtype(weights, dtype, on_gpu=False) if place == "cpu" else dtype, AUTO),
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
        **({} if place == "cpu" or not is_accelerate_available() else {"device_map": place}),
    }
    load: Any = AutoModelForCausalLM.from_pretrained
    fix = "Take all files of the same model."
    if weights.config.get("quantization_config"):
        fix = "They are quantised already: take the weights that they were made from, or compose with --engine vllm."
    try:
        try:
            model, found = load(weights.folder, attn_implementation="sdpa", **options)
        except ValueError as error:  # GPT-J, CodeGen, MPT, BLOOM, Gemma 2: what is right for them is found by trial
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, found = load(weights.folder, attn_implementation="eager", **options)
    except Exception as error:  # of many kinds, by file and model
        raise ArtifactError(f"transformers cannot load {weights.folder}: {error}", fix) from error
    if missing := sorted(found["missing_keys"]):  # transformers makes these up
        raise ArtifactError(f"{weights.folder} misses {len(missing)} of the model's weights: {missing[0]}.", fix)
    model.generation_config = GenerationConfig()
    if model.config.model_type == "reformer" and model.config.pad_token_id is None:
        model.config.pad_token_id = 0  # it fills long prompts up to whole chunks, which are masked
    model = model.to(place).eval()
    if quantized != NONE:
        quantize(model, quantized)
    return model
