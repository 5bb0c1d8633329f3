"""Cross-validation: nothing of a row that is predicted reaches the models that predict it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.kit.encoders.encoder import POOLINGS
from shoal.kit.text.tokens import WordPiece
from shoal.readability import encoder as encoders
from shoal.readability import forest
from shoal.readability.batches import OnStep
from shoal.readability.corpus import Corpus
from shoal.readability.crossval import OURS, CrossValidation, CrossValidator, TextPath
from shoal.readability.evaluation import MEAN, rmse
from shoal.readability.fit import EncoderSettings, Training
from shoal.readability.folds import Rows, make_folds
from shoal.readability.work import Work

NUM_FOLDS = 3


@contextmanager
def quietly(_: str) -> Iterator[OnStep]:
    yield lambda done, total: None


@pytest.fixture(scope="module")
def wordy() -> Corpus:
    """In the words of ``tiny_bert``: each text has a word of its own, one of two that decide the target, and others."""
    generator = np.random.default_rng(0)
    kinds = generator.permutation(np.arange(90) % 2)
    words = ([f"w{1000 + i}"] * 10 + [f"w{500 + kind}"] * 10 + [f"w{k}" for k in generator.integers(0, 300, 10)]
             for i, kind in enumerate(kinds))  # fmt: skip
    return Corpus("wordy", tuple(" ".join(text) for text in words), kinds.astype(np.float64))


def validator(corpus: Corpus, tiny_bert: Path, folder: Path) -> CrossValidator:
    folder.mkdir(exist_ok=True)
    loaded = encoders.load_encoder(str(tiny_bert), seed=0)
    tokenizer = WordPiece(loaded.vocabulary, is_lowercase=False, max_length=64)
    return CrossValidator(
        corpus=corpus, text_path=TextPath("0" * 64, False, tokenizer),
        load=lambda: encoders.load_encoder(str(tiny_bert), seed=0),
        settings=EncoderSettings(max_epochs=20, learning_rate=1e-2, evaluations=1, patience=20), num_trees=20, seed=0,
        forest_kind="random", work=Work(folder, 60), stage=quietly,
    )  # fmt: skip


def cross_validate(corpus: Corpus, tiny_bert: Path, folder: Path) -> CrossValidation:
    return validator(corpus, tiny_bert, folder).run(NUM_FOLDS)


def errors(found: CrossValidation) -> dict[str, float]:
    """RMSEs, as shares of the mean's."""
    evaluation = found.evaluation
    rmses = {name: rmse(values, evaluation.targets) for name, values in evaluation.predictions.items()}
    return {name: value / rmses[MEAN] for name, value in rmses.items()}


def shuffle_within(corpus: Corpus, folds: list[tuple[Rows, Rows]]) -> Corpus:
    """Targets that say nothing of their texts any more, while each fold keeps its own."""
    targets, generator = corpus.targets.copy(), np.random.default_rng(1)
    for _, unseen in folds:
        targets[unseen] = generator.permutation(targets[unseen])
    return replace(corpus, targets=targets)


def test_shuffled_targets_cannot_be_predicted(wordy: Corpus, tiny_bert: Path, tmp_path: Path) -> None:
    shuffled = shuffle_within(wordy, make_folds(wordy, NUM_FOLDS, seed=0))
    found = errors(cross_validate(shuffled, tiny_bert, tmp_path / "work"))
    assert min(found[name] for name in OURS) >= 1
    real = errors(cross_validate(wordy, tiny_bert, tmp_path / "real"))
    assert max(real[name] for name in OURS) < 0.5  # so that the figure above means something


def test_a_leak_would_be_seen(wordy: Corpus, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text twice, with a target that says nothing: only folds that part the two can predict it."""
    shuffled = shuffle_within(wordy, make_folds(wordy, NUM_FOLDS, seed=0))
    twice = replace(shuffled, texts=shuffled.texts * 2, targets=np.concatenate([shuffled.targets] * 2))
    kept = errors(cross_validate(twice, tiny_bert, tmp_path / "kept"))
    assert min(kept[name] for name in OURS) >= 0.98
    monkeypatch.setattr(Corpus, "groups", property(lambda corpus: np.arange(len(corpus))))
    parted = errors(cross_validate(twice, tiny_bert, tmp_path / "parted"))
    assert max(parted[name] for name in OURS) < 0.9


def test_the_encoder_is_trained_and_chosen_without_the_fold(
    wordy: Corpus, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check what the training gets: the training rows without the inner split, the inner split, and nothing else."""
    seen: list[tuple[set[str], set[str]]] = []
    real_run = Training.run

    def watch(self: Training, known: Corpus, inner: Corpus | None, **options: Any) -> encoders.Encoder:
        assert inner is not None
        seen.append((set(known.texts), set(inner.texts)))
        return real_run(self, known, inner, **options)

    monkeypatch.setattr(Training, "run", watch)
    cross_validate(wordy, tiny_bert, tmp_path / "work")
    for (trained, inner), (known, unseen) in zip(seen, make_folds(wordy, NUM_FOLDS, seed=0), strict=True):
        assert not trained & inner
        assert trained | inner == set(wordy.take(known).texts)
        assert not (trained | inner) & set(wordy.take(unseen).texts)


@pytest.mark.corpus
def test_shuffled_targets_of_the_real_corpus(corpus: Corpus) -> None:
    """The forest with 100 trees on a sample of the corpus: no better than the mean."""
    sample = corpus.take(np.random.default_rng(0).permutation(len(corpus))[:300])
    folds = make_folds(sample, 5, seed=0)
    shuffled = shuffle_within(sample, folds)
    scores, means = np.zeros(len(sample)), np.zeros(len(sample))
    for known, unseen in folds:
        train = shuffled.take(known)
        bundle = forest.fit_bundle(train.texts, vocabulary_sha256="0", is_lowercase=True, max_length=256)
        trees = forest.train_forest(bundle, train.texts, train.targets, seed=0)
        scores[unseen] = trees.predict(forest.forest_inputs(bundle, sample.take(unseen).texts))
        means[unseen] = train.targets.mean()
    assert rmse(scores, shuffled.targets) >= rmse(means, shuffled.targets)


def test_a_word_of_the_test_fold_alone_never_enters_the_lists(
    passages: Corpus, tiny_bert: Path, tmp_path: Path
) -> None:
    """A word so frequent that every list that has seen it begins with it."""
    texts = (passages.texts[0] + " zyzzyva" * 5000, *passages.texts[1:])
    planted = replace(passages, texts=texts)
    check = validator(planted, tiny_bert, tmp_path / "work")
    for number, (known, unseen) in enumerate(make_folds(planted, NUM_FOLDS, seed=0), 1):
        names = list(check._forest("", number, known, unseen, "random").facts)
        assert (names[len(forest.STATISTICS)] == "share of “zyzzyva”") == (0 in known)
        assert ("share of “zyzzyva”" in names) == (0 in known)


def test_results_of_the_folds(passages: Corpus, tiny_bert: Path, tmp_path: Path) -> None:
    formulas = {"length": np.array([float(len(text)) for text in passages.texts])}
    corpus = replace(passages, formulas=formulas, genres=tuple("ab"[i % 2] for i in range(100)))
    found = cross_validate(corpus, tiny_bert, tmp_path / "work")
    evaluation = found.evaluation
    assert list(evaluation.predictions) == ["encoder", "forest", "blend", "boosted forest", "length", MEAN]
    assert evaluation.genres == corpus.genres
    assert sorted(np.bincount(evaluation.folds).tolist()) == [33, 33, 34]
    for k, (known, unseen) in enumerate(make_folds(corpus, NUM_FOLDS, seed=0)):
        assert set(evaluation.folds[unseen]) == {k}
        assert set(evaluation.predictions[MEAN][unseen]) == {corpus.targets[known].mean()}
    assert [entry["fold"] for entry in found.chosen] == [1, 2, 3]
    assert all(entry["best_step"] <= entry["num_steps"] for entry in found.chosen)
    assert found.head in POOLINGS
    assert 0 < found.share <= 1
    assert 0 <= found.weight <= 1
    assert list(found.importances.values()) == sorted(found.importances.values(), reverse=True)
    assert {"words per sentence", "share of “the”"} <= found.importances.keys()


def test_finished_folds_are_read(
    passages: Corpus, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cross_validate(passages, tiny_bert, tmp_path / "work")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(forest, "train_forest", never)
    monkeypatch.setattr("shoal.readability.crossval.Training", never)
    second = cross_validate(passages, tiny_bert, tmp_path / "work")
    assert errors(second) == errors(first)
    assert (second.chosen, second.histories, second.importances) == (first.chosen, first.histories, first.importances)
    assert not list((tmp_path / "work").glob("*.safetensors"))
