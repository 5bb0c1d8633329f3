"""Forests of each library, format and task, and what their own library says of a thousand rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import treelite
import xgboost
from numpy.typing import NDArray
from sklearn import ensemble

NUM_ROWS, NUM_FEATURES = 1000, 6
_RNG = np.random.default_rng(0)
ROWS = _RNG.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(np.float32).round(2)  # few values: many lie on an edge
ROWS[:, 5] = _RNG.integers(0, 12, NUM_ROWS)  # codes, for those that split on categories
SCORES = ROWS[:, 0] * ROWS[:, 1] + np.sin(ROWS[:, 5])
COUNTS = _RNG.poisson(np.exp(SCORES / 4)).astype(np.float64)
SHARES = 1 / (1 + np.exp(-SCORES))
BINARY = (SCORES > 0).astype(int)
THREE = np.digitize(SCORES, [-0.5, 0.5])
GROUPS = [50] * 20
HOLED = ROWS.copy()
HOLED[_RNG.random(ROWS.shape) < 0.1] = np.nan
NAMES = np.array(["easy", "hard", "odd"])

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """``make`` gives a source and what its library says of ``rows``, ``[rows]`` or ``[rows, classes]``."""

    make: Callable[[Path], tuple[Any, Array]]
    rows: Array


def _xgboost(objective: str, targets: Array, suffix: str = "", *, rows: Array = HOLED, **more: Any) -> Case:
    given = {"objective": objective, "max_depth": 4, "nthread": 1, "max_cat_to_onehot": 3, **more}
    categories, groups = given.pop("categories", None), given.pop("groups", None)

    def make(folder: Path) -> tuple[Any, Array]:
        data = xgboost.DMatrix(rows, targets, feature_types=categories, enable_categorical=bool(categories))
        if objective == "survival:aft":
            data.set_float_info("label_lower_bound", targets)
            data.set_float_info("label_upper_bound", targets)
        if groups:
            data.set_group(groups)
        booster = xgboost.train(given, data, 15)
        path = folder / f"model{suffix}"
        if suffix:
            booster.save_model(path)
        said = booster.predict(xgboost.DMatrix(rows, feature_types=categories, enable_categorical=bool(categories)))
        return (path if suffix else booster), said

    return Case(make, rows)


def _lightgbm(objective: str, targets: Array, *, rows: Array = HOLED, is_file: bool = True, **more: Any) -> Case:
    given = {"objective": objective, "num_leaves": 12, "verbosity": -1, "num_threads": 1, "seed": 0, **more}
    groups, categories = given.pop("groups", None), given.pop("categories", "auto")

    def make(folder: Path) -> tuple[Any, Array]:
        data = lightgbm.Dataset(rows, targets, group=groups, categorical_feature=categories, params={"verbosity": -1})
        booster = lightgbm.train(given, data, 15)
        path = folder / "model.txt"
        if is_file:
            booster.save_model(path)
        return (path if is_file else booster), np.asarray(booster.predict(rows))

    return Case(make, rows)


def _sklearn(
    estimator: Any, targets: Array, suffix: str = "", *, rows: Array = ROWS, ask: str = "predict_proba"
) -> Case:
    """An estimator, or the file that skops or Treelite makes of it."""

    def make(folder: Path) -> tuple[Any, Array]:
        estimator.fit(rows, targets)
        said = np.asarray(getattr(estimator, ask)(rows)) * (-1 if ask == "score_samples" else 1)
        path = folder / f"model{suffix}"
        if suffix == ".skops":
            import skops.io

            skops.io.dump(estimator, path)
        elif suffix == ".tl":
            treelite.sklearn.import_model(estimator).serialize(str(path))
        return (path if suffix else estimator), said

    return Case(make, rows)


def _regress(estimator: Any, targets: Array = SCORES, suffix: str = "", *, rows: Array = ROWS) -> Case:
    return _sklearn(estimator, targets, suffix, rows=rows, ask="predict")


_CODES = ["q"] * 5 + ["c"]
_SMALL = {"n_estimators": 15, "max_depth": 5, "random_state": 0}
SERVED = {  # on a real server: each format and task
    "xgboost_json": _xgboost("reg:squarederror", SCORES, ".json"),
    "xgboost_ubj": _xgboost("binary:logistic", BINARY, ".ubj"),
    "xgboost_three": _xgboost("multi:softprob", THREE, ".json", num_class=3),
    "lightgbm_score": _lightgbm("regression", SCORES),
    "lightgbm_two": _lightgbm("binary", BINARY),
    "lightgbm_three": _lightgbm("multiclass", THREE, num_class=3),
    "skops_score": _regress(ensemble.RandomForestRegressor(**_SMALL), suffix=".skops"),
    "skops_two": _sklearn(ensemble.GradientBoostingClassifier(**_SMALL), NAMES[BINARY], ".skops"),
    "skops_three": _sklearn(ensemble.RandomForestClassifier(**_SMALL), NAMES[THREE], ".skops"),
    "treelite_score": _regress(ensemble.GradientBoostingRegressor(**_SMALL), suffix=".tl"),
    "treelite_two": _sklearn(ensemble.ExtraTreesClassifier(**_SMALL), BINARY, ".tl"),
    "treelite_three": _sklearn(ensemble.GradientBoostingClassifier(**_SMALL), THREE, ".tl"),
}
CASES = SERVED | {
    "xgboost_poisson": _xgboost("count:poisson", COUNTS, ".ubj"),
    "xgboost_gamma": _xgboost("reg:gamma", SHARES, ".json"),
    "xgboost_tweedie": _xgboost("reg:tweedie", COUNTS, ".json"),
    "xgboost_logistic": _xgboost("reg:logistic", SHARES, ".json"),
    "xgboost_squared_log": _xgboost("reg:squaredlogerror", SHARES, ".json"),
    "xgboost_huber": _xgboost("reg:pseudohubererror", SCORES, ".json"),
    "xgboost_cox": _xgboost("survival:cox", SHARES, ".json", eta=0.02),
    "xgboost_aft": _xgboost("survival:aft", SHARES, ".ubj"),
    "xgboost_ranks": _xgboost("rank:ndcg", THREE, ".json", groups=GROUPS),
    "xgboost_pairs": _xgboost("rank:pairwise", THREE, ".json", groups=GROUPS),
    "xgboost_margin": _xgboost("binary:logitraw", BINARY, ".ubj"),
    "xgboost_hinge": _xgboost("binary:hinge", BINARY, ".json"),
    "xgboost_dart": _xgboost("binary:logistic", BINARY, ".json", booster="dart", rate_drop=0.3),
    "xgboost_forest": _xgboost("multi:softprob", THREE, ".ubj", num_class=3, num_parallel_tree=3),
    "xgboost_codes": _xgboost("binary:logistic", BINARY, ".json", categories=_CODES),
    "xgboost_object": _xgboost("binary:logistic", BINARY, base_score=0.3),
    "lightgbm_ova": _lightgbm("multiclassova", THREE, num_class=3, sigmoid=0.7),
    "lightgbm_poisson": _lightgbm("poisson", COUNTS),
    "lightgbm_gamma": _lightgbm("gamma", SHARES),
    "lightgbm_tweedie": _lightgbm("tweedie", COUNTS),
    "lightgbm_l1": _lightgbm("regression_l1", SCORES),
    "lightgbm_huber": _lightgbm("huber", SCORES),
    "lightgbm_fair": _lightgbm("fair", SCORES),
    "lightgbm_quantile": _lightgbm("quantile", SCORES),
    "lightgbm_mape": _lightgbm("mape", SCORES + 5),
    "lightgbm_root": _lightgbm("regression", SCORES, reg_sqrt=True),
    "lightgbm_shares": _lightgbm("cross_entropy", SHARES),
    "lightgbm_lambda": _lightgbm("cross_entropy_lambda", SHARES),
    "lightgbm_ranks": _lightgbm("lambdarank", THREE, groups=GROUPS),
    "lightgbm_xendcg": _lightgbm("rank_xendcg", THREE, groups=GROUPS),
    "lightgbm_mean": _lightgbm("binary", BINARY, boosting="rf", bagging_freq=1, bagging_fraction=0.7),
    "lightgbm_means": _lightgbm(
        "multiclass", THREE, num_class=3, boosting="rf", bagging_freq=1, bagging_fraction=0.7
    ),
    "lightgbm_codes": _lightgbm("binary", BINARY, categories=[5]),
    "lightgbm_object": _lightgbm("binary", BINARY, is_file=False, sigmoid=2.0),
    "sklearn_forest": _sklearn(ensemble.RandomForestClassifier(**_SMALL), NAMES[THREE], rows=HOLED),
    "sklearn_scores": _regress(ensemble.ExtraTreesRegressor(**_SMALL), rows=HOLED),
    "sklearn_boosted": _regress(ensemble.GradientBoostingRegressor(**_SMALL, loss="huber")),
    "sklearn_early": _regress(
        ensemble.GradientBoostingRegressor(n_estimators=200, random_state=0, learning_rate=1, n_iter_no_change=1)
    ),
    "sklearn_exponential": _sklearn(ensemble.GradientBoostingClassifier(**_SMALL, loss="exponential"), BINARY),
    "sklearn_histogram": _regress(ensemble.HistGradientBoostingRegressor(max_iter=15), rows=HOLED),
    "sklearn_counts": _regress(ensemble.HistGradientBoostingRegressor(max_iter=15, loss="poisson"), COUNTS, rows=HOLED),
    "sklearn_two": _sklearn(ensemble.HistGradientBoostingClassifier(max_iter=15), NAMES[BINARY], rows=HOLED),
    "sklearn_three": _sklearn(ensemble.HistGradientBoostingClassifier(max_iter=15), THREE, ".skops", rows=HOLED),
    "sklearn_codes": _sklearn(
        ensemble.HistGradientBoostingClassifier(max_iter=15, categorical_features=[5]), BINARY, rows=HOLED
    ),
    "sklearn_odd": _sklearn(ensemble.IsolationForest(n_estimators=15, random_state=0), BINARY, ask="score_samples"),
}  # fmt: skip
