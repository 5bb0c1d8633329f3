"""Mistakes between an ensemble and the models that it calls."""

from __future__ import annotations

from tests.support.planted import MODEL, ON_PAGE, Plant
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
    Plant(
        "a model that is not there",
        "member-missing",
        ALL,
        "ghost",
        ensemble('model_name: "first"', 'model_name: "ghost"'),
        core="not available or ambiguous: ghost",
    ),
    Plant(
        "a version that is not there",
        "member-version",
        ALL,
        "7",
        ensemble("model_version: -1", "model_version: 7"),
        core="required version 7 is not loaded",
    ),
    Plant(
        "a version that is not said",
        "member-version",
        ALL,
        "{",
        ensemble("model_version: -1", ""),
        core="required version 0 is not loaded",
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
        "an ensemble in itself",
        "ensemble-in-itself",
        ALL,
        '"all"',
        ensemble('model_name: "first"', 'model_name: "all"'),
        core="circular dependency between ensembles",
    ),
    Plant(
        "more rows than a model takes",
        "ensemble-batch-size",
        ALL,
        "first",
        {ALL: ON_PAGE},
        core="which only allows maximum batch size to be 8",
    ),
    Plant(
        "an input of no model",
        "step-input-unknown",
        ALL,
        "NOPE",
        ensemble('key: "X" value: "IN"', 'key: "NOPE" value: "IN"'),
        core="non-existing input NOPE",
    ),
    Plant(
        "an output of no model",
        "step-output-unknown",
        ALL,
        "NOPE",
        ensemble('key: "Y" value: "OUT"', 'key: "NOPE" value: "OUT"'),
        core="non-existing output NOPE",
    ),
    Plant(
        "an output twice in a step's model",
        "step-output-twice",
        ALL,
        "first_y",
        {"first/config.pbtxt": ("dynamic", 'output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }\ndynamic')},
        core="multiple outputs in model first are mapped to the same ensemble tensor",
    ),
    Plant(
        "an input left open",
        "step-input-unmapped",
        ALL,
        "{",
        {"left/config.pbtxt": ("optional: true ", "")},
        {
            "left/config.pbtxt": (
                "output",
                'input { name: "Z" data_type: TYPE_FP32 optional: true dims: [ 4 ] }\noutput',
            ),
            "left/1/model.py": (
                "responses = []",
                'responses = [pb_utils.get_input_tensor_by_name(r, "Z") for r in requests][:0]',
            ),
        },
        core="input Z in model left is not mapped",
    ),
    Plant(
        "two types of a tensor",
        "step-dtype",
        ALL,
        "first_y",
        {"left/config.pbtxt": ("TYPE_FP32", "TYPE_INT64")},
        core="inconsistent data type",
    ),
    Plant(
        "another type than the ensemble's",
        "step-dtype",
        ALL,
        "IN",
        ensemble('"IN" data_type: TYPE_FP32', '"IN" data_type: TYPE_FP64'),
        core="inconsistent data type",
    ),
    Plant(
        "two shapes of a tensor",
        "step-shape",
        ALL,
        "first_y",
        {"left/config.pbtxt": ("dims: [ 4 ] }\noutput", "dims: [ 5 ] }\noutput")},
        core="inconsistent shape",
    ),
    Plant(
        "a number for a vector",
        "step-shape",
        ALL,
        '"IN"',
        {ALL: ("dims: [ 4 ] } ]\noutput", "dims: [ 1 ] reshape { } } ]\noutput")},
        core="inconsistent shape",
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
        "a decoupled one joined",
        "decoupled-joined",
        ALL,
        "{",
        {"left/config.pbtxt": ("instance_group", DECOUPLED)},
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
