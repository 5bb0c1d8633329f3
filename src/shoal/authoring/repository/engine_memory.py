"""Memory of a language model's engine, computed from its weights folder before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.versions import list_made
from shoal.errors import ArtifactError
from shoal.kit.generation.weights import (
    DECODER,
    INT4,
    INT8,
    NONE,
    OPENVINO_WEIGHTS,
    PAGE,
    Weights,
    choose_dtype,
    count_cache_pages,
    find_weights,
)
from shoal.system.files import open_regular
from shoal.system.machine import find_gpus, total_memory

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_ROW_BYTES = 5  # scale and zero of a row in 8 bits
_GROUP = 128  # weights that share a scale in 4 bits
HOST = "host"  # a device; the others are GPU 0, ...
_MAX_HEADER = 100_000_000  # bytes, of a safetensors file: the library's own limit


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one instance of an engine: ``weights``, the ``cache`` that it has from its start, ``logits`` of a step.

    The cache of ``llm-onnx``, and of ``llm-hf`` in static batches, is not in it: it grows with the requests. What a
    step computes in between comes on top: it depends on the library, and is small beside them.
    """

    weights: int
    cache: int
    logits: int


def find_engine_memory(config: ModelConfig, *, on_gpu: bool) -> EngineMemory | None:
    """Compute the memory of an engine of shoal's that has weights, but for vLLM; None for any other model.

    vLLM fills the share of the GPU that its argument ``gpu_memory_utilization`` names, whatever the model.
    """
    parameters = config.spec.parameters
    if config.backend != "python" or "slots" not in parameters or "engine_args" in parameters:
        return None
    own = next((version for version in list_made(config) if (version / DECODER).is_file()), None)
    folder = parameters.get("model") or own
    if not folder:
        return None
    try:
        return _compute(find_weights(folder), parameters, on_gpu=on_gpu)
    except (ArtifactError, ValueError, TypeError):  # the rules for weights and parameters report it
        return None


def _compute(weights: Weights, parameters: Mapping[str, str], *, on_gpu: bool) -> EngineMemory:
    slots = int(parameters["slots"])
    context = int(parameters.get("context") or weights.context)
    asked = int(parameters.get("cache_tokens") or 0)
    geometry = weights.config.get("text_config") or weights.config
    if weights.shards == (DECODER,):
        size = sum(path.stat().st_size for path in weights.folder.glob(f"{DECODER}*"))
        return EngineMemory(size, 0, slots * weights.vocabulary * 4)
    kind = parameters.get("quantize") or NONE
    dtype = "bfloat16" if kind == INT4 else parameters.get("dtype") or "auto"
    item = _ITEM_BYTES.get(choose_dtype(weights, dtype, on_gpu=on_gpu), 4)
    reserve = 0 if weights.shards == (OPENVINO_WEIGHTS,) else 2  # transformers keeps two pages for padding
    tokens = (count_cache_pages(slots, context, asked) + reserve) * PAGE
    return EngineMemory(
        _weight_bytes(weights, item, kind) if reserve else (weights.folder / OPENVINO_WEIGHTS).stat().st_size,
        _cache_bytes(geometry, tokens, item) if parameters.get("batching") in (None, "auto", "continuous") else 0,
        slots * weights.vocabulary * item,
    )


def find_excess(engines: Mapping[str, int], gpu_gib: float | None = None) -> tuple[str, str] | None:
    """Return what does not fit its device, and the way out; None if all does, as far as memories are known.

    ``engines`` are bytes by device (``host``, ``GPU 0``). ``gpu_gib`` is the memory of each GPU, by default what the
    driver says of those of this machine.
    """
    gpus = [gpu.memory for gpu in find_gpus()] if gpu_gib is None else []
    for device, needed in engines.items():
        if device == HOST:
            there = total_memory()
        else:
            number = int(device.removeprefix("GPU "))
            there = round((gpu_gib or 0) * 2**30) or (gpus[number] if number < len(gpus) else 0)
        if 0 < there < needed:
            more = ", or llm-vllm with tensor_parallel_size in engine_args" if device != HOST else ""
            return (
                f"Engines take {needed:,} bytes of {'the host' if device == HOST else device}, which has {there:,}.",
                f"Give less context, slots or cache_tokens, or other devices; or --quantize{more}.",
            )
    return None


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file, from its header.

    Raises:
        ArtifactError: the file has no such header.
    """
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MAX_HEADER else {}
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path} is not a safetensors file: {error}", "Download it again.") from error


def _weight_bytes(weights: Weights, item: int, kind: str) -> int:
    """Return the bytes of the weights; see ``quantising.py`` for what int8 and int4 do. OpenVINO's differ little."""
    shapes = {name: shape for file in weights.shards for name, shape in _read_shapes(weights.folder / file).items()}
    if kind == NONE:
        return sum(prod(shape) for shape in shapes.values()) * item
    total = 0
    for name, shape in shapes.items():
        if len(shape) != 2 or not name.endswith(".weight"):
            total += prod(shape) * item
        elif kind == INT8 or shape[0] == weights.vocabulary:
            total += prod(shape) + shape[0] * _ROW_BYTES
        else:
            total += prod(shape) // 2 + prod(shape) // _GROUP * 2 * item
    tables = [shape for shape in shapes.values() if len(shape) == 2 and shape[0] == weights.vocabulary]
    if len(tables) == 1:  # of the embeddings and the output layer alike, which get weights of their own
        total += prod(tables[0]) + weights.vocabulary * _ROW_BYTES
    return total


def _cache_bytes(config: Mapping[str, Any], tokens: int, item: int) -> int:
    """Return the bytes of the keys and values of ``tokens`` tokens in all layers; 0 if the geometry has other names."""
    layers, heads, hidden = (next((config[n] for n in names if n in config), 0) for names in (_LAYERS, _HEADS, _HIDDEN))
    if not (layers and heads and hidden):
        return 0
    head = int(config.get("head_dim") or int(hidden) // int(heads))
    return int(layers) * 2 * int(config.get("num_key_value_heads") or heads) * head * tokens * item
