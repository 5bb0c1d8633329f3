"""Mistakes that only requests show: optional inputs, sequences, inputs that are declared twice."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import BATCHING, ENSEMBLE, UNBOUNDED, Edit, Plant, change, config
from tests.support.planted_scheduling import SEQUENCE

ALL = "all/config.pbtxt"
OPTIONAL = "dims: [ 4 ] optional: true }"
IN = 'input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]'
OPTIONAL_IN = IN.replace("dims: [ 4 ] }", OPTIONAL)
TWO = IN.replace(" ]\n", "").removesuffix(" ]") + ', { name: "MORE" data_type: TYPE_FP32 dims: [ 4 ] optional: true } ]'
RIGHT = ENSEMBLE[ENSEMBLE.index('    {\n      model_name: "right"') : ENSEMBLE.index('    {\n      model_name: "join"')]
OUTER = """name: "outer"
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] optional: true } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ {
  model_name: "all" model_version: -1
  input_map { key: "IN" value: "IN" }
  output_map { key: "OUT" value: "OUT" }
} ] }
"""


def takes(name: str, *optional: str, inputs: tuple[str, ...] = ("X",), batching: str = BATCHING) -> dict[str, Edit]:
    """A model's configuration with optional inputs."""
    text = config(name, inputs, batching)
    for each in optional:
        declared = f'name: "{each}" data_type: TYPE_FP32 dims: [ 4 ] }}'
        text = text.replace(declared, declared.replace("dims: [ 4 ] }", OPTIONAL))
    return {f"{name}/config.pbtxt": text}


def required(name: str, inputs: tuple[str, ...] = ("X",), batching: str = BATCHING) -> dict[str, Edit]:
    return {f"{name}/config.pbtxt": config(name, inputs, batching)}


def without(*names: str) -> dict[str, Edit]:
    return {f"{name}/{file}": None for name in names for file in ("config.pbtxt", "1/model.py")}


JOINED = ENSEMBLE.replace(IN, TWO).replace(RIGHT, "").replace('value: "right_y"', 'value: "MORE"')
FORKED = ENSEMBLE.replace(IN, OPTIONAL_IN).replace(
    'input_map { key: "X" value: "first_y" }\n      output_map { key: "Y" value: "right_y" }',
    'input_map { key: "X" value: "IN" }\n      output_map { key: "Y" value: "right_y" }',
)
RULE = "optional-input-required"
OPTIONALS = (
    Plant(
        "an optional input of the last step",
        RULE,
        ALL,
        'value: "MORE"',
        required("join", ("A", "B")),
        {ALL: JOINED, **takes("join", "B", inputs=("A", "B")), **without("right")},
    ),
    Plant(
        "an optional input of two steps",
        RULE,
        ALL,
        'value: "IN"',
        required("right", batching=UNBOUNDED),
        {ALL: FORKED, **takes("first", "X"), **takes("right", "X", batching=UNBOUNDED)},
    ),
    Plant(
        "an optional input read twice",
        RULE,
        ALL,
        'key: "B" value: "MORE"',
        takes("join", "A", inputs=("A", "B")),
        {
            ALL: JOINED.replace('"left_y" }\n      input_map', '"MORE" }\n      input_map')
            .replace(
                ENSEMBLE[
                    ENSEMBLE.index('    {\n      model_name: "first"') : ENSEMBLE.index(
                        '    {\n      model_name: "right"'
                    )
                ],
                "",
            )
            .replace(TWO, TWO.replace('{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }, ', "")),
            **takes("join", "A", "B", inputs=("A", "B")),
            **without("first", "left", "right"),
        },
    ),
    Plant(
        "an optional input of an ensemble within",
        RULE,
        "outer/config.pbtxt",
        'value: "IN"',
        {ALL: ENSEMBLE},
        {
            "outer/config.pbtxt": OUTER,
            "outer/1/.gitkeep": "",
            ALL: ENSEMBLE.replace(IN, OPTIONAL_IN),
            **takes("first", "X"),
        },
    ),
)
SEQUENCE_WITHIN = Plant(
    "sequences in a step of an ensemble within",
    "sequence-in-ensemble",
    ALL,
    'model_name: "join"',
    {"join/config.pbtxt": (BATCHING, SEQUENCE)},
    {"outer/config.pbtxt": OUTER.replace(" optional: true", ""), "outer/1/.gitkeep": ""},
)
TWICE = change(
    "right/config.pbtxt",
    "input-twice",
    "an input twice, of two types",
    "output {",
    'input { name: "X" data_type: TYPE_FP16 dims: [ 4 ] }\noutput {',
    "",
    'input { name: "X"',
)
PLANTS = (
    page(RULE, at=ALL, line='value: "IN"'),
    page("sequence-in-ensemble", at=ALL, line='model_name: "first"'),
    page("input-twice"),
    *OPTIONALS,
    SEQUENCE_WITHIN,
    TWICE,
)
