"""The checks of a model.py's tensor names, and of files: what must be found, and above all what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted import MODEL, config
from tests.support.sources import check_source, execute, find


@pytest.mark.parametrize(
    "text",
    [
        execute("pass", head="@wrapped\n    def execute(self, requests):"),
        execute("return []").replace("class TritonPythonModel:", "class TritonPythonModel(Base):"),
    ],
    ids=["an unknown decorator", "an unknown base"],
)
def test_unknown_names_in_execute_are_ignored(text: str, tmp_path: Path) -> None:
    assert check_source(tmp_path, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "from models import TritonPythonModel",
        "from models import *",
        "from models import Model as TritonPythonModel",
        "import models\nTritonPythonModel = models.Model",
        "try:\n    import torch\n    class TritonPythonModel:\n        def execute(self, requests): return []\n"
        "except ImportError:\n    class TritonPythonModel:\n        def execute(self, requests): return []",
        "class Model:\n    def execute(self, requests): return []\n\nTritonPythonModel = Model",
        "def TritonPythonModel():\n    return Model()",
        "globals()['Triton' + 'PythonModel'] = object",
        "a, TritonPythonModel = make()",
        "class Base:\n    def execute(self, requests): return []\n\nclass TritonPythonModel(Base):\n    pass",
        "from models import Base\n\nclass TritonPythonModel(Base):\n    pass",
        "from models import register\n\n@register\nclass TritonPythonModel:\n    pass",
        "class TritonPythonModel:\n    from models import execute",
        "class TritonPythonModel:\n    execute = answer",
    ],
)
def test_a_class_may_come_from_anywhere(text: str, tmp_path: Path) -> None:
    assert check_source(tmp_path, text) == []


@pytest.mark.parametrize(
    ("method", "is_callable"),
    [
        ("def initialize(self, args): pass", True),
        ("def initialize(self, args, more=None): pass", True),
        ("def initialize(self, *args, **more): pass", True),
        ("def initialize(self, /, args): pass", True),
        ("@staticmethod\n    def initialize(args): pass", True),
        ("@classmethod\n    def initialize(cls, args): pass", True),
        ("@logged\n    def initialize(self): pass", True),
        ("@torch.no_grad()\n    def initialize(self, args): pass", True),
        ("@torch.no_grad()\n    def initialize(self): pass", False),
        ("def initialize(self, args, more): pass", False),
        ("def initialize(self, args, *, more): pass", False),
        ("@staticmethod\n    def initialize(self, args): pass", False),
        ("def is_ready(self): return True", True),
        ("def is_ready(self, request): return True", False),
        ("def auto_complete_config(config): return config", True),
        ("@classmethod\n    def auto_complete_config(cls, config): return config", True),
        ("@classmethod\n    def auto_complete_config(config): return config", False),
        ("def predict(self): pass", True),
    ],
)
def test_a_method_takes_what_triton_gives(method: str, is_callable: bool, tmp_path: Path) -> None:
    assert check_source(tmp_path, execute("return []") + f"\n    {method}\n") == ["wrong-signature"] * (not is_callable)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("﻿" + MODEL, []),
        (MODEL.replace("\n", "\r\n"), []),
        ("# -*- coding: latin-1 -*-\nNAME = 'tr\xe8s'\n".encode("latin-1") + MODEL.encode(), []),
        (MODEL + "PATTERN = '\\d'\n", []),  # a warning, no error
        (MODEL + "if __name__ == '__main__':\n    import nltk\n    nltk.download('punkt')\n", []),
        (MODEL + "x = " + "(" * 150 + ")" * 150 + "\n", []),
        (MODEL + "x = " + "-" * 90_000 + "1\n", []),
        (MODEL + "x = " + "+".join(["1"] * 50_000) + "\n", []),
        (MODEL + "if a: pass\n" + "elif b: pass\n" * 20_000, []),
        (b"", ["no-model-class"]),
        (b"\xff\xfe\x00", ["model-py-syntax"]),
        (MODEL + "def f(:\n", ["model-py-syntax"]),
    ],
)
def test_odd_sources_are_borne(text: str | bytes, rules: list[str], tmp_path: Path) -> None:
    found = check_source(tmp_path, text)
    # How deep a Python may nest is its own affair: what is too deep for this one is left alone, or said to be.
    assert found == rules or (len(text) > 1000 and found == ["model-py-syntax"] and "(" * 150 in str(text))


def test_large_sources_are_read_through(tmp_path: Path) -> None:
    line = '            a = pb_utils.Tensor("Y", x) if open(p) else pb_utils.InferenceRequest(inputs=[a])\n'
    text = MODEL.replace("            responses", line * 2200 + "            responses")
    assert set(check_source(tmp_path / "a", text)) <= {"text-opened-as-ascii"}
    assert check_source(tmp_path / "b", MODEL + "x = [1, 2, 3]\n" * 300_000) == []
    nested = "".join(f"{' ' * n}try:\n{' ' * n} a()\n{' ' * n}finally:\n" for n in range(80)) + " " * 80 + "return []\n"
    assert check_source(tmp_path / "c", execute(nested)) == []


COMPONENT = """from shoal.kit.component.base import Component


class Double(Component):
    def run(self, batch):
        return {"OUT": batch["IN"] * 2}


TritonPythonModel = Double.for_triton()
"""


def test_a_component_checks_its_own_tensors(tmp_path: Path) -> None:
    assert check_source(tmp_path, COMPONENT) == []


def test_inputs_added_by_a_sequence_batcher_are_declared(tmp_path: Path) -> None:
    sequence = (
        'sequence_batching { control_input { name: "START"'
        " control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }"
        ' state { input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 4 ] } }\n'
    )
    for name, rules in (("STATE", []), ("State", ["reads-unknown-input"]), ("sTART", ["reads-unknown-input"])):
        assert check_source(tmp_path / name, MODEL.replace('"X"', f'"{name}"')) == ["reads-unknown-input"]  # without it
        path = tmp_path / name / "m" / "config.pbtxt"
        path.write_text(config("m", batching=sequence), encoding="utf-8")
        assert [finding.rule.id for finding in find(tmp_path / name)] == rules


def test_only_versions_that_are_served_count(tmp_path: Path) -> None:
    assert check_source(tmp_path, "def f(:") == ["model-py-syntax"]
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "model.py").write_text(MODEL, encoding="utf-8")
    assert find(tmp_path) == []
    configuration = tmp_path / "m" / "config.pbtxt"
    for policy in ("all { }", "specific { versions: [ 1 ] }", "latest { num_versions: 2 }"):
        configuration.write_text(config("m") + f"version_policy {{ {policy} }}\n", encoding="utf-8")
        assert [finding.rule.id for finding in find(tmp_path)] == ["model-py-syntax"]


def test_names_that_a_shell_would_read(tmp_path: Path) -> None:
    for name in ("my model", "a;b", "a&b", "a(b)", "a'b"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(MODEL, encoding="utf-8")
        (tmp_path / name / "config.pbtxt").write_text(config(name), encoding="utf-8")
    assert [finding.rule.id for finding in find(tmp_path)] == ["unsafe-name"] * 5


def test_the_path_of_an_environment(tmp_path: Path) -> None:
    parameter = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "%s" } }\n'
    assert check_source(tmp_path / "a", MODEL, parameter % "$$TRITON_MODEL_DIRECTORY/env.tar.gz") == []
    assert check_source(tmp_path / "b", MODEL, parameter % "/opt/my env") == ["unsafe-name"]


def test_only_dangling_links_are_found(tmp_path: Path) -> None:
    assert check_source(tmp_path, MODEL) == []
    (tmp_path / "m" / "1" / "folder.pt").mkdir()
    (tmp_path / "m" / "1" / "circle.pt").symlink_to("circle.pt")
    (tmp_path / "m" / "env").mkdir()
    (tmp_path / "m" / "env" / "pyvenv.cfg").touch()
    (tmp_path / "m" / "env" / "python3").symlink_to("/usr/bin/env")  # an environment is made of links
    assert [(f.rule.id, f.place.path.name) for f in find(tmp_path)] == [("dangling-link", "circle.pt")]
