"""Readers for XGBoost and LightGBM files, which refuse a model that Treelite would read wrongly.

XGBoost and LightGBM need not be installed. Treelite ignores two settings of LightGBM: leaves that are linear models,
and zeros that count as missing values. It also parses the lines after LightGBM's trees, where a feature's name may look
like a field of a tree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shoal.authoring.check.boosters import is_json, parse_xgboost, read_fields, read_xgboost_head
from shoal.authoring.project.importing.isolated_reader import read_apart, refuse
from shoal.authoring.project.importing.verify_forest import Found
from shoal.kit.component.files import describe_bytes
from shoal.system.files import parse_json


# Objectives whose predictions Treelite reproduces, and whether they are class probabilities.
def _read_table(scores: str, probabilities: str) -> Mapping[str, bool]:
    return dict.fromkeys(scores.split(), False) | dict.fromkeys(probabilities.split(), True)


_XGBOOST = _read_table(
    """reg:squarederror reg:linear reg:squaredlogerror reg:pseudohubererror reg:logistic reg:gamma reg:tweedie
    count:poisson survival:cox survival:aft rank:pairwise rank:ndcg rank:map binary:logitraw""",
    "binary:logistic binary:hinge multi:softprob multi:softmax",
)
_LIGHTGBM = _read_table(
    """regression regression_l1 huber fair poisson quantile mape gamma tweedie cross_entropy cross_entropy_lambda
    lambdarank rank_xendcg""",
    "binary multiclass multiclassova",
)
_CATEGORICAL, _MISSING, _ZERO = 1, 3, 1  # bits of LightGBM's decision_type, include/LightGBM/tree.h
_END = "end of trees"


# --- XGBoost -----------------------------------------------------------------------------------------------------

_SAVE = 'Save it again: booster.save_model("model.ubj").'


def read_xgboost(content: bytes, name: str) -> Found:
    """Read a forest in XGBoost's JSON or UBJSON format; ``name`` is used in errors.

    Raises:
        ArtifactError: the file is damaged, or Treelite's answers would differ from XGBoost's.
    """
    try:
        document = parse_xgboost(content)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if is_json(content) else "UBJSON" if content.startswith(b"{") else "JSON or UBJSON"
        raise refuse(name, describe_bytes(content[:32]) or f"it is not {kind}, or damaged: {error}", _SAVE) from error
    try:
        is_cut, rounds = _keep_best(document)
        what, is_classifier, said, gives_labels = _describe_xgboost(document, name)
        said = (*rounds, *said)
    except KeyError as error:
        _refuse_others(document, name)
        raise refuse(name, f"it has no {error.args[0]}, so it is not a complete XGBoost model", _SAVE) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise refuse(name, f"it is damaged, or of an unknown XGBoost version: {error!r}", _SAVE) from error
    if is_cut:
        model, _ = read_apart("json", json.dumps(document, default=np.ndarray.tolist).encode(), name)
    else:
        model, _ = read_apart("json" if is_json(content) else "ubjson", content, name)
    return Found(name, model, what, is_classifier, said, gives_labels=gives_labels)


def _refuse_others(document: Mapping[str, Any], name: str) -> None:
    """Refuse JSON that other libraries write."""
    if "features_info" in document:
        raise refuse(name, "it is CatBoost's JSON", 'Save it as ONNX: model.save_model("model.onnx", format="onnx").')
    if "tree_info" in document:
        raise refuse(name, "it is what LightGBM's dump_model gives", _SAVE_TEXT)


def _describe_xgboost(document: Any, name: str) -> tuple[str, bool, tuple[str, ...], bool]:
    """Check a model; return its description, whether it is a classifier, and notes for the user.

    The last value is whether XGBoost's ``predict`` returns class numbers (``multi:softmax``) instead of probabilities.
    """
    learner = document.get("Model", document)["learner"]  # "Model": of a snapshot
    booster = learner["gradient_booster"]["name"]
    if booster not in ("gbtree", "dart"):
        raise refuse(name, f"its booster is {booster}, which has no trees", "Train with booster gbtree or dart.")
    head = read_xgboost_head(learner)
    objective = head.objective
    _check_objective(objective, _XGBOOST, name)
    attributes = learner.get("attributes")
    kept = attributes.get("scikit_learn") if isinstance(attributes, dict) else None  # by XGBoost 1.0 to 1.7
    check_missing(parse_json(kept).get("missing") if isinstance(kept, str) else None, name)
    content = learner["gradient_booster"]
    model = (content["gbtree"] if booster == "dart" else content)["model"]
    trees = model["trees"]
    sizes = {int(tree["tree_param"].get("size_leaf_vector", 1)) for tree in trees}
    if head.num_features < 1:
        raise refuse(name, "it does not say how many features it takes", _SAVE)
    if not len(trees):
        raise refuse(name, "it has no trees", "Train it first.")
    if sizes - {0, 1}:
        raise refuse(
            name, "its leaves are vectors (multi_output_tree)", "Train with multi_strategy one_output_per_tree."
        )
    if any(len(encoded.get("values", ())) for encoded in model.get("cats", {}).get("enc", ())):
        raise refuse(
            name,
            "it encodes the categories of a data frame, which a Treelite checkpoint cannot",
            "Train on their codes, whole numbers from 0 on (column.cat.codes), and send the same codes.",
        )
    version = document.get("version")
    version = ".".join(map(str, version)) if isinstance(version, list | np.ndarray) else "of unknown version"
    what = f"XGBoost {version}, objective {objective}, booster {booster}, {len(trees):,} trees"
    return what, _XGBOOST[objective], tuple(_notes(learner)), objective == "multi:softmax"


def check_missing(missing: Any, name: str) -> None:
    """Check the value that an estimator of XGBoost takes for a missing one.

    Raises:
        ArtifactError: it is not NaN.
    """
    if missing is not None and not math.isnan(missing):
        raise refuse(
            name,
            f"it treats {missing:g} as a missing value, which its trees do not record",
            "Train with missing=nan, and send NaN where a value is missing.",
        )


def _check_objective(objective: str, known: Mapping[str, bool], name: str) -> None:
    if objective not in known:
        raise refuse(
            name,
            f"its objective is {objective}, whose answers cannot be reproduced as in its library",
            f"Train with one of these: {', '.join(known)}.",
        )


def _keep_best(document: Any) -> tuple[bool, tuple[str, ...]]:
    """Remove the trees after the best round of a model with early stopping, because ``XGBModel.predict`` ignores them.

    Return whether trees were removed, and a note for the user if so.
    """
    learner = document.get("Model", document)["learner"]
    attributes = learner.get("attributes")
    best = str(attributes.get("best_iteration", "")) if isinstance(attributes, dict) else ""
    content = learner["gradient_booster"]
    booster = content.get("gbtree", content)
    if not best.isdecimal() or "model" not in booster:
        return False, ()
    model, rounds = booster["model"], int(best) + 1
    trees = model["trees"]
    starts = model.get("iteration_indptr")
    if starts is None or len(starts) == 0:  # older files: every round has as many trees
        groups = max(1, int(learner["learner_model_param"].get("num_class", 0)))
        size = groups * max(1, int(model["gbtree_model_param"].get("num_parallel_tree", 1)))
        starts = list(range(0, len(trees) + 1, size))
    if rounds >= len(starts) - 1:
        return False, ()
    kept = int(starts[rounds])
    model["trees"], model["tree_info"] = trees[:kept], model["tree_info"][:kept]
    model["iteration_indptr"] = starts[: rounds + 1]
    model["gbtree_model_param"]["num_trees"] = str(kept)
    if "weight_drop" in content:
        content["weight_drop"] = content["weight_drop"][:kept]
    line = f"{rounds} of its {len(starts) - 1} rounds are used, up to best_iteration, as XGBModel.predict does"
    return True, (f"{line}; Booster.predict uses all",)


def _notes(learner: Mapping[str, Any]) -> Iterable[str]:
    types = learner.get("feature_types")
    categories = [str(i) for i, kind in enumerate(types) if kind == "c"] if isinstance(types, list) else []
    if categories:
        yield f"features {', '.join(categories)} are categories: send their codes, as whole numbers"


# --- LightGBM ----------------------------------------------------------------------------------------------------

_SAVE_TEXT = 'Save it again: booster.save_model("model.txt").'


def read_lightgbm(content: bytes, name: str) -> Found:
    """Read a forest in LightGBM's text format; ``name`` is used in errors.

    Raises:
        ArtifactError: the file is damaged, or Treelite's answers would differ from LightGBM's.
    """
    text = content.decode("utf-8", "replace")
    if not text.startswith("tree"):
        why = describe_bytes(content[:32]) or "it is not a LightGBM text model, which begins with 'tree'"
        raise refuse(name, why, _SAVE_TEXT)
    text, end, _ = text.partition(f"\n{_END}")
    if not end:
        raise refuse(name, f"it is cut off: the line {_END!r} is missing", _SAVE_TEXT)
    head, *trees = re.split(r"\n(?=Tree=)", text)
    about = read_fields(head)
    objective = _check_head(about, name)
    fields = [read_fields(tree) for tree in trees]
    sizes = about.get("tree_sizes", "").split()
    if not trees or (sizes and len(sizes) != len(trees)):
        raise refuse(name, f"it has {len(trees):,} trees, and says that it has {len(sizes):,}", _SAVE_TEXT)
    categories = _check_trees(fields, name)
    said = [f"features {', '.join(map(str, categories))} are categories: send their codes"] if categories else []
    names = re.search(rb"(?m)^pandas_categorical:(\[.*)", content)
    if names and names[1].strip() != b"[]":
        said.append(f"codes count from 0 in this order: {names[1].decode('utf-8', 'replace').strip()}")
    model, _ = read_apart("lightgbm", content[: content.index(f"\n{_END}".encode())] + b"\n", name)
    what = f"LightGBM {about.get('version', '')}, objective {objective}, {len(trees):,} trees"
    return Found(name, model, what, _LIGHTGBM[objective.split()[0]], tuple(said))


def _check_head(about: Mapping[str, str], name: str) -> str:
    """Check the header of a LightGBM file; return its objective with parameters, such as ``binary sigmoid:1``."""
    for key in ("max_feature_idx", "num_class"):
        if not about.get(key, "").isdecimal():
            raise refuse(name, f"its line {key}= is missing, or not a number", _SAVE_TEXT)
    objective = about.get("objective", "").strip()
    if not objective:
        raise refuse(
            name,
            "it names no objective: it was trained with a custom one, or the line objective= is missing",
            "Train with one of LightGBM's, or write the line; it decides what the sums of the leaves mean.",
        )
    _check_objective(objective.split()[0], _LIGHTGBM, name)
    return objective


def _check_trees(trees: Iterable[Mapping[str, str]], name: str) -> list[int]:
    """Check each tree of a LightGBM file; return the sorted indices of the categorical features."""
    categories = set()
    for tree in trees:
        if tree.get("is_linear", "0") != "0":
            raise refuse(name, "its leaves are linear models (linear_tree)", "Train with linear_tree=False.")
        try:
            kinds, features = ([int(n) for n in tree.get(f, "").split()] for f in ("decision_type", "split_feature"))
        except ValueError as error:
            raise refuse(name, f"it is damaged: {error}", _SAVE_TEXT) from error
        for kind, feature in zip(kinds, features, strict=False):
            if kind & _CATEGORICAL:
                categories.add(feature)
            elif kind >> 2 & _MISSING == _ZERO:
                raise refuse(
                    name,
                    "zeros count as missing (zero_as_missing), which a Treelite checkpoint cannot express",
                    "Train with zero_as_missing=False, and NaN where a value is missing.",
                )
    return sorted(categories)
