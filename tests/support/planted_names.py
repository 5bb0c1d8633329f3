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
CALLS = MODEL.replace(
    "            responses",
    '            inner = pb_utils.InferenceRequest(model_name="other", inputs=[pb_utils.Tensor("ITS_INPUT", x)])\n'
    '            x = pb_utils.get_output_tensor_by_name(inner.exec(), "ITS_OUTPUT").as_numpy()\n'
    "            responses",
)
SECOND = 'output { name: "Z" data_type: TYPE_FP32 dims: [ 4 ] }\ndynamic'

PLANTS = (
    Plant("an input of another name", "reads-unknown-input", CODE, '"x"', {CODE: ('"X"', '"x"')}),
    Plant(
        "an input by a constant",
        "reads-unknown-input",
        CODE,
        "get_input_tensor_by_name",
        {CODE: ('NAME = "X"', 'NAME = "TEXT"')},
        {CODE: MODEL.replace('"X"', "self.NAME").replace(START, f'    NAME = "X"\n\n{START}')},
    ),
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
    Plant("an output of another name", "writes-unknown-output", CODE, '"OUT"', {CODE: ('"Y"', '"OUT"')}),
    Plant(
        "an output that never comes",
        "output-never-written",
        FIRST,
        '"Z"',
        {FIRST: ("dynamic", SECOND)},
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
