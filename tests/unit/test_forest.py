from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import ArtifactError, InputError
from shoal.readability import forest
from shoal.readability.corpus import Corpus


def test_word_lists_need_enough_words() -> None:
    with pytest.raises(InputError, match="The texts hold 2 different words; the word lists need 200"):
        forest.list_words(["fish fish swim"])


def test_z_scores_of_the_training_texts(passages: Corpus) -> None:
    bundle = forest.fit_bundle(passages.texts, vocabulary_sha256="0", is_lowercase=True, max_length=256)
    z = forest.forest_inputs(bundle, passages.texts).astype(np.float64)
    np.testing.assert_allclose(z.mean(0), 0, atol=1e-6)
    deviations = z.std(0)
    assert np.all((abs(deviations - 1) < 1e-5) | (deviations == 0))


def test_an_export_that_differs_is_refused(passages: Corpus, tmp_path: Path) -> None:
    class Liar:
        """A forest that says something else than its trees."""

        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def predict(self, x: Any) -> Any:
            return self.real.predict(x) + 1e-4

    bundle = forest.fit_bundle(passages.texts, vocabulary_sha256="0", is_lowercase=True, max_length=256)
    real = forest.train_forest(bundle, passages.texts, passages.targets, seed=0, num_trees=3)
    liar = Liar(real)
    liar.__class__ = type("RandomForestRegressor", (Liar, type(real)), {})
    inputs = forest.forest_inputs(bundle, passages.texts)
    with pytest.raises(ArtifactError, match=r"checkpoint\.tl differs from the trained forest by 0\.0001"):
        forest.export_forest(liar, inputs, tmp_path / "checkpoint.tl", bundle_sha256="0")


def test_the_same_seed_gives_the_same_forest(bundle: Any, passages: Corpus) -> None:
    grown = [forest.train_forest(bundle, passages.texts, passages.targets, seed=3, num_trees=4) for _ in range(2)]
    inputs = forest.forest_inputs(bundle, passages.texts)
    assert np.array_equal(grown[0].predict(inputs), grown[1].predict(inputs))


def test_thresholds_are_single_precision_and_decide_the_same(bundle: Any, passages: Corpus, tmp_path: Path) -> None:
    """An engine that computes in single precision reads the same thresholds as one that does not."""
    import treelite

    grown = forest.train_forest(bundle, passages.texts, passages.targets, seed=0, num_trees=10)
    inputs = forest.forest_inputs(bundle, passages.texts)
    plain = treelite.sklearn.import_model(grown)
    forest.export_forest(grown, inputs, tmp_path / "checkpoint.tl", bundle_sha256="0")
    rounded = treelite.Model.deserialize(str(tmp_path / "checkpoint.tl"))
    num_moved = 0
    for index in range(10):
        before, after = (m.get_tree_accessor(index).get_field("threshold") for m in (plain, rounded))
        assert np.array_equal(after, after.astype(np.float32))
        assert np.all((after <= before) & (np.nextafter(after.astype(np.float32), np.float32(np.inf)) > before))
        num_moved += int((after != before).sum())
    assert num_moved > 0
    np.testing.assert_allclose(
        treelite.gtil.predict(rounded, inputs).reshape(-1), grown.predict(inputs), rtol=0, atol=1e-12
    )
