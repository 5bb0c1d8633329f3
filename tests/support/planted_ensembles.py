"""Mistakes in an ensemble alone."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import ENSEMBLE, Edit, Plant, change, changes

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

TWO_OUTPUTS: dict[str, Edit] = {
    "first/config.pbtxt": ("dynamic", 'output { name: "Z" data_type: TYPE_FP32 dims: [ 4 ] }\ndynamic'),
    "first/1/model.py": ('"Y", x * np.float32(2))', '"Y", x * np.float32(2)), pb_utils.Tensor("Z", x)'),
}

PLANTS = (
    page("ensemble-backend", ALL, core="ensemble scheduling cannot be set"),
    page("ensemble-carries", ALL, core="instance group should not be specified"),
    page("step-incomplete", ALL, line="{", core="must specify 'output_map'"),
    page("tensor-written-twice", ALL, core="can appear in an output map only once"),
    page("ensemble-input-unused", ALL, line='"IN"', core="ensemble input 'IN' .* is not used"),
    page("ensemble-output-unwritten", ALL, line='"OUT"', core="ensemble output 'OUT' .* is not used"),
    page("ensemble-tensor-unused", ALL, TWO_OUTPUTS, core="is unused in ensemble"),
    change(
        ALL,
        "tensor-written-twice",
        "a step that writes what the request gives",
        '"first_y" }\n',
        '"first_y" }\n      output_map { key: "Z" value: "IN" }\n',
        line='key: "Z"',
        good=TWO_OUTPUTS,
    ),
    page("output-read-inside", ALL),
    page("limit-side-by-side", at=ALL, line='model_name: "left"', target="embedded"),
    *changes(
        ALL,
        (
            "ensemble-backend",
            "an ensemble with a backend",
            "max_batch",
            'backend: "python"\nmax_batch',
            "empty backend type",
        ),
        (
            "ensemble-without-steps",
            "an ensemble without scheduling",
            SCHEDULING,
            "",
            "ensemble scheduling must be set",
            "platform",
        ),
        (
            "ensemble-without-steps",
            "an ensemble without steps",
            SCHEDULING,
            "ensemble_scheduling { }\n",
            "must specify 'step'",
        ),
        (
            "ensemble-without-steps",
            "a model with steps",
            'platform: "ensemble"',
            'backend: "python"',
            "ensemble scheduling cannot be set",
            "ensemble_scheduling",
        ),
        (
            "ensemble-carries",
            "optimization of an ensemble",
            "max_batch",
            "optimization { }\nmax_batch",
            "optimization should not be specified",
        ),
        (
            "ensemble-carries",
            "warm-up of an ensemble",
            "max_batch",
            'model_warmup { name: "w" inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } }'
            "\nmax_batch",
            "model_warmup can not be specified",
            "model_warmup",
        ),
        ("step-incomplete", "a step without model", 'model_name: "first"', "", "must specify 'model_name'", "{"),
        (
            "step-incomplete",
            "a step without inputs",
            'input_map { key: "X" value: "IN" }',
            "",
            "must specify 'input_map'",
            "{",
        ),
        (
            "ensemble-output-unwritten",
            "steps in a circle",
            '"X" value: "first_y"',
            '"X" value: "OUT"',
            "is not written",
            "OUT",
        ),
        (
            "ensemble-output-unwritten",
            "a tensor from nowhere",
            '"X" value: "first_y"',
            '"X" value: "frist_y"',
            "is not written|is unused",
            "OUT",
        ),
        ("ensemble-tensor-unused", "a circle beside", "  step [\n", CIRCLE, "is unused in ensemble", "one"),
    ),
    Plant(
        "two steps that read the request",
        "several-first-steps",
        ALL,
        'model_name: "right"',
        {ALL: BESIDE},
        target="embedded",
    ),
)
