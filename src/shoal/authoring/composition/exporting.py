"""Decoders of transformers in a form that a trace can hold, and their export to OpenVINO's format.

OpenVINO GenAI keeps keys and values itself, in pages. It finds their places in a model that hides them as states, each
read through the input ``beam_idx``, and by the names of the other inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shoal.errors import ArtifactError, InputError
from shoal.kit.encoders.encoder import quiet_transformers
from shoal.kit.generation.weights import INT4, NONE, Weights

INPUTS = ("input_ids", "attention_mask", "position_ids")


class CachedDecoder(torch.nn.Module):
    """A decoder whose ``forward`` takes and returns only tensors.

    ``past`` are the cached keys of the first layer, its cached values, the keys of the second layer, and so on. It
    returns the logits of all tokens or, if ``is_last``, of the last one, and the caches with the new tokens.
    """

    def __init__(self, model: Any, *, is_last: bool) -> None:
        super().__init__()
        self.model, self.is_last = model, is_last

    def forward(self, ids: Any, mask: Any, positions: Any, *past: Any) -> tuple[Any, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer: Any = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        takes = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        out = self.model(**takes, use_cache=True, logits_to_keep=int(self.is_last))
        layers = getattr(getattr(out, "past_key_values", None), "layers", ())
        if not layers or not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in layers):
            raise InputError("it keeps another state")
        logits = out.logits[:, -1] if self.is_last else out.logits
        return (logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values)))

    def example(self, weights: Weights) -> tuple[Any, ...]:
        """Return inputs for a trace, with padding and a cache; no dimension has size 0 or 1, a constant for traces.

        Raises:
            InputError: the decoder keeps another state than keys and values in each layer.
        """
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ids = torch.arange(16).reshape(2, 8) % weights.vocabulary
        kind = type(self.model).__name__
        try:
            _, *past = self(ids[:, :5], mask[:, :5], positions[:, :5])
        except Exception as error:  # of many kinds, by model
            reason = "" if isinstance(error, IndexError | InputError) else f" ({str(error).partition(chr(10))[0]})"
            raise InputError(
                f"{kind} keeps another state than a cache of keys and values in each layer{reason}.",
                "Compose it with --engine hf.",
            ) from error
        return (ids[:, 5:], mask, positions[:, 5:], *past)


def export_openvino(model: Any, weights: Weights, path: Path, kind: str) -> None:
    """Export a decoder in FP32 to OpenVINO's format, with its weights in 8 or 4 bits where ``kind`` says so.

    ``path`` ends with ``.xml``; the weights are in the file beside it that ends with ``.bin``.

    Raises:
        InputError: the decoder keeps another state than keys and values in each layer.
        ArtifactError: it cannot be traced or converted.
    """
    import openvino

    own = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")  # a trace has no form for the others
    decoder = CachedDecoder(model, is_last=False)
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trace keeps branches on sizes; the comparison sees whether they matter
        given = decoder.example(weights)
        try:
            traced = torch.jit.trace(decoder, given, check_trace=False)
            made = openvino.convert_model(traced, example_input=given)
            _hide_caches(made, given[len(INPUTS) :])
        except Exception as error:  # of many kinds, by model
            raise ArtifactError(
                f"{type(model).__name__} cannot be converted to OpenVINO: {' '.join(str(error).split())[:300]}",
                "Compose it with --engine hf.",
            ) from error
    model.set_experts_implementation(own)
    if kind != NONE:
        made = _compress(made, kind)
    openvino.save_model(made, path, compress_to_fp16=False)


def _hide_caches(made: Any, past: Sequence[Any]) -> None:
    """Name the inputs and outputs, and turn the caches into states that are empty at first."""
    import openvino
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    names = [f"{layer}.{part}" for layer in range(len(past) // 2) for part in ("key", "value")]
    before, after = ([f"{when}.{name}" for name in names] for when in ("past_key_values", "present"))
    for port, name in zip(made.inputs, (*INPUTS, *before), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
    for port, name in zip(made.outputs, ("logits", *after), strict=True):
        port.get_tensor().set_names({name})
    for name in INPUTS:
        made.input(name).get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
    chosen = opset13.parameter(openvino.PartialShape([-1]), openvino.Type.i32, "beam_idx")
    chosen.output(0).get_tensor().set_names({"beam_idx"})
    made.add_parameters([chosen])
    for name, cache in zip(before, past, strict=True):
        port = made.input(name)
        port.get_node().set_partial_shape(openvino.PartialShape([-1, cache.shape[1], -1, cache.shape[3]]))
        readers = port.get_target_inputs()
        rows = opset13.gather(port, chosen, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(rows.output(0))
    made.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made, dict(zip(before, after, strict=True)))
    rows = opset13.gather(opset13.shape_of(made.input(INPUTS[0]), "i64"), opset13.constant([0]), opset13.constant(0))
    for state in made.get_ops():
        if state.get_type_name() == "ReadValue":
            _, heads, _, size = state.get_output_partial_shape(0)
            rest = opset13.constant(np.array([heads.get_length(), 0, size.get_length()], np.int64))
            zero = opset13.constant(0.0, dtype=state.get_output_element_type(0))
            state.set_arguments([opset13.broadcast(zero, opset13.concat([rows, rest], axis=0))])
    made.validate_nodes_and_infer_types()


def _compress(made: Any, kind: str) -> Any:
    import nncf

    if kind == INT4:
        fallback = nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST  # smaller groups where 64 do not divide
        )
        mode = nncf.CompressWeightsMode.INT4_ASYM
        return nncf.compress_weights(made, mode=mode, group_size=64, advanced_parameters=fallback)
    return nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT8_ASYM)
