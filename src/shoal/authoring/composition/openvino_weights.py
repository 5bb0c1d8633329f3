"""Weights of a language model in OpenVINO's format: made once, beside the repository, and compared with the source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.authoring.composition.weights import OPENVINO_ENGINE, Found, find
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.model_code import read_code
from shoal.errors import ArtifactError, InputError, needs
from shoal.kit.component.files import read_json
from shoal.kit.generation.tokenizer import TOKENIZER
from shoal.kit.generation.weights import CONFIG, INT4, INT8, NONE, OPENVINO, PAGE, Weights, find_weights
from shoal.system.files import MAX_LARGE_TEXT, read_bytes
from shoal.system.machine import library_versions
from shoal.system.paths import aside, check_replaceable, exchange

_MARK = "exported.json"  # in a folder that was made here, and may be replaced
_SMALL = """tokenizer_config.json generation_config.json chat_template.jinja special_tokens_map.json
    added_tokens.json""".split()  # copied if they exist
_PROMPTS = (1, 3, 9, 24)  # tokens per prompt
_TOKENS = 64  # that each is continued by
_BEFORE = 8  # tokens of a prompt before a length at which the computation changes, such as a window of attention
_LONGEST = 1024  # tokens of a prompt; a change after more is not compared, and refused
# Greatest difference of log probabilities: of each token in FP32, and of all tokens' mean in 8 and 4 bits. SmolLM2-135M
# has 0.0001, 0.03 and 0.2.
_MOST = {NONE: 1e-3, INT8: 0.2, INT4: 0.5}


def is_wanted(models: Iterable[ModelConfig]) -> bool:
    """Whether one of the models runs weights in OpenVINO's format."""
    return any(OPENVINO_ENGINE in read_code(model) for model in models if model.backend == "python")


def make_openvino(found: Found, folder: Path, kind: str) -> Found:
    """Return the weights in OpenVINO's format: as they are there, or exported to ``folder``, in ``kind``.

    A folder of an earlier export is taken as it is if it was made of the same files, and replaced if not. The export is
    compared with transformers: ``exported.json`` in it has the difference.

    Raises:
        InputError: the folder holds something else; the decoder cannot be exported; or the weights are in OpenVINO's
            format already, and ``kind`` is given.
        ArtifactError: the export fails, or its answers differ.
        SetupError: a library is not installed.
    """
    if (found.folder / OPENVINO).is_file():
        if kind != NONE:
            what = f"--quantize {kind} has no effect: {found.folder} is in OpenVINO's format already."
            raise InputError(what, "Name the weights in safetensors, or leave --quantize out.")
        return found
    check_replaceable(folder, _MARK)
    wanted = {"weights": kind, "of": str(found.folder), "made_of": _identify(found), "versions": _versions()}
    if not (folder / _MARK).is_file() or read_json(folder / _MARK, "record of an export").get("asked") != wanted:
        with needs("openvino"), needs("llm"):
            _export(find_weights(found.folder), folder, kind, wanted)
    measured = read_json(folder / _MARK, "record of an export")["measured"]
    return replace(find(str(folder)), export={"weights": kind, **measured})


def _identify(found: Found) -> dict[str, Any]:
    """Return what tells these weights from others: digests of small files, sizes and times of large ones."""
    large = sorted(found.folder.glob("*.safetensors"))
    return found.files | {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in large}


def _versions() -> dict[str, str]:
    return library_versions("openvino", "openvino-genai", "nncf", "transformers")


def _export(weights: Weights, folder: Path, kind: str, wanted: dict[str, Any]) -> None:
    import openvino_genai

    from shoal.authoring.composition.exporting import export_openvino
    from shoal.kit.encoders.encoder import quiet_transformers
    from shoal.kit.generation.engines.loading import load_model

    with aside(folder) as made:
        with quiet_transformers():
            model = load_model(weights, "float32")
        export_openvino(model, weights, made / OPENVINO, kind)
        for name in (CONFIG, TOKENIZER, *_SMALL):
            if (weights.folder / name).is_file():
                (made / name).write_bytes(read_bytes(weights.folder / name, MAX_LARGE_TEXT))
        difference, same = _compare(model, weights, made, openvino_genai)
        worst = difference.max() if kind == NONE else difference.mean()
        if not worst <= _MOST[kind]:
            raise ArtifactError(
                f"{type(model).__name__} in OpenVINO's format{'' if kind == NONE else f' and {kind}'} differs from"
                f" transformers by {worst:.2g} in log probabilities; allowed: {_MOST[kind]:g}.",
                "Compose it with --engine hf." if kind == NONE else "Leave --quantize out.",
            )
        files = sorted(each.name for each in made.iterdir())
        measured = {"tokens": len(difference), "log_probs_differ_by": float(f"{worst:.2g}"), "same_tokens": same}
        mark = {"shoal": shoal.__version__, "asked": wanted, "measured": measured, "files": files}
        (made / _MARK).write_text(json.dumps(mark, indent=1), encoding="utf-8")
        exchange(made, folder)


def _find_changes(model: Any, context: int) -> list[int]:
    from shoal.kit.generation.engines.batching import THRESHOLDS, find_sizes, find_turns

    config = model.config.get_text_config().to_dict()
    changes = [*find_sizes(config, context, *THRESHOLDS[1:]), *find_turns(config, context)]
    if far := [size for size in changes if size > _LONGEST]:
        raise ArtifactError(
            f"{type(model).__name__} computes differently after {far[0]} tokens, which is not known of OpenVINO.",
            "Compose it with --engine hf.",
        )
    return changes


def _compare(model: Any, weights: Weights, made: Path, genai: Any) -> tuple[np.ndarray[Any, Any], float]:
    """Let OpenVINO continue prompts, and ask ``model`` for the log probabilities of the tokens that it chose.

    Returns, for each token, how much the two log probabilities differ, or how much less the token has than the most
    probable one, if that is more; and the share of the tokens that are the most probable ones.
    """
    import torch

    random = np.random.default_rng(0)
    sizes = [*_PROMPTS, *(max(1, size - _BEFORE) for size in _find_changes(model, weights.context))]
    prompts = [random.integers(0, weights.vocabulary, size).tolist() for size in sizes]
    prompts = [ids for ids in prompts if len(ids) + _TOKENS <= weights.context]
    scheduling = genai.SchedulerConfig()
    scheduling.num_kv_blocks = sum(len(ids) + _TOKENS for ids in prompts) // PAGE + 2 * len(prompts)
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.eos_token_id, config.logprobs = _TOKENS, True, -1, 1
    try:
        pipeline = genai.ContinuousBatchingPipeline(str(made), scheduling, "CPU", properties)
        tensors = [genai.openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
        handles = [pipeline.add_request(number, tensor, config) for number, tensor in enumerate(tensors)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        answers = [handle.read_all()[0] for handle in handles]
    except Exception as error:  # RuntimeError for everything
        raise ArtifactError(
            f"OpenVINO does not compute {type(model).__name__}: {' '.join(str(error).split())[:300]}",
            "Compose it with --engine hf.",
        ) from error
    differences, same = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(answer.generated_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *answer.generated_ids]])).logits[0, len(ids) - 1 : -1]
        right = torch.log_softmax(logits.double(), -1)
        chosen = right.gather(1, tokens[:, None])[:, 0]
        less = right.max(-1).values - chosen
        differences.append(torch.maximum((chosen - torch.tensor(answer.generated_log_probs)).abs(), less).numpy())
        same.append((less == 0).numpy())
    return np.concatenate(differences), float(np.concatenate(same).mean())
