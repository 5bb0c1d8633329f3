"""Tensors that a model.py and its configuration name differently."""

from __future__ import annotations

from tests.support.planted import MODEL, change, changes

CODE = "first/1/model.py"
START = "    def execute(self, requests):\n"
ASKS = """    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        self.dtype = pb_utils.get_output_config_by_name(model_config, "Y")["data_type"]

"""

PLANTS = (
    *changes(
        CODE,
        ("reads-unknown-input", "an input of another name", '"X"', '"x"'),
        ("reads-unknown-input", "an input that only the article has", '"X"', '"TEXT"'),
    ),
    change(
        CODE,
        "wrong-config-name",
        "the dtype of another name",
        'model_config, "Y"',
        'model_config, "y"',
        "'NoneType' object is not subscriptable",
        good={CODE: "import json\n\n" + MODEL.replace(START, ASKS + START)},
        model="first",
    ),
)
