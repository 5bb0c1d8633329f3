"""Corpus to artifact folder: ``preprocess.json``, ``vocab.txt``, ``model.pt``, ``checkpoint.tl``, ``report.json``."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.component.bundle import Bundle, sha256
from shoal.component.wordpiece import WordPiece
from shoal.errors import InputError
from shoal.paths import check_replaceable, exchange
from shoal.progress import OnProgress
from shoal.training import encoder as encoders
from shoal.training import fit, forest
from shoal.training.corpus import Corpus

MAX_LENGTH = 256
DEFAULT_WEIGHT = 0.5  # the plain average
REPORT = "report.json"
LIBRARIES = ("numpy", "scikit-learn", "tokenizers", "torch", "transformers", "treelite")


@dataclass(frozen=True)
class Preset:
    """How much to train.

    ``num_rows`` texts are trained on and ``num_held_out`` more are scored for the report; smaller corpora keep a fifth
    back. The encoder sees ``num_steps`` batches of 16, or ``max_epochs`` times every text where that is less.
    """

    num_rows: int = 1000
    num_held_out: int = 200
    num_steps: int = 63  # one epoch of 1,000 rows
    max_epochs: int = 4
    num_trees: int = forest.NUM_TREES
    max_length: int = MAX_LENGTH


PRESETS = {"quick": Preset()}


@dataclass
class _Clock:
    """Seconds per stage, and word of each to who shows progress."""

    on_progress: OnProgress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[fit.OnStep]:
        start = time.perf_counter()
        self.on_progress(name, 0, 1)
        yield lambda done, total: self.on_progress(name, done, total)
        self.on_progress(name, 1, 1)
        self.seconds[name] = round(time.perf_counter() - start, 2)


def train(
    corpus: Corpus,
    out: Path | str,
    *,
    encoder: str = encoders.SMALL_ENCODER,
    preset: Preset | None = None,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Train encoder and forest, write the artifact folder ``out``, return its report.

    Every artifact is loaded again and compared with what was trained before the folder appears under its name.

    Raises:
        InputError: the corpus is too small, the encoder unknown, or ``out`` holds something else.
    """
    preset, out = preset or PRESETS["quick"], Path(out).resolve()
    check_replaceable(out, REPORT)
    known, held_out = split(corpus, preset, seed)
    clock = _Clock(on_progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        with clock.stage("load encoder"):
            pretrained = encoders.load_encoder(encoder, seed=seed)
            tokenizer, bundle = _write_text_path(aside, pretrained, known, preset)
        with clock.stage("train forest"):
            trees = _train_forest(aside, bundle, known, preset, seed)
        with clock.stage("train encoder") as on_step:
            num_steps = min(preset.num_steps, preset.max_epochs * fit.num_batches(len(known)))
            fit.train_encoder(pretrained.encoder, tokenizer, known, num_steps=num_steps, seed=seed, on_step=on_step)
        with clock.stage("export encoder"):
            ties = {"vocab.txt": sha256(aside / "vocab.txt")}
            encoders.export_encoder(pretrained.encoder, aside / "model.pt", ties=ties)
        with clock.stage("score held-out texts"):
            scores = {
                "encoder": fit.predict(pretrained.encoder, tokenizer, held_out.texts),
                "forest": trees.predict(forest.forest_inputs(bundle, held_out.texts)),
            }
        report = _report(corpus, known, held_out, preset, seed, pretrained.name, scores, clock.seconds)
        report["files"] = {path.name: sha256(path) for path in sorted(aside.iterdir())}
        (aside / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        aside.chmod(0o755)
        exchange(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return report


def split(corpus: Corpus, preset: Preset, seed: int) -> tuple[Corpus, Corpus]:
    """Rows to train on and rows held out, drawn with ``seed``.

    Raises:
        InputError: fewer than ten texts.
    """
    if len(corpus) < 10:
        raise InputError(f"{corpus.name} has {len(corpus)} texts; training needs at least 10.", "Give it more.")
    num_held_out = min(preset.num_held_out, len(corpus) // 5)
    order = np.random.default_rng(seed).permutation(len(corpus))
    known = order[num_held_out:][: preset.num_rows]
    return corpus.take(known), corpus.take(order[:num_held_out])


def _write_text_path(
    out: Path, pretrained: encoders.Pretrained, known: Corpus, preset: Preset
) -> tuple[WordPiece, Bundle]:
    vocabulary = out / "vocab.txt"
    vocabulary.write_text("".join(f"{token}\n" for token in pretrained.vocabulary), encoding="utf-8")
    max_length = min(preset.max_length, pretrained.max_positions)
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": pretrained.is_lowercase,
        "model_max_length": max_length,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    bundle = forest.fit_bundle(
        known.texts,
        vocabulary_sha256=sha256(vocabulary),
        is_lowercase=pretrained.is_lowercase,
        max_length=max_length,
    )
    (out / "preprocess.json").write_text(bundle.dumps(), encoding="utf-8")
    (out / "postprocess.json").write_text(json.dumps({"bert_weight": DEFAULT_WEIGHT}) + "\n", encoding="utf-8")
    tokenizer = WordPiece(pretrained.vocabulary, is_lowercase=pretrained.is_lowercase, max_length=max_length)
    return tokenizer, bundle


def _train_forest(out: Path, bundle: Bundle, known: Corpus, preset: Preset, seed: int) -> Any:
    trees = forest.train_forest(bundle, known.texts, known.targets, seed=seed, num_trees=preset.num_trees)
    inputs = forest.forest_inputs(bundle, known.texts)
    forest.export_forest(trees, inputs, out / "checkpoint.tl", bundle_sha256=sha256(out / "preprocess.json"))
    return trees


def _rmse(scores: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> float:
    return round(float(np.sqrt(np.mean((scores - targets) ** 2))), 4)


def _report(
    corpus: Corpus,
    known: Corpus,
    held_out: Corpus,
    preset: Preset,
    seed: int,
    encoder: str,
    scores: dict[str, np.ndarray[Any, Any]],
    seconds: dict[str, float],
) -> dict[str, Any]:
    blend = DEFAULT_WEIGHT * scores["encoder"] + (1 - DEFAULT_WEIGHT) * scores["forest"]
    return {
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "num_texts": len(corpus)},
        "is_demonstration": corpus.is_demonstration,
        "num_trained_on": len(known),
        "num_held_out": len(held_out),
        "held_out_rmse": {
            **{name: _rmse(values, held_out.targets) for name, values in scores.items()},
            "blend": _rmse(blend, held_out.targets),
            "mean_of_training": _rmse(np.full(len(held_out), known.targets.mean()), held_out.targets),
        },
        "bert_weight": DEFAULT_WEIGHT,
        "contents": {
            "bert-large": f"{encoder}, linear head on the mean of the last hidden states",
            "cuml": f"random forest, {preset.num_trees} trees of depth {forest.MAX_DEPTH}",
        },
        "preset": asdict(preset),
        "seed": seed,
        "seconds": seconds,
        "shoal": shoal.__version__,
        "versions": {
            "python": platform.python_version(),
            **{library: version(library) for library in LIBRARIES},
        },
    }
