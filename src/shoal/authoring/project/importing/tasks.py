"""Tasks of models: what a model is for, as the files of a folder in Hugging Face's layout say it."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from shoal.errors import InputError
from shoal.system.files import read_json

EMBEDDINGS, CLASSIFY, RERANK, PREDICT, GENERATE = TASKS = ("embeddings", "classify", "rerank", "predict", "generate")
# Members of config.json that CrossEncoder of sentence-transformers writes: releases from 4 on, and before.
CROSS_ENCODER, OLD_CROSS_ENCODER = "sentence_transformers", "sbert_ce_default_activation_function"
_ENDS = {  # of the names of architectures
    "ForCausalLM": GENERATE,
    "LMHeadModel": GENERATE,
    "ForSequenceClassification": CLASSIFY,
}
_FOREIGN = {  # those for which shoal has no pipeline
    "ForTokenClassification": "labels each token",
    "ForQuestionAnswering": "finds answers in a text",
    "ForMultipleChoice": "chooses between texts",
    "ForImageClassification": "classifies images",
    "ForConditionalGeneration": "is an encoder with a decoder, or takes pictures or sound",
    "ForSpeechSeq2Seq": "writes down speech",
    "ForCTC": "writes down speech",
    "ForObjectDetection": "finds objects in images",
}
_OTHER_NAMES = {  # of tasks, in other tools
    GENERATE: "chat causal-lm completion completions conversational generation llm text-generation",
    EMBEDDINGS: "embed embedding encode feature-extraction sentence-embedding sentence-similarity",
    CLASSIFY: "classification classifier sentiment-analysis sequence-classification text-classification",
    RERANK: "cross-encoder reranker reranking text-ranking",
    PREDICT: "regression regressor reward score",
}
_NO_PIPELINE = re.compile(  # in names of tasks of the Hugging Face hub
    r"token-class|^ner$|fill-mask|masked-lm|question-answ|summari|transla|text2text|zero-shot|image|object-|depth-|mask-"
    r"|audio|speech|video|visual|document-|table-"
)
_READS = {  # members of config.json of models that read something else than texts
    "vision_config": "pictures",
    "image_size": "pictures",
    "audio_config": "sound",
    "num_mel_bins": "sound",
    "feat_extract_norm": "sound",
}
_TRACE = (
    "For its answers as tensors, trace a module whose forward returns them, such as model(...).logits (torch.jit.trace,"
    " torch.jit.save), and serve that file: shoal serve model.pt"
)


class _Config(NamedTuple):
    """Facts of a ``config.json``: ``method`` is that of quantisation, ``reads`` is "pictures" or "sound"; or empty."""

    architectures: list[str]
    num_labels: int
    is_cross_encoder: bool
    method: str
    reads: str


def check_task(task: str | None) -> None:
    """Check that a task is one of ``TASKS``, or none.

    Raises:
        InputError: it is another.
    """
    if task and task not in TASKS:
        raise InputError(f"Unknown task {task!r:.40}.", f"Known: {', '.join(TASKS)}. {advise_task(task)}".rstrip())


def advise_task(task: str) -> str:
    """Return what to do instead of a task that is not one of ``TASKS``; empty if its name says nothing."""
    name = task.lower().replace("_", "-").replace(" ", "-")
    if _NO_PIPELINE.search(name):
        return f"shoal has no pipeline for {task}. {_TRACE}"
    ours = next((each for each, names in _OTHER_NAMES.items() if name in names.split()), "")
    ours = ours or next(iter(get_close_matches(name, TASKS, 1)), "")
    return f"Did you mean {ours}?" if ours else ""


def check_file(path: object, task: str | None) -> None:
    """Check that the task of a model's file, or of an object, is to predict.

    Raises:
        InputError: it is another, which needs texts.
    """
    if task not in (None, "", PREDICT):
        raise InputError(
            f"--task {task} needs a tokenizer, and {path} has none.",
            "Name the folder of the whole model, or leave the task out: its tensors are served.",
        )


def read_task(folder: Path, task: str | None = None) -> str:
    """Return the task of a model's folder: ``task`` if it is given and fits its files, or what they say.

    Raises:
        InputError: the folder holds no whole model, one for which there is no pipeline or of another task, or its files
            do not say the task.
    """
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds an adapter, not a whole model.",
            "Merge it into its model (merge_and_unload of PEFT), save both with save_pretrained, and name that folder.",
        )
    config = _read_config(folder)
    _check_quantised(folder, config)
    architectures = config.architectures
    kinds = {kind for each in architectures for end, kind in _ENDS.items() if each.endswith(end)}
    shown = ", ".join(architectures) or "not in its config.json"
    if task == GENERATE and GENERATE not in kinds:
        fix = "Name a model that continues text, a ...ForCausalLM; or say what this one is for: --task embeddings"
        raise InputError(f"{folder} is not a decoder: its architecture is {shown}.", fix)
    if task and task != GENERATE and GENERATE in kinds:
        raise InputError(f"--task {task} does not fit {folder}: it is a language model.", "Leave the task out.")
    for each in architectures if task != EMBEDDINGS else ():
        if what := next((what for end, what in _FOREIGN.items() if each.endswith(end)), ""):
            raise InputError(f"{folder} is a {each}, which {what}: shoal has no pipeline for that.", _TRACE)
    if config.reads and not kinds:
        raise InputError(f"{folder} is a {shown}, which takes {config.reads}: shoal has no pipeline for that.", _TRACE)
    if task in (CLASSIFY, PREDICT, RERANK) and architectures and not kinds:
        fix = "Take a checkpoint that was trained for it, or --task embeddings."
        raise InputError(f"{folder} has no trained head for {task}: it is a {shown}.", fix)
    if task:
        return task
    if (folder / "modules.json").is_file():
        return EMBEDDINGS
    if CLASSIFY in kinds and config.num_labels == 1:
        if config.is_cross_encoder:
            return RERANK
        raise InputError(
            f"{folder} gives one score, and its files do not say whether of one text or of two (a cross-encoder).",
            "Say it: --task predict, or --task rerank",
        )
    if not kinds:
        if any(each.endswith("ForMaskedLM") for each in architectures):
            what = f"{folder} is a {shown}, which fills masks: shoal has no pipeline for that."
            fix = "As an encoder, it needs --task embeddings and its pooling. This shows the commands:"
            raise InputError(what, f"{fix} shoal serve {folder} --task embeddings")
        fix = "Say it: --task embeddings"
        raise InputError(f"{folder} does not say what it is for: its architecture is {shown}.", fix)
    return next(iter(kinds))


def _check_quantised(folder: Path, config: _Config) -> None:
    if config.method not in ("", "mxfp4"):  # transformers makes plain weights of MXFP4
        raise InputError(
            f"{folder} is quantised ({config.method}), in a form that shoal's own engines do not read.",
            "Name the folder of the model that it was made from. If it is a language model, vLLM reads it on a GPU:"
            f" shoal compose llm_bls REPOSITORY --weights {folder} --together --swap llm-hf=llm-vllm",
        )


def _read_config(folder: Path) -> _Config:
    try:
        config = read_json(folder / "config.json")
        labels = config.get("id2label") or (0, 1)  # transformers' default are two
        quantised = config.get("quantization_config")
        return _Config(
            [str(each) for each in config.get("architectures") or ()],
            len(labels),
            bool({CROSS_ENCODER, OLD_CROSS_ENCODER} & config.keys()),
            str(quantised.get("quant_method", "unknown")) if quantised else "",
            next((what for key, what in _READS.items() if key in config), ""),
        )
    except (OSError, ValueError, AttributeError, TypeError):
        fix = "Name a folder with config.json, the weights and the tokenizer, or a model's file."
        raise InputError(f"{folder} holds no model: it has no config.json that can be read.", fix) from None
