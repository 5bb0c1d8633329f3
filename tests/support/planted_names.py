"""Tensors that a model.py and its configuration name differently."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Edit, Plant, change, changes

CODE = "first/1/model.py"
START = "    def execute(self, requests):\n"
ASKS = """    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        dtype = pb_utils.get_output_config_by_name(model_config, "Y")["data_type"]

"""

IMPORTS = "import json\nfrom pathlib import Path\n\n"
FIRST, TEXTS = "first/config.pbtxt", 'parameters { key: "names" value { string_value: "names.json" } }\ninstance_group'
# Reads of a parameter and a file through a mapping of texts, a lambda and a function.
LOADING = """    def initialize(self, args):
        given = json.loads(args["model_config"])["parameters"]
        texts = {name: value["string_value"] for name, value in given.items()}
        get = lambda key: given[key]["string_value"]
        folder = Path(args["model_repository"]) / args["model_version"]
        self.names = self.load(folder / "names.json")
        self.same = json.loads((folder / "names.json").read_text())
        self.kept = get("names"), texts["names"]

    def load(self, path):
        with open(path, encoding="utf-8") as file:
            return json.load(file)

"""
LOADS: dict[str, Edit] = {
    CODE: IMPORTS + MODEL.replace(START, LOADING + START),
    FIRST: ("instance_group", TEXTS),
    "first/1/names.json": '{\n"a": 1\n}\n',
}
COUNTS = """
    def count(self):
        calls = 0
        calls += 1

"""

PLANTS = (
    *changes(
        CODE,
        ("parameter-missing", "a parameter that a lambda reads", 'get("names")', 'get("name")', "KeyError", "get ="),
        ("parameter-missing", "a parameter among texts", 'texts["names"]', 'texts["name"]', "KeyError"),
        (
            "file-not-there",
            "a text in another folder",
            '(folder / "names',
            '(folder.parent / "names',
            "No such file",
            "with open",
        ),
        good=LOADS,
        model="first",
    ),
    *(
        Plant(name, rule, file, line, {"first/1/names.json": content}, LOADS, core, "first")
        for name, rule, file, line, content, core in (
            ("a file in UTF-16", "text-beyond-ascii", CODE, "self.same", "{}".encode("utf-16"), "can't decode byte"),
            ("a comma behind the last", "artifact-unreadable", "first/1/names.json", "}", '{\n"a": 1,\n}\n', ""),
        )
    ),
    change(
        CODE,
        "undefined-name",
        "a variable of the module without global",
        "        calls = 0\n",
        "",
        line="calls +=",
        good={
            CODE: MODEL.replace(START, f"{COUNTS}{START}").replace(
                "responses = []", "self.count()\n        responses = []"
            )
        },
    ),
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
