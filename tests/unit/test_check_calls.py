"""Calls, attributes, parameters and files of a model.py that are right, or may be: none of them is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.authoring.check.families import check
from tests.support.planted import MODEL, Edit, Plant, config
from tests.support.planted_calls import CODE, FIRST, GIVEN, IMPORTS, SENDING, initialize

ANSWER = "            responses.append"
TAKES = "asked = pb_utils.InferenceRequest(model_name={}, requested_output_names={}, inputs=[])"
EXECUTES = {
    "a tuple of tensors": 'pb_utils.InferenceResponse((pb_utils.Tensor("Y", x),), error=None)',
    "parameters of later releases": 'pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)], parameters={"a": 1})',
    "arguments from elsewhere": "given, more = [], {}\n            pb_utils.InferenceResponse(*given, **more)",
    "a model of another repository": TAKES.format('"elsewhere"', '["Z"]'),
    "a model by a variable": "name = str(x)\n            " + TAKES.format("name", '["Z"]'),
    "outputs by a variable": "names = list(x)\n            " + TAKES.format('"left"', "names"),
    "an attribute of what may be another thing": "y = list([request])[0]\n            y.send(x)",
    "a name that is bound twice": "y = pb_utils.Tensor('Y', x)\n            y = [y]\n            y.append(x)",
    "a tensor by DLPack": "import torch\n            pb_utils.Tensor.from_dlpack('Y', torch.tensor(x).cpu())",
    "a logger's method": "pb_utils.Logger.log_warn(str(request.parameters()))",
    "attributes that another function may set": "y = dict(a=self)\n            z = self.scale",
    "a continue behind an answer": "if len(x) > 9:\n                responses.append(None)\n                continue",
    "names of NumPy's own": "y = x.astype(np.float64) + np.bool_(True) + np.int32(1)",
    "a removed name that is asked for first": "y = np.float(x) if hasattr(np, 'float') else float(x)",
}
READS = 'json.loads(args["model_config"])["parameters"]'
STARTS = {
    "a parameter under a condition": ('if "kind" in args:', f'    self.kind = {READS}["kind"]["string_value"]'),
    "a parameter in a try": ("try:", f'    self.kind = {READS}["kind"]', "except KeyError:", "    self.kind = None"),
    "a parameter after a return": ("if len(args) > 99:", "    return", f'self.kind = {READS}["kind"]'),
    "a parameter with a default": (f'self.kind = {READS}.get("kind", {{}})',),
    "another mapping of parameters": ('self.kind = dict(args)["parameters"]["kind"]["string_value"]',),
    "a number with a fraction": (f'self.size = float({READS}["size"]["string_value"])',),
    "a key that it sets before": ('args["kind"] = "a"', 'self.kind = args["kind"]'),
    "a parameter that it sets before": (
        f"found = {READS}",
        'found.setdefault("kind", "a")',
        'self.kind = found["kind"]',
    ),
    "the beginning of a text": ('self.shown = args["model_config"][:80]',),
    "a written file": ('log = open("log.txt", "w", encoding="utf-8")',),
    "a changed folder": ("import os", "os.chdir('/')", 'file = open("labels.txt", encoding="utf-8")'),
    "a configuration that is parsed": (
        "config = json.loads(args['model_config'])",
        'self.size = config["max_batch_size"]',
    ),
}
RIGHT: dict[str, dict[str, Edit]] = {
    **{name: {CODE: MODEL.replace(ANSWER, f"            {line}\n{ANSWER}")} for name, line in EXECUTES.items()},
    **{name: initialize(*lines, settings=GIVEN.replace('"8"', '"1.5"')) for name, lines in STARTS.items()},
    "answers that are sent": {CODE: SENDING},
    "another thing that sends": {
        CODE: SENDING.replace(
            "            sender.send",
            "            q = print\n            for y in x:\n                q.send(y)\n            sender.send",
        )
    },
    "a library with the name of a folder of data": {
        CODE: "import tokenizer, tokenizers\n" + MODEL,
        "first/1/tokenizer/vocab.txt": "a\n",
        "first/tokenizers/vocab.txt": "a\n",
        "first/1/tokenizers_x.py": "",
    },
    "a class of one's own": {CODE: IMPORTS + "class Tensor:\n    pass\n\n\n" + MODEL},
    "a passive instance beside one that is not": {
        FIRST: ("instance_group [ {", "instance_group [ { kind: KIND_CPU passive: true }, {")
    },
    "a version policy without a choice": {FIRST: ("dynamic", "version_policy { }\ndynamic")},
    "an environment in a bucket": {
        FIRST: (
            "instance_group",
            'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "s3://bucket/env.tar.gz" } }\ninstance_group',
        )
    },
    "a model that takes all rows as one": {
        "first/config.pbtxt": config("first", batching="")
        .replace("max_batch_size: 8", "max_batch_size: 0")
        .replace("[ 4 ]", "[ -1, 4 ]")
    },
}


@pytest.mark.parametrize("edits", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("target", [None, "embedded"])
def test_what_may_be_right_is_left_alone(edits: dict[str, Edit], target: str | None, tmp_path: Path) -> None:
    findings = check(Plant("", "", "", "", edits).write(tmp_path, is_bad=True), target=target)
    assert [f.what for f in findings if f.rule.id != "several-first-steps"] == []
