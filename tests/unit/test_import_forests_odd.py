"""Forests answer as their libraries to unknown codes, NaN and infinity; codes that are not whole are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import skops.io
import xgboost
from sklearn import ensemble

from shoal.errors import InputError
from tests.support.grown import HOLED, SCORES, Array
from tests.support.imports import NUM_ROWS, add, here

pytestmark = pytest.mark.usefixtures("may_start_processes")  # forests are read in a process of their own

TOLERANCE = 1e-5
CODES = (0, 5)  # categories
INF = float("inf")
_RNG = np.random.default_rng(0)
TRAINED = HOLED.copy()
TRAINED[:, 0] = _RNG.integers(0, 40, NUM_ROWS)
TARGETS = SCORES + np.cos(3 * TRAINED[:, 0])
CLASSES = (TARGETS > 0).astype(int)


def draw(numbers: tuple[float, ...]) -> Array:
    """1,000 rows: a half of their values are as in training, the others odd."""
    rows = np.where(np.isnan(TRAINED), 0, TRAINED).astype(np.float32)
    for column in range(rows.shape[1]):
        odd = [
            _RNG.uniform(0, 45, NUM_ROWS),  # not whole
            _RNG.uniform(-1, 0, NUM_ROWS),
            _RNG.integers(-40, 0, NUM_ROWS),
            _RNG.integers(12, 300, NUM_ROWS),  # not known
            10 ** _RNG.uniform(5, 38, NUM_ROWS),
            -(10 ** _RNG.uniform(5, 38, NUM_ROWS)),
            np.full(NUM_ROWS, -0.0),
            *(np.full(NUM_ROWS, number) for number in numbers),
        ]
        chosen = np.choose(_RNG.integers(0, len(odd), NUM_ROWS), odd)
        rows[:, column] = np.where(_RNG.random(NUM_ROWS) < 0.5, chosen, rows[:, column])
    return rows


def from_lightgbm(folder: Path, **given: Any) -> tuple[Any, Callable[[Array], Any]]:
    given = {"verbosity": -1, "num_threads": 1, "min_data_per_group": 5, "cat_smooth": 1, **given}
    data = lightgbm.Dataset(TRAINED, TARGETS, categorical_feature=list(CODES), params={"verbosity": -1})
    booster = lightgbm.train(given, data, 15)
    booster.save_model(folder / "model.txt")
    return folder / "model.txt", booster.predict


def from_xgboost(folder: Path, max_cat_to_onehot: int) -> tuple[Any, Callable[[Array], Any]]:
    kinds = ["c" if feature in CODES else "q" for feature in range(TRAINED.shape[1])]
    data = xgboost.DMatrix(TRAINED, CLASSES, feature_types=kinds, enable_categorical=True)
    given = {"objective": "binary:logistic", "nthread": 1, "max_cat_to_onehot": max_cat_to_onehot}
    booster = xgboost.train(given, data, 15)
    booster.save_model(folder / "model.ubj")
    return folder / "model.ubj", booster.inplace_predict


def from_sklearn(estimator: Any, suffix: str = "") -> Callable[[Path], tuple[Any, Callable[[Array], Any]]]:
    def make(folder: Path) -> tuple[Any, Callable[[Array], Any]]:
        is_classifier = hasattr(estimator, "predict_proba")
        estimator.fit(TRAINED, CLASSES if is_classifier else TARGETS)
        if suffix:
            skops.io.dump(estimator, folder / f"model{suffix}")
        asked = estimator.predict_proba if is_classifier else estimator.predict
        if isinstance(estimator, ensemble.IsolationForest):
            asked = lambda rows: -estimator.score_samples(rows)  # noqa: E731
        return (folder / f"model{suffix}" if suffix else estimator), asked

    return make


_HISTOGRAM = {"max_iter": 15, "categorical_features": list(CODES), "random_state": 0}
NUMBERS = (float("nan"), INF, -INF)
FAMILIES: dict[str, tuple[Callable[[Path], tuple[Any, Callable[[Array], Any]]], tuple[float, ...]]] = {
    "lightgbm": (from_lightgbm, NUMBERS),
    "lightgbm_one_hot": (lambda folder: from_lightgbm(folder, max_cat_to_onehot=100), NUMBERS),
    "lightgbm_no_missing": (lambda folder: from_lightgbm(folder, use_missing=False), NUMBERS),
    "xgboost": (lambda folder: from_xgboost(folder, 1), NUMBERS),
    "xgboost_one_hot": (lambda folder: from_xgboost(folder, 100), NUMBERS),
    "histogram": (from_sklearn(ensemble.HistGradientBoostingRegressor(**_HISTOGRAM)), NUMBERS[:1]),
    "histogram_skops": (from_sklearn(ensemble.HistGradientBoostingClassifier(**_HISTOGRAM), ".skops"), NUMBERS[:1]),
    "histogram_numbers": (from_sklearn(ensemble.HistGradientBoostingRegressor(max_iter=15)), NUMBERS),
    "forest": (from_sklearn(ensemble.RandomForestClassifier(15, max_depth=8, random_state=0)), NUMBERS[:1]),
    "extra_skops": (from_sklearn(ensemble.ExtraTreesRegressor(15, max_depth=8), ".skops"), NUMBERS[:1]),
    "isolation": (from_sklearn(ensemble.IsolationForest(n_estimators=15, random_state=0)), NUMBERS),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_are_answered_as_in_the_library_or_refused(family: str, tmp_path: Path) -> None:
    make, numbers = FAMILIES[family]
    source, asked = make(tmp_path)
    rows = draw(numbers)
    add(tmp_path, source, "leaf")
    if family.startswith(("lightgbm", "xgboost")) or family in ("histogram", "histogram_skops"):
        codes = rows[:, list(CODES)]
        is_odd = np.isinf(codes) | (~np.isnan(codes) & (codes != np.floor(codes)))
        with pytest.raises(InputError, match=r"input__0\[0\] has .* for feature [05], a category code; it must be"):
            here(tmp_path, "leaf", input__0=rows[is_odd.any(axis=1)][:1])
        rows[:, list(CODES)] = np.where(is_odd, 3, codes)
    expected = np.asarray(asked(rows), np.float64).reshape(NUM_ROWS, -1)
    found = here(tmp_path, "leaf", input__0=rows)["output__0"][:, -expected.shape[1] :]
    assert len(np.unique(expected.round(4))) > 50  # the odd values decide
    assert (np.abs(found - expected) <= TOLERANCE * np.maximum(1, np.abs(expected))).all()
