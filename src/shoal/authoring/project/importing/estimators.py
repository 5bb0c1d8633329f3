"""Import of scikit-learn, XGBoost and LightGBM objects, and of scikit-learn forests in skops files.

Treelite's import of scikit-learn models loses three things, which this module restores: the branch that missing values
take in random forests, the branch that unknown categories take in histogram gradient boosting, and the link function of
some losses.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.authoring.project.importing.boosters import check_missing, read_lightgbm, read_xgboost
from shoal.authoring.project.importing.isolated_reader import refuse
from shoal.authoring.project.importing.verify_forest import CATEGORICAL, Found, Rows
from shoal.errors import InputError, needs

_FAMILIES = ("RandomForest", "ExtraTrees", "GradientBoosting", "HistGradientBoosting")
_KNOWN = (*(f"{family}{kind}" for family in _FAMILIES for kind in ("Regressor", "Classifier")), "IsolationForest")
_OTHER_ESTIMATORS = (
    "Convert it to ONNX (a Pipeline as a whole; pip install skl2onnx): skl2onnx.to_onnx(model, rows[:1]), with"
    " options={'zipmap': False} for a classifier; then type: shoal serve model.onnx. Or write it as a component; for a"
    " linear model, begin with: shoal new model NAME."
)
_MOST_CATEGORIES = 2**24  # FP32 represents every whole number up to here
# Prefixes of types that these forests contain and that skops does not trust by default. The last two belong to the
# encoder of categories, which contains a partial of check_array; the encoder is read, but never called.
_TRUSTED = (
    *(f"sklearn.{name}." for name in ("_loss", "ensemble._hist_gradient_boosting", "tree._tree", "utils._bunch")),
    *("functools.partial", "sklearn.utils.validation.check_array"),
)


def import_estimator(estimator: Any) -> Found:
    """Import a scikit-learn forest.

    Raises:
        InputError: ``estimator`` is not a forest, or is not trained.
        ArtifactError: the forest uses something that Treelite or FIL does not support.
    """
    import treelite
    from sklearn import ensemble
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    what = f"scikit-learn's {type(estimator).__name__}"
    if not isinstance(estimator, tuple(getattr(ensemble, name) for name in _KNOWN)):
        raise InputError(
            f"{what} is not a forest that can be added.",
            f"{_OTHER_ESTIMATORS} Known forests: {', '.join(_KNOWN)}. For a Pipeline, give its last step; the steps"
            " before it become components.",
        )
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise InputError(f"{what} is not trained.", "Call fit first.") from None
    _check_estimator(estimator, what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = treelite.sklearn.import_model(_settle(estimator))
    except Exception as error:  # Treelite's own errors, and failed assertions about scikit-learn's internals
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise refuse(what, f"Treelite cannot take it: {reason.rstrip('.')}", "Train it another way.") from error
    _restore(model, estimator)
    known: Any = estimator
    is_classifier, is_isolation = hasattr(known, "classes_"), isinstance(known, ensemble.IsolationForest)

    def ask(rows: Rows) -> Any:
        if is_isolation:
            return -known.score_samples(rows)
        return known.predict_proba(rows) if is_classifier else known.predict(rows)

    return Found(
        what,
        model,
        f"{what}, {model.num_tree:,} trees",
        is_classifier,
        (),
        _labels(known) if is_classifier else None,
        ask,
        bool(known.__sklearn_tags__().input_tags.allow_nan),
    )


def _check_estimator(estimator: Any, what: str) -> None:
    if (number := getattr(estimator, "n_outputs_", 1)) > 1:
        raise refuse(what, f"it predicts {number} targets, and FIL supports one", "Train a forest for each.")
    if len(getattr(estimator, "classes_", "ab")) < 2:
        raise refuse(what, f"it has only one class, {estimator.classes_[0]}", "Train it on rows of two classes.")
    for values in _categories(estimator).values():
        for value in values.tolist():
            if not (isinstance(value, int | float) and 0 <= value < _MOST_CATEGORIES and value % 1 == 0):
                raise refuse(
                    what,
                    f"it splits on categories such as {value!r}; a Treelite checkpoint supports only whole numbers",
                    "Encode them from 0 on before training, and send the same codes.",
                )


def _categories(estimator: Any) -> dict[int, NDArray[Any]]:
    """Return the known values of each categorical feature of histogram gradient boosting, by index of the feature."""
    encoder = getattr(estimator, "_preprocessor", None)
    if encoder is None:
        return {}
    features = np.flatnonzero(estimator.is_categorical_).tolist()
    found = [
        np.array([v for v in values.tolist() if v == v])
        for values in encoder.named_transformers_["encoder"].categories_
    ]  # not NaN
    return dict(zip(features, found, strict=True))


def _settle(estimator: Any) -> Any:
    """Return the estimator with ``n_estimators`` equal to its number of boosting rounds, as Treelite expects.

    After early stopping, ``n_estimators`` is too high; then the result is a copy.
    """
    trees = getattr(estimator, "estimators_", None)
    if trees is None or len(trees) == estimator.n_estimators:
        return estimator
    settled = copy.copy(estimator)
    settled.n_estimators = len(trees)
    return settled


def _restore(model: Any, estimator: Any) -> None:
    """Restore in Treelite's ``model`` what Treelite's import of ``estimator`` lost: see the module's docstring."""
    header = model.get_header_accessor()
    loss = getattr(estimator, "loss", "")
    if loss in ("poisson", "gamma"):  # of HistGradientBoostingRegressor, whose trees sum to a logarithm
        header.set_field("postprocessor", "exponential")
    if loss == "exponential":  # half of the log-odds: Friedman, "Greedy function approximation", 2001, section 4.5
        header.set_field("sigmoid_alpha", np.array([2], np.float32))
    categories = _categories(estimator)
    for index in range(model.num_tree if categories else 0):
        _restore_unknown_categories(model.get_tree_accessor(index), categories)
    trees = getattr(estimator, "estimators_", None)
    for index, tree in enumerate(trees if isinstance(trees, list) else ()):
        accessor = model.get_tree_accessor(index)
        dtype = accessor.get_field("default_left").dtype
        accessor.set_field("default_left", np.asarray(tree.tree_.missing_go_to_left).astype(dtype))


def _restore_unknown_categories(tree: Any, known: Mapping[int, NDArray[Any]]) -> None:
    """Send unknown categories to the same branch as missing values, as scikit-learn does.

    A split in Treelite lists the categories that go left, and sends all others right, unknown categories too. Where
    missing values go left, list the known categories that go right instead, so that all others go left.
    """
    names = ("category_list", "category_list_begin", "category_list_end", "category_list_right_child")
    listed, begins, ends, is_right = (tree.get_field(name).copy() for name in names)
    to_turn = (tree.get_field("node_type") == CATEGORICAL) & (tree.get_field("default_left") != 0)
    features, lists = tree.get_field("split_index"), []
    for node in range(len(begins)):
        values = listed[int(begins[node]) : int(ends[node])]
        lists.append(np.setdiff1d(known[int(features[node])], values) if to_turn[node] else values)
    sizes = np.array([len(values) for values in lists])
    ends = np.cumsum(sizes).astype(ends.dtype)
    is_right[to_turn] = 1
    fields = (np.concatenate(lists).astype(listed.dtype), ends - sizes.astype(ends.dtype), ends, is_right)
    for name, values in zip(names, fields, strict=True):
        tree.set_field(name, values)


def load_skops(path: Path, name: str) -> Any:
    """Load the estimator in a skops file, if all types in the file are types that scikit-learn's forests use.

    Raises:
        ArtifactError: the file is damaged, or contains other types.
        SetupError: skops is not installed.
    """
    with needs("skops"):
        from skops import io
    try:
        unknown = io.get_untrusted_types(file=path)
        foreign = [name for name in unknown if not name.startswith(_TRUSTED)]
        if not foreign:
            return io.load(path, trusted=unknown)
    except Exception as error:  # damaged files can raise anything
        why = f"it is not a skops file, or damaged: {error}"
        raise refuse(name, why, "Save it again: skops.io.dump(model, FILE).") from error
    raise refuse(
        name,
        f"it contains types that are not part of a scikit-learn forest: {', '.join(foreign)}",
        "If you trust it, load it yourself, and add the forest in it as an object: shoal.add_model(model, NAME).",
    )


def read_xgboost_object(source: Any) -> Found:
    """Read a Booster or an XGBModel of XGBoost.

    Raises:
        ArtifactError: the model is not trained, or ``read_xgboost`` refuses it.
    """
    what = f"XGBoost's {type(source).__name__}"
    booster = source
    if hasattr(source, "get_booster"):
        check_missing(getattr(source, "missing", None), what)
        booster = _call(source.get_booster, what)
    found = read_xgboost(bytes(_call(lambda: booster.save_raw("ubj"), what)), what)
    rounds = booster.num_boosted_rounds()
    if booster.attr("best_iteration"):  # read_xgboost dropped the later trees
        rounds = min(rounds, int(booster.attr("best_iteration")) + 1)

    def ask(rows: Rows) -> Any:
        return booster.inplace_predict(rows, iteration_range=(0, rounds), validate_features=False)

    return replace(found, labels=_labels(source) if found.is_classifier else None, ask=ask, has_missing=True)


def read_lightgbm_object(source: Any) -> Found:
    """Read a Booster or an LGBMModel of LightGBM, up to its best iteration.

    Raises:
        ArtifactError: the model is not trained, or ``read_lightgbm`` refuses it.
    """
    what = f"LightGBM's {type(source).__name__}"
    booster = _call(lambda: source.booster_, what) if hasattr(type(source), "booster_") else source
    found = read_lightgbm(_call(booster.model_to_string, what).encode(), what)
    return replace(
        found, labels=_labels(source) if found.is_classifier else None, ask=booster.predict, has_missing=True
    )


def _labels(source: Any) -> tuple[str, ...] | None:
    classes = getattr(source, "classes_", None)
    return None if classes is None else tuple(map(str, np.asarray(classes).tolist()))


def _call(read: Any, what: str) -> Any:
    try:
        return read()
    except Exception as error:  # each library has its own error for untrained models
        raise refuse(what, f"{error}".rstrip("."), "Train it first.") from error
