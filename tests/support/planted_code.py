"""Mistakes in the shape of a model.py."""

from __future__ import annotations

from tests.support.planted import MODEL, Plant

CODE = "first/1/model.py"
RETURN = "        return responses\n"
OURS = "from shoal import Component\n"
START = "    def execute(self, requests):\n"
COMPLETE = """    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

"""
READ = """    def initialize(self, args):
        with open(__file__, encoding="utf-8") as file:
            self.text = file.read()

"""
TENSOR = 'pb_utils.Tensor("Y", x * np.float32(2))'
SHARED = 'pb_utils.Tensor.from_dlpack("Y", x * np.float32(2))'

PLANTS = (
    Plant(
        "a colon forgotten",
        "model-py-syntax",
        CODE,
        "def execute",
        {CODE: ("requests):", "requests)")},
        core=r"SyntaxError: expected ':'",
        model="first",
    ),
    Plant(
        "Python 2",
        "model-py-syntax",
        CODE,
        "print responses",
        {CODE: (RETURN, "        print responses\n" + RETURN)},
        core="SyntaxError",
        model="first",
    ),
    Plant(
        "a text in Latin-1",
        "model-py-syntax",
        CODE,
        "",
        {CODE: MODEL.encode() + 'LABEL = "très joli"\n'.encode("latin-1")},
        core="SyntaxError",
        model="first",
    ),
    Plant("a NUL", "model-py-syntax", CODE, "", {CODE: MODEL.encode() + b"# \0\n"}, core="null bytes", model="first"),
    Plant(
        "a class of another name",
        "no-model-class",
        CODE,
        "class TritonModel:",
        {CODE: ("TritonPythonModel", "TritonModel")},
        core="has no attribute 'TritonPythonModel'",
        model="first",
    ),
    Plant(
        "no class at all",
        "no-model-class",
        CODE,
        "",
        {CODE: "import numpy\n"},
        core="has no attribute 'TritonPythonModel'",
        model="first",
    ),
    Plant(
        "an initialize without its argument",
        "wrong-signature",
        CODE,
        "def initialize(self):",
        {CODE: ("def initialize(self, args):", "def initialize(self):")},
        {CODE: (START, READ + START)},
        core=r"TypeError: .*initialize\(\) takes 1 positional argument but 2 were given",
        model="first",
    ),
    Plant(
        "a constructor that wants an argument",
        "wrong-signature",
        CODE,
        "def __init__",
        {CODE: ("def __init__(self):", "def __init__(self, args):")},
        {CODE: (START, "    def __init__(self):\n        self.count = 0\n\n" + START)},
        core=r"TypeError: .*__init__\(\) missing 1 required positional argument: 'args'",
        model="first",
    ),
    Plant(
        "an execute without self",
        "wrong-signature",
        CODE,
        "def execute(requests)",
        {CODE: ("def execute(self, requests)", "def execute(requests)")},
    ),
    Plant(
        "an execute that yields", "wrong-signature", CODE, "def execute", {CODE: (RETURN, "        yield responses\n")}
    ),
    Plant("no execute", "wrong-signature", CODE, "class TritonPythonModel", {CODE: ("def execute", "def predict")}),
    Plant(
        "an initialize that is not awaited",
        "wrong-signature",
        CODE,
        "async def initialize",
        {CODE: ("    def initialize", "    async def initialize")},
        {CODE: (START, READ + START)},
    ),
    Plant(
        "an auto_complete_config that is no static method",
        "wrong-signature",
        CODE,
        "def auto_complete_config",
        {CODE: ("    @staticmethod\n    def auto_complete_config(", "    def auto_complete_config(self, ")},
        {CODE: (START, COMPLETE + START)},
    ),
    Plant(
        "a capsule",
        "dlpack-capsule",
        CODE,
        "from_dlpack",
        {CODE: ("x * np.float32(2))", "(x * np.float32(2)).__dlpack__())")},
        {CODE: (TENSOR, SHARED)},
    ),
    Plant(
        "a capsule by another name",
        "dlpack-capsule",
        CODE,
        "from_dlpack",
        {CODE: ("            y = x * np.float32(2)\n", "            y = (x * np.float32(2)).__dlpack__()\n")},
        {
            CODE: (
                f"            responses.append(pb_utils.InferenceResponse([{TENSOR}]))",
                "            y = x * np.float32(2)\n"
                '            tensor = pb_utils.Tensor.from_dlpack("Y", y)\n'
                "            responses.append(pb_utils.InferenceResponse([tensor]))",
            )
        },
    ),
    Plant(
        "a text without its encoding",
        "text-opened-as-ascii",
        CODE,
        "open(",
        {CODE: (', encoding="utf-8"', "")},
        {CODE: (START, READ + START)},
    ),
    Plant(
        "a part of shoal from before it moved",
        "import-not-in-shoal",
        CODE,
        "shoal.component",
        {CODE: (OURS, OURS.replace("from shoal", "from shoal.component"))},
        {CODE: OURS + MODEL},
    ),
    Plant(
        "a name that shoal lacks",
        "import-not-in-shoal",
        CODE,
        "Componend",
        {CODE: (OURS, OURS.replace("ent", "end"))},
        {CODE: OURS + MODEL},
    ),
)
