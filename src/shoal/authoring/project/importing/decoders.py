"""Import of decoders of transformers: export to ONNX, for shoal's language-model engine on ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal.authoring.composition.exporting import CachedDecoder
from shoal.authoring.composition.weights import PARAMETER
from shoal.authoring.composition.weights import find as find_weights_or_download
from shoal.authoring.project.importing.imported import Imported, stage
from shoal.authoring.repository.config import read_config
from shoal.errors import ArtifactError, InputError, ShoalError, needs
from shoal.kit.encoders.encoder import quiet_transformers
from shoal.kit.encoders.export import export_onnx
from shoal.kit.generation.engines.loading import load_model
from shoal.kit.generation.tokenizer import TOKENIZER
from shoal.kit.generation.weights import CONFIG, DECODER, Weights, find_weights
from shoal.system.files import MAX_LARGE_TEXT, read_bytes
from shoal.system.paths import shipped_root
from shoal.system.progress import OnProgress

with needs("serve"):
    from shoal.kit.generation.engines.onnx import INPUTS, Decoder

TOLERANCE = 1e-4  # between logits, relative to the greatest one
_LEAF = "models/llm-onnx"  # shoal's model folder to copy
_SMALL = """tokenizer_config.json generation_config.json chat_template.jinja special_tokens_map.json
    added_tokens.json""".split()  # copied if they exist
_PROMPTS = (1, 3, 9, 24)  # tokens per prompt
_STEPS = 12


def draft_decoder(
    source: Path | str, name: str, *, scratch: Path, on_progress: OnProgress = lambda stage, done, total: None
) -> Imported:
    """Draft a copy of shoal's model folder ``llm-onnx`` with another decoder.

    ``source`` is a folder with safetensors files, or the name ``OWNER/NAME`` of a model on the Hugging Face hub. The
    copy's version folder gets ``decoder.onnx`` in FP32, ``config.json`` and ``tokenizer.json``; the option
    ``--weights`` of shoal accepts such a folder. The exported decoder must give the greedy tokens and the logits of the
    original model.

    Raises:
        InputError: ``source`` is not a decoder, or the decoder has no cache of keys and values.
        ArtifactError: the folder is incomplete or damaged, or its weights are pickled; the export fails; or the
            exported decoder's answers differ.
    """
    with stage(on_progress, f"loading {source}"):
        weights = find_weights(find_weights_or_download(str(source)).folder)
        _check_is_decoder(weights)
        with quiet_transformers():
            model = load_model(weights, "float32")
    with stage(on_progress, f"exporting {DECODER}"):
        own = model.config._experts_implementation
        model.set_experts_implementation("batched_mm")  # ONNX has no form for the others
        _export(model, weights, scratch / DECODER)
        model.set_experts_implementation(own)  # the comparison is with this one
    copied = [file for file in (CONFIG, TOKENIZER, *_SMALL) if (weights.folder / file).is_file()]
    for file in copied:
        (scratch / file).write_bytes(read_bytes(weights.folder / file, MAX_LARGE_TEXT))
    with stage(on_progress, "comparing its answers"):
        decoder = Decoder(find_weights(scratch), threads=torch.get_num_threads())
        try:
            worst = _compare(decoder, model, weights)
        except ShoalError:
            raise
        except Exception as error:  # of ONNX Runtime, where the trace holds for its own sizes alone
            raise ArtifactError(
                f"{type(model).__name__} does not compute as ONNX: {str(error).partition(chr(10))[0]}",
                "Compose it with --engine hf.",
            ) from error
    leaf = shipped_root() / _LEAF
    message = read_config(leaf).message
    message.name = name
    del message.parameters[PARAMETER]
    message.parameters["artifacts"].string_value = f"{DECODER} {CONFIG} {TOKENIZER}"
    said = (
        f"{type(model).__name__} from {weights.folder.name}: {weights.vocabulary} tokens, context {weights.context}",
        f"the file was read again: over {_STEPS} greedy tokens of {len(_PROMPTS)} prompts its tokens are the model's,"
        f" and its logits differ by {worst:.1g} of the greatest at most",
    )
    files = {f"1/{path.name}": path for path in sorted(scratch.iterdir())}
    return Imported(message, {"1/model.py": leaf / "1" / "model.py", **files}, said)


def _check_is_decoder(weights: Weights) -> None:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    found = weights.config.get("architectures")
    named = [*map(str, found)] if isinstance(found, list) else []
    if weights.shards == (DECODER,):
        raise InputError(f"{weights.folder} has {DECODER}, and no safetensors.", "Name the folder it was made from.")
    if known.isdisjoint(named):
        raise InputError(
            f"{weights.folder} is not a decoder: its architecture is {', '.join(named) or 'not in its config.json'}.",
            "Name a model that continues text, a ...ForCausalLM; for an encoder, say its task: --task embeddings",
        )


def _export(model: Any, weights: Weights, path: Path) -> None:
    """Export the decoder to the ONNX file ``path``."""
    decoder = CachedDecoder(model, is_last=True)
    with torch.inference_mode(), quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trace keeps branches on sizes; the comparison sees whether they matter
        given = decoder.example(weights)
        past = given[len(INPUTS) :]
        names = [f"{layer}.{part}" for layer in range(len(past) // 2) for part in ("key", "value")]
        before, after = ([f"{when}.{name}" for name in names] for when in ("past_key_values", "present"))
        rows, cached = {0: "rows"}, {2: "past"}
        axes = {name: rows | {1: "all" if name == INPUTS[1] else "new"} for name in INPUTS}
        axes |= {"logits": rows, **dict.fromkeys(before, rows | cached), **{name: rows | {2: "all"} for name in after}}
        shown = {"input_names": [*INPUTS, *before], "output_names": ["logits", *after], "dynamic_axes": axes}
        export_onnx(decoder, given, path, type(model).__name__, "Compose it with --engine hf.", **shown)


def _compare(decoder: Decoder, model: Any, weights: Weights) -> float:
    """Compare the exported decoder with ``model`` while both continue the same prompts greedily.

    The decoder computes all prompts in one padded batch with a cache; ``model`` computes each prompt alone and without
    a cache. Return the greatest difference between logits, relative to the greatest logit of its step.

    Raises:
        ArtifactError: the difference is above the tolerance; or the decoder chooses another token than ``model``, and
            ``model`` prefers its own token by more than the tolerance.
    """
    random = np.random.default_rng(0)
    rows = [random.integers(0, weights.vocabulary, size).tolist() for size in _PROMPTS]
    widest = max(_PROMPTS)
    ids = np.array([[0] * (widest - len(row)) + row for row in rows])
    caches = decoder.start(len(rows))
    worst = 0.0
    for _ in range(_STEPS):
        got, caches = decoder.run(ids, np.array([*map(len, rows)]), caches)
        with torch.inference_mode():
            wanted = np.stack([model(torch.tensor([row])).logits[0, -1].numpy() for row in rows])
        worst = max(worst, float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max())))
        tokens = wanted.argmax(1)
        lead = wanted.max(1) - wanted[np.arange(len(rows)), got.argmax(1)]
        if not worst <= TOLERANCE or lead.max() > TOLERANCE:
            raise ArtifactError(
                f"{DECODER} differs from {type(model).__name__} by {worst:g} of the greatest logit.",
                f"Allowed: {TOLERANCE:g}. Compose it with --engine hf.",
            )
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        ids = tokens[:, None]
    return worst
