"""Mistakes in an ensemble alone."""

from __future__ import annotations

from tests.support.planted import ENSEMBLE, ON_PAGE, Edit, Plant, config

ALL = "all/config.pbtxt"


def ensemble(old: str, new: str) -> dict[str, Edit]:
    return {ALL: (old, new)}


_FIRST_STEP = ENSEMBLE[ENSEMBLE.index("    {\n") : ENSEMBLE.index('    {\n      model_name: "left"')]
BESIDE = ENSEMBLE.replace(_FIRST_STEP, "").replace("first_y", "IN")
SCHEDULING = ENSEMBLE[ENSEMBLE.index("ensemble_scheduling") :]

CIRCLE = """  step [
    { model_name: "left" model_version: -1
      input_map { key: "X" value: "two" } output_map { key: "Y" value: "one" } },
    { model_name: "right" model_version: -1
      input_map { key: "X" value: "one" } output_map { key: "Y" value: "two" } },
"""

PLANTS = (
    Plant(
        "a backend called ensemble",
        "ensemble-backend",
        ALL,
        "backend",
        {ALL: ON_PAGE},
        core="ensemble scheduling cannot be set",
    ),
    Plant(
        "an ensemble with a backend",
        "ensemble-backend",
        ALL,
        "backend",
        ensemble("max_batch", 'backend: "python"\nmax_batch'),
        core="empty backend type",
    ),
    Plant(
        "an ensemble without scheduling",
        "ensemble-without-steps",
        ALL,
        "platform",
        ensemble(SCHEDULING, ""),
        core="ensemble scheduling must be set",
    ),
    Plant(
        "an ensemble without steps",
        "ensemble-without-steps",
        ALL,
        "ensemble_scheduling",
        ensemble(SCHEDULING, "ensemble_scheduling { }\n"),
        core="must specify 'step'",
    ),
    Plant(
        "a model with steps",
        "ensemble-without-steps",
        ALL,
        "ensemble_scheduling",
        ensemble('platform: "ensemble"', 'backend: "python"'),
        core="ensemble scheduling cannot be set",
    ),
    Plant(
        "instances of an ensemble",
        "ensemble-carries",
        ALL,
        "instance_group",
        ensemble("max_batch", "instance_group { kind: KIND_CPU }\nmax_batch"),
        core="instance group should not be specified",
    ),
    Plant(
        "optimization of an ensemble",
        "ensemble-carries",
        ALL,
        "optimization",
        ensemble("max_batch", "optimization { }\nmax_batch"),
        core="optimization should not be specified",
    ),
    Plant(
        "warm-up of an ensemble",
        "ensemble-carries",
        ALL,
        "model_warmup",
        ensemble(
            "max_batch",
            'model_warmup { name: "w" inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } }'
            "\nmax_batch",
        ),
        core="model_warmup can not be specified",
    ),
    Plant(
        "a step without model",
        "step-incomplete",
        ALL,
        "{",
        ensemble('model_name: "first"', ""),
        core="must specify 'model_name'",
    ),
    Plant(
        "a step without inputs",
        "step-incomplete",
        ALL,
        "{",
        ensemble('input_map { key: "X" value: "IN" }', ""),
        core="must specify 'input_map'",
    ),
    Plant(
        "a step without outputs",
        "step-incomplete",
        ALL,
        "{",
        ensemble('output_map { key: "Y" value: "OUT" }', ""),
        core="must specify 'output_map'",
    ),
    Plant(
        "a tensor written twice",
        "tensor-written-twice",
        ALL,
        "left_y",
        ensemble('"Y" value: "right_y"', '"Y" value: "left_y"'),
        core="can appear in an output map only once",
    ),
    Plant(
        "an unread input",
        "ensemble-input-unused",
        ALL,
        "EXTRA",
        ensemble("input [", 'input [ { name: "EXTRA" data_type: TYPE_FP32 dims: [ 4 ] },'),
        core="ensemble input 'EXTRA' .* is not used",
    ),
    Plant(
        "an unwritten output",
        "ensemble-output-unwritten",
        ALL,
        "EXTRA",
        ensemble("output [", 'output [ { name: "EXTRA" data_type: TYPE_FP32 dims: [ 4 ] },'),
        core="ensemble output 'EXTRA' .* is not used",
    ),
    Plant(
        "steps in a circle",
        "ensemble-output-unwritten",
        ALL,
        "OUT",
        ensemble('"X" value: "first_y"', '"X" value: "OUT"'),
        core="is not written",
    ),
    Plant(
        "a tensor from nowhere",
        "ensemble-output-unwritten",
        ALL,
        "OUT",
        ensemble('"X" value: "first_y"', '"X" value: "frist_y"'),
        core="is not written|is unused",
    ),
    Plant(
        "an unread tensor",
        "ensemble-tensor-unused",
        ALL,
        "nobody",
        {
            ALL: (
                'output_map { key: "Y" value: "first_y" }',
                'output_map { key: "Y" value: "first_y" }\n      output_map { key: "Z" value: "nobody" }',
            )
        },
        {
            "first/config.pbtxt": ("dynamic", 'output { name: "Z" data_type: TYPE_FP32 dims: [ 4 ] }\ndynamic'),
            "first/1/model.py": ('"Y", x * np.float32(2))', '"Y", x * np.float32(2)), pb_utils.Tensor("Z", x)'),
        },
        core="is unused in ensemble",
    ),
    Plant(
        "a circle beside",
        "ensemble-tensor-unused",
        ALL,
        "one",
        {ALL: ("  step [\n", CIRCLE)},
        core="is unused in ensemble",
    ),
    Plant(
        "an output read inside",
        "output-read-inside",
        ALL,
        "first_y",
        ensemble("output [", 'output [ { name: "first_y" data_type: TYPE_FP32 dims: [ 4 ] },'),
    ),
    Plant(
        "two steps that read the request",
        "several-first-steps",
        ALL,
        'model_name: "right"',
        {ALL: BESIDE},
        target="embedded",
    ),
    Plant(
        "a limit to the queue of a step beside another",
        "limit-side-by-side",
        ALL,
        'model_name: "left"',
        {"left/config.pbtxt": config("left")},
        target="embedded",
    ),
)
