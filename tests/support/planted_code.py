"""Mistakes in the shape of a model.py."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Plant, change, changes

CODE = "first/1/model.py"
RETURN = "        return responses\n"
OURS = "from shoal import Component\n"
START = "    def execute(self, requests):\n"
COMPLETE = """    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

"""
READ = """    def initialize(self, args):
        path = __file__
        with open(path, encoding="utf-8") as file:
            labels = file.read()

"""
BRANCH = "x = np.zeros(x.shape, np.float32) if len(requests) > 8 else x"
TENSOR = 'pb_utils.Tensor("Y", x * np.float32(2))'

PLANTS = (
    page("model-py-syntax", CODE, core=r"SyntaxError: expected ':'", model="first"),
    page("no-model-class", CODE, core="has no attribute 'TritonPythonModel'", model="first"),
    page("dlpack-capsule", CODE, {CODE: MODEL + '\n\ndef share(y):\n    pb_utils.Tensor.from_dlpack("Y", y)\n'}),
    page("text-opened-as-ascii", CODE, {CODE: (START, READ + START)}),
    page("undefined-name", CODE),
    page(
        "undefined-in-branch",
        CODE,
        {CODE: ("            responses.a", f"            {BRANCH}\n            responses.a")},
    ),
    page(
        "module-not-there",
        at=CODE,
        line="import helpers",
        good={CODE: "import helpers\n" + MODEL, "first/1/helpers.py": "LONG = 8\n"},
        core="No module named 'helpers'",
        model="first",
    ),
    page("wrong-answers", CODE),
    page("import-not-in-shoal", CODE, {CODE: OURS + MODEL}),
    change(
        CODE,
        "model-py-syntax",
        "Python 2",
        RETURN,
        "        print responses\n" + RETURN,
        "SyntaxError",
        "print responses",
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
        "no class at all",
        "no-model-class",
        CODE,
        "",
        {CODE: "import numpy\n"},
        core="has no attribute 'TritonPythonModel'",
        model="first",
    ),
    change(
        CODE,
        "wrong-signature",
        "an initialize without its argument",
        "def initialize(self, args):",
        "def initialize(self):",
        r"TypeError: .*initialize\(\) takes 1 positional argument but 2 were given",
        good={CODE: (START, READ + START)},
        model="first",
    ),
    change(
        CODE,
        "wrong-signature",
        "a constructor that wants an argument",
        "def __init__(self):",
        "def __init__(self, args):",
        r"TypeError: .*__init__\(\) missing 1 required positional argument: 'args'",
        good={CODE: (START, "    def __init__(self):\n        self.count = 0\n\n" + START)},
        model="first",
    ),
    *changes(
        CODE,
        ("wrong-signature", "an execute without self", "def execute(self, requests)", "def execute(requests)"),
        ("wrong-signature", "an execute that yields", RETURN, "        yield responses\n", "", "def execute"),
        ("wrong-answers", "an execute without return", RETURN, "        responses.sort()\n", "", "def execute"),
        ("undefined-name", "a module that is not imported", RETURN, "        return json.loads('[]')\n"),
        ("undefined-name", "an attribute that nothing sets", "x * np", "x * self.scale * np", "", "self.scale"),
        (
            "wrong-signature",
            "a method that nothing calls",
            START,
            f"    def initialise(self, args):\n        pass\n\n{START}",
        ),
        (
            "wrong-answers",
            "a request left out",
            "            x =",
            "            if requests:\n                continue\n            x =",
            "",
            "continue",
        ),
        (
            "wrong-answers",
            "one request of a batch",
            RETURN,
            "            return responses\n",
            "",
            "            return responses",
        ),
        (
            "wrong-answers",
            "one request of those of a second loop",
            RETURN,
            "        for answer in responses:\n            responses.append(answer)\n            return responses\n",
            "",
            "            return responses",
        ),
        (
            "wrong-answers",
            "a list that is kept",
            MODEL[MODEL.index("        responses = []") :],
            MODEL[MODEL.index("        for") :].replace("responses", "self.kept"),
            "",
            "return self.kept",
        ),
        (
            "wrong-answers",
            "an execute that returns a response",
            RETURN,
            "        return pb_utils.InferenceResponse([])\n",
            "",
            "return pb",
        ),
        ("wrong-signature", "no execute", "def execute", "def predict", "", "class TritonPythonModel"),
    ),
    change(
        CODE,
        "wrong-signature",
        "an initialize that is not awaited",
        "    def initialize",
        "    async def initialize",
        good={CODE: (START, READ + START)},
    ),
    change(
        CODE,
        "wrong-signature",
        "an auto_complete_config that is no static method",
        "    @staticmethod\n    def auto_complete_config(",
        "    def auto_complete_config(self, ",
        good={CODE: (START, COMPLETE + START)},
    ),
    change(
        CODE,
        "dlpack-capsule",
        "a capsule by another name",
        "            y = x * np.float32(2)\n",
        "            y = (x * np.float32(2)).__dlpack__()\n",
        "",
        "from_dlpack",
        good={
            CODE: (
                f"            responses.append(pb_utils.InferenceResponse([{TENSOR}]))",
                "            y = x * np.float32(2)\n"
                '            tensor = pb_utils.Tensor.from_dlpack("Y", y)\n'
                "            responses.append(pb_utils.InferenceResponse([tensor]))",
            )
        },
    ),
    change(
        CODE,
        "import-not-in-shoal",
        "a name that shoal lacks",
        OURS,
        OURS.replace("ent", "end"),
        "",
        "Componend",
        good={CODE: OURS + MODEL},
    ),
)
