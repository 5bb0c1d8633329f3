"""Tensors that a model.py and its configuration name differently."""

from __future__ import annotations

from tests.support.planted import MODEL, Plant

FIRST, CODE = "first/config.pbtxt", "first/1/model.py"
START = "    def execute(self, requests):\n"
ASKS = """    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        self.dtype = pb_utils.get_output_config_by_name(model_config, "Y")["data_type"]

"""
COMPONENT = """from shoal.component.base import Component


class Double(Component):
    def run(self, batch):
        return {"Y": batch["X"] * 2}


TritonPythonModel = Double.for_triton()
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
        "an input of a loop",
        "reads-unknown-input",
        CODE,
        "get_input_tensor_by_name",
        {CODE: ('("X",)', '("X", "X2")')},
        {
            CODE: MODEL.replace(
                'x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()',
                'x = sum(pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("X",))',
            )
        },
    ),
    Plant(
        "an input of a component",
        "reads-unknown-input",
        CODE,
        'batch["IN"]',
        {CODE: ('batch["X"]', 'batch["IN"]')},
        {CODE: COMPONENT},
    ),
    Plant("an output of another name", "writes-unknown-output", CODE, '"OUT"', {CODE: ('"Y"', '"OUT"')}),
    Plant(
        "an output beside the inputs of another model",
        "writes-unknown-output",
        CODE,
        '"OUT"',
        {CODE: ('"Y"', '"OUT"')},
        {CODE: CALLS},
    ),
    Plant(
        "an output of a component",
        "writes-unknown-output",
        CODE,
        '"OUT"',
        {CODE: ('"Y"', '"OUT"')},
        {CODE: COMPONENT},
    ),
    Plant(
        "an output that never comes",
        "output-never-written",
        FIRST,
        '"Z"',
        {FIRST: ("dynamic", SECOND)},
    ),
    Plant(
        "an output that a component never returns",
        "output-never-written",
        FIRST,
        '"Z"',
        {FIRST: ("dynamic", SECOND)},
        {CODE: COMPONENT},
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
