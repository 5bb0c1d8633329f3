"""Tensors that a model.py and its configuration name differently."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, change

CODE = "first/1/model.py"
START = "    def execute(self, requests):\n"
ASKS = """    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        dtype = pb_utils.get_output_config_by_name(model_config, "Y")["data_type"]

"""

PLANTS = (
    page("reads-unknown-input", at=CODE, line='"x"'),
    page("optional-input-read", at=CODE, line='"X"'),
    page("output-not-made", CODE),
    page("output-type", CODE),
    change(
        CODE,
        "reads-unknown-input",
        "a control that is not declared",
        "            responses",
        '            end = pb_utils.get_input_tensor_by_name(request, "END").as_numpy()\n            responses',
    ),
    change(CODE, "reads-unknown-input", "an input that only the article has", '"X"', '"TEXT"'),
    page(
        "wrong-config-name",
        CODE,
        {CODE: "import json\n\n" + MODEL.replace(START, ASKS + START)},
        core="'NoneType' object is not subscriptable",
        model="first",
    ),
)
