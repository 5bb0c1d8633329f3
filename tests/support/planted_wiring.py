"""Mistakes between an ensemble and the models that it calls."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Plant, changes, config
from tests.support.planted_ensembles import ALL, ensemble

DECOUPLED = "model_transaction_policy { decoupled: true }\ninstance_group"

INNER = """name: "inner"
platform: "ensemble"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ {
  model_name: "left" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
} ] }
"""

PLANTS = (
    page("member-missing", ALL, core="not available or ambiguous: frist"),
    page(
        "member-version",
        ALL,
        ensemble("model_version: -1", "model_version: 1"),
        core="required version 7 is not loaded",
    ),
    page("ensemble-in-itself", ALL, core="circular dependency between ensembles"),
    page("ensemble-batch-size", ALL, line="first", core="which only allows maximum batch size to be 8"),
    page("step-input-unknown", ALL, core="non-existing input x"),
    page("step-output-unknown", ALL, core="non-existing output y"),
    page("step-output-twice", at=ALL, line="first_y", core="multiple outputs in model first are mapped to the same"),
    page("step-input-unmapped", at=ALL, line="{", core="input Z in model left is not mapped"),
    page("step-dtype", at=ALL, line="first_y", core="inconsistent data type"),
    page("step-shape", at=ALL, line="first_y", core="inconsistent shape"),
    page("decoupled-joined", at=ALL, line="{", core="originated from different decoupled models"),
    Plant(
        "a model that takes one row alone",
        "ensemble-batch-size",
        ALL,
        '"IN"',
        {"first/config.pbtxt": config("first", batching="").replace("max_batch_size: 8", "max_batch_size: 0")},
    ),
    *changes(
        ALL,
        (
            "member-version",
            "a version that is not said",
            "model_version: -1",
            "",
            "required version 0 is not loaded",
            "{",
        ),
        (
            "step-dtype",
            "another type than the ensemble's",
            '"IN" data_type: TYPE_FP32',
            '"IN" data_type: TYPE_FP64',
            "inconsistent data type",
            '"IN"',
        ),
        (
            "step-shape",
            "a number for a vector",
            "dims: [ 4 ] } ]\noutput",
            "dims: [ 1 ] reshape { } } ]\noutput",
            "inconsistent shape",
            '"IN"',
        ),
    ),
    Plant(
        "a version that is not the latest",
        "member-version",
        ALL,
        "model_version: 1",
        {"first/2/model.py": MODEL},
        ensemble("model_version: -1", "model_version: 1"),
        core="required version 1 is not loaded",
    ),
    Plant(
        "a row too many",
        "step-shape",
        ALL,
        "first_y",
        {"left/config.pbtxt": ("dims: [ 4 ] }\noutput", "dims: [ -1, 4 ] }\noutput")},
        core="inconsistent shape",
    ),
    Plant(
        "two decoupled joined",
        "decoupled-joined",
        ALL,
        "{",
        {"left/config.pbtxt": ("instance_group", DECOUPLED), "right/config.pbtxt": ("instance_group", DECOUPLED)},
        core="originated from different decoupled models",
    ),
    Plant(
        "two decoupled joined, one level down",
        "decoupled-joined",
        ALL,
        "{",
        {
            "left/config.pbtxt": ("instance_group", DECOUPLED),
            "inner/config.pbtxt": INNER,
            "inner/1/.gitkeep": "",
            ALL: ('model_name: "left"', 'model_name: "inner"'),
        },
        core="originated from different decoupled models",
    ),
)
