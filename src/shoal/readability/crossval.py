"""Cross-validation: every row is predicted by models that were trained neither on it nor on a duplicate of it.

Each fold chooses word lists, z-scores, the encoder's head and the number of steps from its own training rows alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.kit.encoders.encoder import POOLINGS
from shoal.kit.text.tokens import WordPiece
from shoal.readability import forest
from shoal.readability.batches import OnStep, Scores, predict
from shoal.readability.corpus import Corpus
from shoal.readability.encoder import Pretrained
from shoal.readability.evaluation import (
    BASELINE,
    BLEND,
    ENCODER,
    FOREST,
    FORMULA,
    MEAN,
    MODEL,
    Evaluation,
    blend_weight,
    cross_fitted_blend,
    linear_baselines,
)
from shoal.readability.fit import EncoderSettings, Training
from shoal.readability.folds import Rows, make_folds, split_inner
from shoal.readability.preprocess_config import Bundle
from shoal.readability.work import Result, Work

OURS = (ENCODER, FOREST, BLEND)  # predictions of our models
Stage = Callable[[str], AbstractContextManager[OnStep]]


@dataclass(frozen=True)
class TextPath:
    """Text preprocessing that does not depend on the training rows: vocabulary and tokenizer."""

    vocabulary_sha256: str
    is_lowercase: bool
    tokenizer: WordPiece

    def fit_bundle(self, corpus: Corpus) -> Bundle:
        """Compute word lists, and the features' means and deviations, from the texts; add the tokenizer settings."""
        return forest.fit_bundle(
            corpus.texts,
            vocabulary_sha256=self.vocabulary_sha256,
            is_lowercase=self.is_lowercase,
            max_length=self.tokenizer.max_length,
        )


@dataclass(frozen=True)
class CrossValidation:
    """Out-of-fold predictions, and the settings that the folds chose for the final models.

    ``head`` and ``share`` are chosen on the folds' inner splits, which are held out of the folds' training rows.
    ``head`` is the encoder's head with the lowest RMSE, averaged over the folds. ``share`` is the median, over the
    folds, of the best step divided by the planned number of steps. ``weight`` is the encoder's weight in the blend.
    ``importances`` are the features' permutation importances, averaged over the folds, by feature name. ``rows`` are
    the numbers of the corpus's rows that ``evaluation`` covers.
    """

    evaluation: Evaluation
    rows: Rows
    weight: float
    head: str
    share: float
    chosen: list[dict[str, Any]]
    histories: list[list[dict[str, Any]]]
    importances: dict[str, float]


@dataclass
class CrossValidator:
    """Cross-validation run: trains and predicts fold by fold; stages finished before are read from ``work``."""

    corpus: Corpus
    text_path: TextPath
    load: Callable[[], Pretrained]
    settings: EncoderSettings
    num_trees: int
    forest_kind: str
    seed: int
    work: Work
    stage: Stage

    def run(self, num_folds: int) -> CrossValidation:
        """Run all folds, first the forests, then the encoders."""
        folds = make_folds(self.corpus, num_folds, seed=self.seed)
        encoders = []
        trees: dict[str, list[Result]] = {kind: [] for kind in forest.KINDS}
        for kind, found in trees.items():
            for number, (known, unseen) in enumerate(folds, 1):
                found.append(self._forest(f"{number} of {num_folds}", number, known, unseen, kind))
        for number, (known, unseen) in enumerate(folds, 1):
            encoders.append(self._encoder(f"{number} of {num_folds}", number, known, unseen))
        return self._gather(folds, trees, encoders)

    def _forest(self, which: str, number: int, known: Rows, unseen: Rows, kind: str) -> Result:
        def make() -> Result:
            train, test = self.corpus.take(known), self.corpus.take(unseen)
            bundle = self.text_path.fit_bundle(train)
            trained = forest.train_forest(
                bundle, train.texts, train.targets, seed=self.seed, num_trees=self.num_trees, kind=kind
            )
            inputs = forest.forest_inputs(bundle, test.texts)
            scores = {"scores": np.asarray(trained.predict(inputs), np.float64)}
            if kind != self.forest_kind:
                return Result(scores, {})
            growth = forest.weigh_features(trained, inputs, test.targets, seed=self.seed, on_step=on_step)
            return Result(scores, dict(zip(forest.name_features(bundle), growth.tolist(), strict=True)))

        with self.stage(f"{kind} forest, fold {which}") as on_step:
            return self.work.once(f"{kind}-forest-{number}", make)

    def _encoder(self, which: str, number: int, known: Rows, unseen: Rows) -> Result:
        def make() -> Result:
            train, inner = split_inner(self.corpus.take(known), seed=self.seed)
            tokenizer = self.text_path.tokenizer
            training = Training(self.load().candidates, tokenizer, self.settings, seed=self.seed)
            num_steps = self.settings.count_steps(len(train))
            encoder = training.run(train, inner, num_steps=num_steps, checkpoint=checkpoint, on_step=on_step)
            scores = predict(encoder, tokenizer, self.corpus.take(unseen).texts)[:, 0]
            progress = training.progress
            facts = {
                "chosen": {
                    "fold": number,
                    "head": progress.head,
                    "best_step": progress.best_step,
                    "num_steps": num_steps,
                    "inner_rmse": round(progress.best_rmse, 4),
                },
                "history": progress.history,
            }
            return Result({"scores": scores}, facts)

        checkpoint = self.work.checkpoint(f"encoder-{number}")
        with self.stage(f"encoder, fold {which}") as on_step:
            result = self.work.once(f"encoder-{number}", make)
        checkpoint.remove()
        return result

    def _gather(
        self, folds: list[tuple[Rows, Rows]], trees: Mapping[str, list[Result]], encoders: list[Result]
    ) -> CrossValidation:
        targets, count = self.corpus.targets, len(self.corpus)
        number = np.zeros(count, np.int64)
        encoder, mean = np.zeros(count), np.zeros(count)
        forests = {kind: np.zeros(count) for kind in trees}
        for k, (known, unseen) in enumerate(folds):
            number[unseen] = k
            encoder[unseen] = encoders[k].arrays["scores"]
            for kind, results in trees.items():
                forests[kind][unseen] = results[k].arrays["scores"]
            mean[unseen] = targets[known].mean()
        tree = forests.pop(self.forest_kind)
        evaluation = evaluate_rows(
            self.corpus,
            number,
            encoder=encoder,
            tree=tree,
            mean=mean,
            other={f"{kind} forest": scores for kind, scores in forests.items()},
            formulas=linear_baselines(self.corpus.formulas, targets, folds),
        )
        chosen = [result.facts["chosen"] for result in encoders]
        return CrossValidation(
            evaluation=evaluation,
            rows=np.arange(count),
            weight=blend_weight(encoder, tree, targets),
            head=_choose_head([result.facts["history"] for result in encoders]),
            share=float(np.median([entry["best_step"] / entry["num_steps"] for entry in chosen])),
            chosen=chosen,
            histories=[result.facts["history"] for result in encoders],
            importances=_mean_by_name([result.facts for result in trees[self.forest_kind]]),
        )


def evaluate_rows(
    corpus: Corpus,
    folds: Rows,
    *,
    encoder: Scores,
    tree: Scores,
    mean: Scores,
    formulas: dict[str, Scores],
    other: dict[str, Scores],
) -> Evaluation:
    """Collect the predictions for the rows of ``corpus`` in an `Evaluation`; add the blend of encoder and forest.

    ``other`` is the forest that is not in the blend, by name.
    """
    blend = cross_fitted_blend(encoder, tree, corpus.targets, folds)
    models = {**dict(zip(OURS, (encoder, tree, blend), strict=True)), **other}
    kinds = {**dict.fromkeys(models, MODEL), **dict.fromkeys(formulas, FORMULA), MEAN: BASELINE}
    return Evaluation(
        targets=corpus.targets,
        folds=folds,
        predictions={**models, **formulas, MEAN: mean},
        kinds=kinds,
        num_words=corpus.num_words,
        genres=corpus.genres,
    )


def _choose_head(histories: list[list[dict[str, Any]]]) -> str:
    """Return the head with the lowest RMSE on the inner splits: the best RMSE of each fold, averaged over the folds."""
    best = {
        head: np.mean([min(entry["inner_rmse"][head] for entry in history) for history in histories])
        for head in POOLINGS
    }
    return min(best, key=lambda head: float(best[head]))


def _mean_by_name(folds: list[dict[str, float]]) -> dict[str, float]:
    """Average the importances over the folds; a word counts 0 in a fold whose word lists lack it."""
    sums: dict[str, float] = defaultdict(float)
    for fold in folds:
        for name, value in fold.items():
            sums[name] += value / len(folds)
    return sort_importances(sums)


def sort_importances(importances: Mapping[str, float]) -> dict[str, float]:
    """Sort importances, the greatest first; equal importances are in alphabetical order of their names."""
    return dict(sorted(importances.items(), key=lambda item: (-item[1], item[0])))
