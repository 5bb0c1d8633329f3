"""Weights of a transformers model in 8 or 4 bits, by torchao; activations keep the model's dtype."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from shoal.errors import ArtifactError, SetupError, needs
from shoal.kit.generation.weights import INT4, INT8

_GROUPS = (128, 64, 32)  # inputs that share a scale in 4 bits: those of torch's kernel
_MOST_LEFT = 0.1  # share of the weights that may keep its size


def check_kind(kind: str, dtype: str, place: str) -> None:
    """Check, before weights are read, that a model can be quantised so on a device.

    Raises:
        SetupError: torchao is not installed, or it computes in 4 bits neither there nor in this dtype.
    """
    with needs("quantize"):
        importlib.import_module("torchao")
    if kind == INT4 and not place.startswith("cuda"):
        raise SetupError(
            "int4 needs an NVIDIA GPU: torchao computes in 4 bits on no processor.",
            'Set the parameter quantize to "int8", or compose with --placement gpu.',
        )
    if kind == INT4 and dtype not in ("auto", "bfloat16"):
        raise SetupError(f"int4 computes in bfloat16, and dtype is {dtype}.", 'Set dtype to "bfloat16".')


def quantize(model: Any, kind: str) -> None:
    """Quantise a model in place: ``int8``, or ``int4``, in which embeddings and the output layer have 8 bits.

    In 8 bits there is a scale for each row of a matrix, in 4 bits one for each group of 128 inputs, or of 64 or 32
    where 128 do not divide the sizes.

    Raises:
        ArtifactError: more than a tenth of the weights are in other layers, such as fused experts; or the groups do not
            divide a layer.
    """
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis

    layers = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    sizes = {name: weights.numel() for name, weights in model.named_parameters()}
    others = {name: size for name, size in sizes.items() if name.removesuffix(".weight") not in layers}
    left = sum(others.values()) / sum(sizes.values())
    if left > _MOST_LEFT:
        raise ArtifactError(
            f"{type(model).__name__} has {left:.0%} of its weights outside of linear layers, the most in"
            f" {max(others, key=lambda name: others[name])}: {kind} would leave them as they are.",
            'Set the parameter quantize to "none", or use llm-vllm, which has other ways to quantise.',
        )
    head = model.get_output_embeddings()
    rows = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantize_(model, rows, filter_fn=lambda module, _: isinstance(module, nn.Embedding))
    if kind == INT4:
        groups = Int4WeightOnlyConfig(group_size=_find_group(model, head), int4_packing_format="tile_packed_to_4d")
        quantize_(model, groups, filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not head)
    quantize_(
        model,
        Int8WeightOnlyConfig(version=2),
        filter_fn=lambda module, _: isinstance(module, nn.Linear) and (kind == INT8 or module is head),
    )


def _find_group(model: Any, head: Any) -> int:
    """Return the greatest size of groups that divides the inputs of all linear layers but the output's."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    widths = {name: module.in_features for name, module in layers.items() if module is not head}
    for group in _GROUPS:
        if not any(width % group for width in widths.values()):
            return group
    name, width = next((name, width) for name, width in widths.items() if width % _GROUPS[-1])
    raise ArtifactError(
        f"{name} has {width} inputs, and int4 has a scale for each {', '.join(map(str, _GROUPS[:-1]))} or"
        f" {_GROUPS[-1]} of them.",
        'Set the parameter quantize to "int8".',
    )
