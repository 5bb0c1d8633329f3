"""Forests on the host answer as the library that trained them, and rounded thresholds part rows as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import treelite
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

from shoal.kit.forests import treelite as forests

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(400, 6)).astype(np.float32).round(2)  # few values: many rows lie on a threshold's edge
TARGETS = ROWS[:, 0] * ROWS[:, 1] + ROWS[:, 2]


def ask(model: Any, rows: NDArray[Any], tmp_path: Path) -> NDArray[Any]:
    """The scores of a model written and read again."""
    model.serialize(str(tmp_path / "checkpoint.tl"))
    return forests.load_forest(tmp_path / "checkpoint.tl")(rows)


@pytest.mark.parametrize(
    "forest",
    [
        RandomForestRegressor(20, max_depth=8, random_state=0),
        GradientBoostingRegressor(n_estimators=20, random_state=0),
        HistGradientBoostingRegressor(max_iter=20, random_state=0),
    ],
    ids=lambda forest: type(forest).__name__,
)
def test_regressors(forest: Any, tmp_path: Path) -> None:
    model = treelite.sklearn.import_model(forest.fit(ROWS, TARGETS))
    found = ask(model, ROWS, tmp_path)
    assert found.shape == (400, 1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, 0], forest.predict(ROWS), rtol=0, atol=1e-5)
    assert ask(model, ROWS[:0], tmp_path).shape == (0, 1)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize(
    "forest",
    [
        RandomForestClassifier(20, max_depth=8, random_state=0),
        ExtraTreesClassifier(20, max_depth=1, random_state=0),
        GradientBoostingClassifier(n_estimators=20, random_state=0),
        HistGradientBoostingClassifier(max_iter=20, random_state=0),
    ],
    ids=lambda forest: type(forest).__name__,
)
def test_classifiers(forest: Any, num_classes: int, tmp_path: Path) -> None:
    classes = np.digitize(TARGETS, np.linspace(-1, 1, num_classes - 1))
    model = treelite.sklearn.import_model(forest.fit(ROWS, classes))
    found, expected = ask(model, ROWS, tmp_path), forest.predict_proba(ROWS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[:, -found.shape[1] :], rtol=0, atol=1e-5)
    assert ask(model, ROWS[:0], tmp_path).shape == (0, found.shape[1])


def test_missing_values_go_where_the_forest_sends_them(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[RNG.random(rows.shape) < 0.2] = np.nan
    forest = HistGradientBoostingRegressor(max_iter=20).fit(rows, TARGETS)
    found = ask(treelite.sklearn.import_model(forest), rows, tmp_path)
    np.testing.assert_allclose(found[:, 0], forest.predict(rows), rtol=0, atol=1e-5)


@settings(max_examples=300)
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([2, 3, 4, 5]),
)
def test_a_rounded_threshold_parts_numbers_as_before(threshold: float, x: float, code: int) -> None:
    (rounded,) = forests.round_thresholds(np.array([threshold]), np.array([code], np.int8))
    compare: Any = {2: np.less, 3: np.less_equal, 4: np.greater, 5: np.greater_equal}[code]
    with np.errstate(over="ignore"):
        near = [np.float32(threshold), *(np.nextafter(np.float32(threshold), np.float32(s)) for s in (-np.inf, np.inf))]
    for value in (np.float32(x), *near):
        assert compare(value, rounded) == compare(np.float64(value), threshold)
