"""Mistakes about forests, for Triton's FIL backend."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant, change, changes

CONFIG = "forest/config.pbtxt"
FILE = "forest/1/checkpoint.tl"
NUM_FEATURES, NUM_CLASSES = 5, 3


@cache
def checkpoint(kind: str = "regressor") -> bytes:
    """A Treelite checkpoint of scikit-learn's forest on a few rows."""
    import numpy as np
    import treelite
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    rows = np.random.default_rng(0).random((60, NUM_FEATURES))
    if kind == "classifier":
        forest = RandomForestClassifier(n_estimators=3, random_state=0).fit(rows, np.arange(60) % NUM_CLASSES)
    else:
        scores = rows[:, :2] if kind == "two targets" else rows[:, 0]
        forest = RandomForestRegressor(n_estimators=3, random_state=0).fit(rows, scores)
    with TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.tl")
        treelite.sklearn.import_model(forest).serialize(str(path))
        return path.read_bytes()


def classifier() -> bytes:
    return checkpoint("classifier")


def xgboost(num_features: int = NUM_FEATURES, objective: str = "reg:squarederror", num_classes: int = 0) -> bytes:
    """Return the part of XGBoost's JSON that identifies the format."""
    about = {"num_class": str(num_classes), "num_feature": str(num_features), "num_target": "1"}
    learner = {"gradient_booster": {}, "learner_model_param": about, "objective": {"name": objective}}
    return json.dumps({"learner": learner, "version": [2, 0, 0]}).encode()


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def config(model_type: str = "treelite_checkpoint", *others: str, width: int = 1, output_class: str = "false") -> str:
    lines = [parameter("output_class", output_class), *others]
    if model_type:
        lines.insert(0, parameter("model_type", model_type))
    return "\n".join(
        [
            'name: "forest"\nbackend: "fil"\nmax_batch_size: 8',
            f'input {{ name: "input__0" data_type: TYPE_FP32 dims: [ {NUM_FEATURES} ] }}',
            f'output {{ name: "output__0" data_type: TYPE_FP32 dims: [ {width} ] }}',
            "dynamic_batching { default_queue_policy { max_queue_size: 64 } }\ninstance_group [ { kind: KIND_CPU } ]",
            *lines,
            "",
        ]
    )


THRESHOLD = parameter("threshold", "0.5")
GOOD: dict[str, Edit] = {CONFIG: config(), FILE: checkpoint}
LABELS: dict[str, Edit] = {CONFIG: config("treelite_checkpoint", THRESHOLD, output_class="true"), FILE: classifier}
CHANCES: dict[str, Edit] = {
    CONFIG: config("treelite_checkpoint", THRESHOLD, parameter("predict_proba", "true"), width=3, output_class="true"),
    FILE: classifier,
}
BOOSTED: dict[str, Edit] = {CONFIG: config("xgboost_json"), "forest/1/xgboost.json": xgboost}
LIGHT = b"tree\nversion=v4\nnum_class=1\nmax_feature_idx=4\nobjective=regression\n\nTree=0\n"
LIGHTGBM: dict[str, Edit] = {CONFIG: config("lightgbm"), "forest/1/model.txt": LIGHT}
NEEDS_3_9: dict[str, Edit] = {CONFIG: config(), FILE: struct.pack("<3i", 3, 9, 1) + bytes(40)}

PLANTS = (
    *(page(rule, CONFIG, GOOD) for rule in ("fil-tensors", "fil-features", "fil-model-type", "fil-task")),
    *changes(
        CONFIG,
        ("fil-tensors", "another name for the input", "input__0", "features"),
        (
            "fil-tensors",
            "a forest in double precision",
            'output__0" data_type: TYPE_FP32',
            'output__0" data_type: TYPE_FP64',
        ),
        (
            "fil-tensors",
            "two inputs for a forest",
            "output {",
            'input { name: "input__1" data_type: TYPE_FP32 dims: [ 1 ] }\noutput {',
            "",
            "input__0",
        ),
        ("fil-model-type", "no model_type", parameter("model_type", "treelite_checkpoint"), "", "", "fil"),
        ("fil-task", "True with a capital", '"false"', '"False"', "", "output_class"),
        ("fil-task", "neither regressor nor classifier", parameter("output_class", "false"), "", "", ""),
        good=GOOD,
    ),
    Plant(
        "a feature too many in JSON",
        "fil-features",
        CONFIG,
        "input__0",
        {"forest/1/xgboost.json": lambda: xgboost(6)},
        BOOSTED,
    ),
    Plant(
        "a feature too many in text",
        "fil-features",
        CONFIG,
        "input__0",
        {"forest/1/model.txt": LIGHT.replace(b"idx=4", b"idx=5")},
        LIGHTGBM,
    ),
    change(
        CONFIG,
        "fil-model-type",
        "the model_type of another file",
        "xgboost_json",
        "xgboost",
        "",
        "model_type",
        good=BOOSTED,
    ),
    Plant(
        "a format that comes later",
        "fil-model-type",
        CONFIG,
        "model_type",
        {CONFIG: ("xgboost_json", "xgboost_ubj"), "forest/1/xgboost.ubj": b"{L\0\0\0\0\0\0\0\7learner"},
        BOOSTED,
        target="24.09",
    ),
    *changes(
        CONFIG,
        ("fil-task", "no threshold", THRESHOLD, "", "", "output_class"),
        ("fil-task", "a threshold that is no number", THRESHOLD, THRESHOLD.replace("0.5", "half"), "", "threshold"),
        (
            "fil-task",
            "labels as wide as chances",
            'output__0" data_type: TYPE_FP32 dims: [ 1 ]',
            'output__0" data_type: TYPE_FP32 dims: [ 3 ]',
        ),
        good=LABELS,
    ),
    change(
        CONFIG, "fil-task", "chances as wide as labels", "dims: [ 3 ]", "dims: [ 1 ]", "", "output__0", good=CHANCES
    ),
    Plant("a forest of two targets", "fil-task", FILE, "", {FILE: lambda: checkpoint("two targets")}, GOOD),
    change(
        CONFIG,
        "fil-task",
        "a parameter that the target does not know yet",
        "output_class",
        "is_classifier",
        good=GOOD,
        target="24.11",
    ),
    Plant("a Treelite too new", "treelite-version", FILE, "", {FILE: checkpoint}, NEEDS_3_9, target="23.12"),
    Plant(
        "a Treelite too old",
        "treelite-version",
        FILE,
        "",
        {FILE: struct.pack("<3i", 3, 1, 0) + bytes(40)},
        GOOD,
        target="24.11",
    ),
    Plant("a pickled forest", "forest-unreadable", FILE, "", {FILE: b"\x80\x04\x95" + bytes(200)}, GOOD),
)
