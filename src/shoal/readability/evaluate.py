"""Evaluation of an artifact folder on labelled texts, with the models as they will be served."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shoal.authoring.composition.compose import compose
from shoal.clients.local import Pipeline, load
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.files import find_changed
from shoal.readability.corpus import Corpus, fingerprint
from shoal.readability.evaluation import BASELINE, BLEND, ENCODER, FOREST, MEAN, MODEL, Evaluation, by_group, summarise
from shoal.readability.report import REPORT
from shoal.readability.train import TRAINED_ON
from shoal.system.progress import OnProgress

ENSEMBLE = "ensemble_all"
OUTPUTS = {ENCODER: "BERT_SCORE", FOREST: "FOREST_SCORE", BLEND: "SCORE"}
BATCH_SIZE = 32
MIN_RESAMPLED = 10  # texts; an interval from fewer would be meaningless
SEEN = ("refuse", "skip", "include")  # what to do with texts that the models were trained on


def evaluate(
    artifacts: Path | str,
    corpus: Corpus,
    *,
    seen: str = "refuse",
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Evaluate the artifacts' models on ``corpus``: RMSE and correlations with intervals, errors by genre and length.

    The pipeline is composed and run in this process, so that the scores equal a server's. Texts that the models were
    trained on, compared without case and spacing, are refused, skipped or included, according to ``seen``.

    Raises:
        InputError: the models were trained on some of the texts and ``seen`` is "refuse", or no text is left.
        ArtifactError: ``artifacts`` is not an artifact folder of shoal, or one of its files was changed.
    """
    artifacts = Path(artifacts)
    report = read_report(artifacts)
    corpus, num_seen = _sort_out(artifacts, corpus, seen)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        on_progress("load the pipeline", 0, 1)
        repository = compose(ENSEMBLE, Path(folder) / "repository", artifacts=artifacts)
        pipeline = load(repository / ENSEMBLE)
        on_progress("load the pipeline", 1, 1)
        try:
            scores = _score(pipeline, corpus, on_progress)
        finally:
            pipeline.close()
    evaluation = Evaluation(
        targets=corpus.targets,
        folds=np.zeros(len(corpus), np.int64),
        predictions={**scores, MEAN: np.full(len(corpus), report["target_mean"])},
        kinds={**dict.fromkeys(scores, MODEL), MEAN: BASELINE},
        num_words=corpus.num_words,
        genres=corpus.genres,
    )
    return {
        "artifacts": {name: report["files"][name] for name in ("model.pt", "checkpoint.tl", "preprocess.json")},
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "num_texts": len(corpus)},
        "num_seen": num_seen,
        "seen": seen,
        "predictions": _summarise(evaluation),
        "groups": by_group(evaluation),
    }


def _summarise(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Summarise the evaluation; intervals are None if there are too few texts to resample."""
    predictions = summarise(evaluation)
    if len(evaluation.targets) < MIN_RESAMPLED:
        for entry in predictions:
            entry |= {name: None for name in entry if name.endswith("_interval")}
    return predictions


def read_report(artifacts: Path) -> dict[str, Any]:
    """Read an artifact folder's report, and check that its files are those of the training.

    Raises:
        ArtifactError: it is not an artifact folder of shoal, or one of its files was changed.
    """
    try:
        report: dict[str, Any] = json.loads((artifacts / REPORT).read_text(encoding="utf-8"))
        files, _ = report["files"], report["target_mean"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(
            f"{artifacts} is not an artifact folder of this shoal version: it has no {REPORT} of a training.",
            "Type: shoal train --out FOLDER",
        ) from None
    for name in find_changed(artifacts, files):
        raise ArtifactError(
            f"{artifacts / name} is not the file that was trained with the others.", "Train again, or restore it."
        )
    return report


def find_trained(artifacts: Path, corpus: Corpus) -> list[int]:
    """Return the numbers of the rows whose texts the models were trained on, compared without case and spacing."""
    trained = set((artifacts / TRAINED_ON).read_text(encoding="utf-8").split())
    return [row for row, text in enumerate(corpus.texts) if fingerprint(text) in trained]


def _sort_out(artifacts: Path, corpus: Corpus, seen: str) -> tuple[Corpus, int]:
    """Return the rows to score, and how many of the corpus's texts the models were trained on."""
    if seen not in SEEN:
        raise InputError(f"seen is {seen!r}.", f"Use one of {', '.join(SEEN)}.")
    rows = find_trained(artifacts, corpus)
    if rows and seen == "refuse":
        shown = ", ".join(str(row + 1) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        raise InputError(
            f"The models of {artifacts} were trained on {len(rows):,} of the {len(corpus):,} texts of {corpus.name}"
            f" (numbers {shown} without the header): their scores would look better than they are.",
            "Give texts that are new to the models, --seen skip to score the others, or --seen include to score all.",
        )
    if rows and seen == "skip":
        corpus = corpus.take(np.setdiff1d(np.arange(len(corpus)), rows))
    if not len(corpus):
        raise InputError("The models were trained on every text of the file: there is nothing left to score.")
    return corpus, len(rows)


def _score(pipeline: Pipeline, corpus: Corpus, on_progress: OnProgress) -> dict[str, np.ndarray[Any, Any]]:
    """Score texts in batches of similar length, since a batch is padded to its longest text."""
    order = np.argsort([len(text) for text in corpus.texts], kind="stable")
    scores = {name: np.zeros(len(corpus)) for name in OUTPUTS}
    on_progress("score", 0, len(corpus))
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        answer = pipeline(excerpt=[corpus.texts[row] for row in rows])
        for name, output in OUTPUTS.items():
            scores[name][rows] = np.asarray(answer[output])[:, 0]
        on_progress("score", start + len(rows), len(corpus))
    return scores
