"""``report.json``: corpus, models, settings, evaluation and environment of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.kit.encoders.encoder import HEADS
from shoal.readability import forest
from shoal.readability.corpus import Corpus
from shoal.readability.crossval import CrossValidation
from shoal.readability.encoder import Pretrained
from shoal.readability.evaluation import FORMULA, by_group, summarise
from shoal.readability.fit import Training
from shoal.system.machine import describe_machine, library_versions

REPORT = "report.json"
LIBRARIES = (
    "cuml-cu12", "cuml-cu13", "lightgbm", "numpy", "scikit-learn", "tokenizers", "torch", "transformers", "treelite",
)  # fmt: skip
_HELD_OUT = ("num_rows", "num_held_out")  # preset fields that are unused with folds


def describe(
    corpus: Corpus,
    known: Corpus,
    pretrained: Pretrained,
    found: CrossValidation,
    training: Training,
    preset: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Build the report as JSON values; the caller adds settings, seconds, memory and files."""
    evaluation = found.evaluation
    name = Path(pretrained.name).name if Path(pretrained.name).is_dir() else pretrained.name  # no path of this machine
    predictions = summarise(evaluation, seed=seed)
    num_folds = preset["num_folds"]
    return {
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "num_texts": len(corpus),
            "num_duplicates": len(corpus) - len(set(corpus.groups.tolist())),
        },
        "is_demonstration": corpus.is_demonstration,
        "num_trained_on": len(known),
        "target_mean": float(known.targets.mean()),
        "unseen_rmse": {entry["name"]: entry["rmse"] for entry in predictions if entry["kind"] != FORMULA},
        "evaluation": {
            "kind": f"{num_folds}-fold cross-validation" if num_folds else "held-out texts",
            "num_folds": max(1, num_folds),
            "num_texts": len(evaluation.targets),
            "predictions": predictions,
            "groups": by_group(evaluation),
        },
        "bert_weight": found.weight,
        "contents": {
            "bert-large": f"{name}, linear head on {HEADS[training.progress.head]}",
            "cuml": forest.describe(preset["num_trees"], preset["forest"]),
        },
        "encoder": {
            "name": name,
            "revision": pretrained.revision or None,
            "sha256": pretrained.sha256,
            "head": training.progress.head,
            "dtype": "bf16" if training.is_bf16 else "fp32",
            "num_steps": training.progress.step,
            "chosen": found.chosen,
            "histories": found.histories,
        },
        "importances": {name: round(value, 5) for name, value in found.importances.items() if round(value, 5)},
        "preset": {name: value for name, value in preset.items() if not (num_folds and name in _HELD_OUT)},
        "seed": seed,
        "machine": {
            **describe_machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "shoal": shoal.__version__,
        "versions": library_versions(*LIBRARIES),
    }
