"""Forests that cannot be served as their library answers: how each is made, and words of its error message."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import lightgbm
import numpy as np
import skops.io
import treelite
import xgboost
from sklearn import ensemble
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from tests.support.grown import BINARY, NAMES, ROWS, SCORES, THREE

Make = Callable[[Path], Any]
TWO = np.stack([SCORES, SCORES], axis=1)


def xgboosted(targets: Any = BINARY, suffix: str = ".json", **given: Any) -> Make:
    def make(folder: Path) -> Path:
        parameters = {"objective": "binary:logistic", "nthread": 1, "max_depth": 3, **given}
        xgboost.train(parameters, xgboost.DMatrix(ROWS, targets), 3).save_model(folder / f"model{suffix}")
        return folder / f"model{suffix}"

    return make


def edited(change: Callable[[dict[str, Any]], object]) -> Make:
    """XGBoost's JSON with its learner changed."""

    def make(folder: Path) -> Path:
        path: Path = xgboosted()(folder)
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document["learner"])
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    return make


def missing_in_file(missing: float, suffix: str) -> Make:
    """XGBoost's file with the attribute that XGBoost 1.0 to 1.7 writes for an estimator."""

    def make(folder: Path) -> Path:
        data = xgboost.DMatrix(ROWS, BINARY, missing=missing)
        booster = xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 3)
        booster.set_attr(scikit_learn=json.dumps({"missing": missing, "_estimator_type": "classifier"}))
        booster.save_model(folder / f"model{suffix}")
        return folder / f"model{suffix}"

    return make


def lightgbmed(change: Callable[[str], str] = str, **given: Any) -> Make:
    def make(folder: Path) -> Path:
        parameters = {"objective": "binary", "verbosity": -1, "num_threads": 1, **given}
        data = lightgbm.Dataset(ROWS, BINARY, params=parameters)
        text = lightgbm.train(parameters, data, 3).model_to_string()
        (folder / "model.txt").write_text(change(text), encoding="utf-8")
        return folder / "model.txt"

    return make


def without(line: str) -> Callable[[str], str]:
    return lambda text: "\n".join(part for part in text.split("\n") if not part.startswith(line))


def checkpoint(targets: Any = BINARY, share: float = 1) -> Make:
    def make(folder: Path) -> Path:
        forest = ensemble.RandomForestRegressor(3, max_depth=3, random_state=0).fit(ROWS, targets)
        content = treelite.sklearn.import_model(forest).serialize_bytes()
        (folder / "model.tl").write_bytes(content[: int(len(content) * share)])
        return folder / "model.tl"

    return make


def holds(name: str, content: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def dumped(thing: Any, dump: Callable[..., Any], name: str) -> Make:
    def make(folder: Path) -> Path:
        dump(thing, folder / name)
        return folder / name

    return make


def histogram(column: Any) -> Any:
    """Trees that split on a column of categories."""
    rows = np.concatenate([np.asarray(column, object)[:, None], ROWS.astype(object)], axis=1)
    return ensemble.HistGradientBoostingClassifier(max_iter=3, categorical_features=[0]).fit(rows, BINARY)


def pop(*names: str) -> Callable[[dict[str, Any]], object]:
    def change(learner: dict[str, Any]) -> None:
        for name in names[:-1]:
            learner = learner[name]
        del learner[names[-1]]

    return change


class Liar(ensemble.RandomForestRegressor):  # type: ignore[misc]
    """A forest that says something else than its trees."""

    def predict(self, rows: Any) -> Any:
        return super().predict(rows) + 1e-4


SMALL = ensemble.RandomForestClassifier(3, max_depth=3, random_state=0)
FAULTS: list[tuple[str, Make, str, str]] = [
    (
        "XGBoost's objective",
        xgboosted(objective="reg:absoluteerror"),
        "its objective is reg:absoluteerror,",
        "Train with",
    ),
    ("no trees at all", xgboosted(booster="gblinear"), "its booster is gblinear, which has no trees", "gbtree or dart"),
    ("two targets", xgboosted(TWO, objective="reg:squarederror"), "it predicts 2 targets", "Train a forest for each"),
    (
        "vectors",
        xgboosted(THREE, objective="multi:softprob", num_class=3, multi_strategy="multi_output_tree"),
        "its leaves are vectors (multi_output_tree)",
        "one_output_per_tree",
    ),
    ("no learner", holds("model.json", b'{"version": [3, 0, 0]}'), "it has no learner,", "save_model"),
    ("no objective", edited(pop("objective")), "it has no objective,", "save_model"),
    ("no features", edited(pop("learner_model_param", "num_feature")), "it has no num_feature,", "save_model"),
    (
        "0 features",
        edited(lambda learner: learner["learner_model_param"].update(num_feature="0")),
        "it does not say how many features it takes",
        "save_model",
    ),
    ("six features", edited(lambda learner: learner["learner_model_param"].update(num_feature="six")), "damaged", ""),
    ("no parameters", edited(pop("learner_model_param")), "it has no learner_model_param,", "save_model"),
    ("no booster", edited(pop("gradient_booster", "model")), "it has no model,", "save_model"),
    (
        "names of categories",
        edited(lambda learner: learner["gradient_booster"]["model"].update(cats={"enc": [{"values": [120, 121]}]})),
        "it encodes the categories of a data frame,",
        "Train on their codes",
    ),
    (
        "children out of reach",
        edited(lambda learner: learner["gradient_booster"]["model"]["trees"][0]["left_children"].__setitem__(0, 2**30)),
        "cannot be added: ",
        "Save it again",
    ),
    (
        "half of a JSON",
        holds("model.json", b'{"learner": {"objective": '),
        "it is not JSON, or damaged: ",
        "save_model",
    ),
    ("no JSON", holds("model.json", b"hello"), "it is not JSON or UBJSON, or damaged: ", "save_model"),
    ("a PNG", holds("model.ubj", b"\x89PNG\r\n\x1a\n"), "it is a PNG image", "save_model"),
    ("empty", holds("model.ubj", b""), "it is empty", "Save it again"),
    ("LightGBM's own objective", lightgbmed(without("objective=")), "it names no objective: ", "Train with one of"),
    (
        "another objective",
        lightgbmed(lambda text: text.replace("objective=binary sigmoid:1", "objective=custom")),
        "its objective is custom,",
        "Train with one of these: regression, ",
    ),
    (
        "LightGBM's features",
        lightgbmed(without("max_feature_idx=")),
        "its line max_feature_idx= is missing",
        "save_model",
    ),
    ("linear leaves", lightgbmed(linear_tree=True), "its leaves are linear models (linear_tree)", "linear_tree=False"),
    ("zeros", lightgbmed(zero_as_missing=True), "zeros count as missing (zero_as_missing)", "zero_as_missing=False"),
    (
        "half a text",
        lightgbmed(lambda text: text[:1500]),
        "it is cut off: the line 'end of trees' is missing",
        "save_model",
    ),
    (
        "a tree lost",
        lightgbmed(lambda text: text.replace("Tree=1", "Bush=1")),
        "it has 2 trees, and says that it has 3",
        "save_model",
    ),
    ("a line lost", lightgbmed(without("threshold=")), "need threshold", "Save it again"),
    ("another text", holds("model.txt", b"[CLS]\n[SEP]\n"), "it is not a LightGBM text model", "save_model"),
    ("half a checkpoint", checkpoint(share=0.5), "it is cut off, or damaged: a field of", "Save it again"),
    ("Treelite's targets", checkpoint(TWO), "it predicts 2 targets, and FIL supports one", "Train a forest for each"),
    ("another Treelite", holds("model.tl", b"\3\0\0\0" + bytes(80)), "it is not of Treelite 4", "Save it again"),
    (
        "texts as categories",
        lambda folder: histogram(NAMES[THREE]),
        "it splits on categories such as 'easy'",
        "Encode them",
    ),
    (
        "fractions as categories",
        lambda folder: histogram(THREE / 2),
        "it splits on categories such as 0.5;",
        "Encode them",
    ),
    (
        "targets of scikit-learn",
        lambda folder: ensemble.ExtraTreesRegressor(3).fit(ROWS, TWO),
        "it predicts 2 targets",
        "",
    ),
    (
        "one class",
        lambda folder: ensemble.RandomForestClassifier(3).fit(ROWS, BINARY * 0),
        "it has only one class, 0",
        "",
    ),
    (
        "a forest that lies",
        lambda folder: Liar(3, random_state=0).fit(ROWS, SCORES),
        "scikit-learn's Liar cannot be added: its checkpoint answers [",
        "Allowed: 1e-05.",
    ),
    (
        "another start",
        lambda folder: ensemble.GradientBoostingRegressor(n_estimators=3, init=ensemble.RandomForestRegressor(2)).fit(
            ROWS, SCORES
        ),
        "Treelite cannot take it: Custom init estimator not supported",
        "Train it another way",
    ),
    (
        "another missing value",
        lambda folder: xgboost.XGBRegressor(n_estimators=3, missing=-999.0).fit(ROWS, SCORES),
        "it treats -999 as a missing value",
        "missing=nan",
    ),
    *(
        (
            f"another missing value in the file {missing}{suffix}",
            missing_in_file(missing, suffix),
            f"it treats {missing:g} as a missing value",
            "missing=nan",
        )
        for missing, suffix in ((0.0, ".json"), (1.0, ".ubj"), (-999.0, ".json"))
    ),
    *(
        (
            f"a classifier of two targets, {name}",
            make,
            "it predicts 2 targets, and FIL supports one",
            "Train a forest for each",
        )
        for name, make in (
            ("random", lambda folder: ensemble.RandomForestClassifier(3).fit(ROWS, TWO > 0)),
            ("extra", lambda folder: ensemble.ExtraTreesClassifier(3).fit(ROWS, np.digitize(TWO, (-0.5, 0.5)))),
            ("in a file", dumped(ensemble.RandomForestClassifier(3).fit(ROWS, TWO > 0), skops.io.dump, "model.skops")),
        )
    ),
    (
        "CatBoost's JSON",
        holds("model.json", b'{"features_info": {}, "model_info": {}, "oblivious_trees": [], "scale_and_bias": [1]}'),
        "it is CatBoost's JSON",
        'save_model("model.onnx", format="onnx")',
    ),
    (
        "CatBoost's JSON of other trees",
        holds("model.json", b'{"features_info": {}, "model_info": {}, "trees": [], "scale_and_bias": [1, [0]]}'),
        "it is CatBoost's JSON",
        'save_model("model.onnx", format="onnx")',
    ),
    (
        "LightGBM's JSON",
        holds("model.json", b'{"name": "tree", "version": "v4", "num_class": 1, "tree_info": []}'),
        "it is what LightGBM's dump_model gives",
        'save_model("model.txt")',
    ),
    (
        "XGBoost untrained",
        lambda folder: xgboost.XGBRegressor(),
        "XGBoost's XGBRegressor cannot be added: need to call fit",
        "",
    ),
    (
        "LightGBM untrained",
        lambda folder: lightgbm.LGBMRegressor(),
        "LightGBM's LGBMRegressor cannot be added: ",
        "Train it",
    ),
    (
        "skops of another",
        dumped({"a": functools.partial(os.getpid)}, skops.io.dump, "model.skops"),
        "it contains types ",
        "load it",
    ),
    ("no skops", holds("model.skops", b"PK\3\4" + bytes(90)), "it is not a skops file, or damaged: ", "skops.io.dump"),
]
MISTAKES: list[tuple[str, Make, dict[str, Any], str, str]] = [
    ("two names for three", checkpoint(), {"labels": ["a", "b"]}, "model.tl has no classes", "Leave"),
    ("three names for two", xgboosted(), {"labels": ["a", "b", "c"]}, "3 labels are given; ", "Name each class"),
    ("a pickle", dumped(SMALL, joblib.dump, "model.joblib"), {}, "model.joblib ", "read it yourself"),
    (
        "a pickle by another name",
        dumped(SMALL, joblib.dump, "model.tl"),
        {},
        "model.tl is a pickle",
        "shoal.add_model(",
    ),
    ("an old format", holds("model.model", b"binf"), {}, "model.model is a binary file of XGBoost's", ""),
    ("nothing", lambda folder: folder / "model.tl", {}, "There is no file ", "Name the "),
    (
        "untrained",
        lambda folder: ensemble.RandomForestRegressor(),
        {},
        "RandomForestRegressor is not trained",
        "Call fit",
    ),
    (
        "a pipeline",
        lambda folder: make_pipeline(StandardScaler(), SMALL),
        {},
        "Pipeline is not a forest",
        "give its last step",
    ),
    (
        "no trees",
        lambda folder: SVC().fit(ROWS, BINARY),
        {},
        "scikit-learn's SVC is not a forest",
        "Known forests: RandomForest",
    ),
]
