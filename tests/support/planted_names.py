"""Tensors that a model.py and its configuration name differently."""

from __future__ import annotations

from tests.support.planted import MODEL, Plant

FIRST, CODE = "first/config.pbtxt", "first/1/model.py"
START = "    def execute(self, requests):\n"
METHOD = "    def answer(self, requests):\n"
ASKS = """    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        self.dtype = pb_utils.get_output_config_by_name(model_config, "Y")["data_type"]

"""

PLANTS = (
    Plant("an input of another name", "reads-unknown-input", CODE, '"x"', {CODE: ('"X"', '"x"')}),
    Plant("an input that only the article has", "reads-unknown-input", CODE, '"TEXT"', {CODE: ('"X"', '"TEXT"')}),
    Plant(
        "a misspelt input in a method",
        "reads-unknown-input",
        CODE,
        '"TXET"',
        {CODE: ('"TEXT"', '"TXET"')},
        {
            FIRST: ('"X"', '"TEXT"'),
            "all/config.pbtxt": ('{ key: "X" value: "IN" }', '{ key: "TEXT" value: "IN" }'),
            CODE: MODEL.replace('"X"', '"TEXT"').replace(
                START, f"{START}        return self.answer(requests)\n\n{METHOD}"
            ),
        },
    ),
    Plant(
        "the dtype of another name",
        "wrong-config-name",
        CODE,
        '"y"',
        {CODE: ('model_config, "Y"', 'model_config, "y"')},
        {CODE: "import json\n\n" + MODEL.replace(START, ASKS + START)},
        core="'NoneType' object is not subscriptable",
        model="first",
    ),
)
