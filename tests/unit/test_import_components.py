"""``FILE.py:CLASS``: a component of the user's becomes a model folder, or an error with the line in the user's file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.project.importing.components import list_files
from shoal.authoring.project.recipes import find_recipe
from shoal.clients.local import load
from shoal.errors import InputError, ShoalError

SCALED = '''"""Scales numbers."""

# Its factor is beside it.
from __future__ import annotations

from factors import FACTOR
from shoal import Component, StreamingComponent


class Scaled(Component):
    inputs = ["X:FP32:-1"]
    outputs = ["Y:FP32:-1"]

    def run(self, batch):
        return {"Y": batch["X"] * FACTOR}


class Without(Component):
    """Has no ``run``."""


class Silent(StreamingComponent):
    """Has no ``answers``."""


class Undeclared(Component):
    def run(self, batch):
        return batch


class Wrong(Undeclared):
    inputs = ["X:FP31:-1"]
    outputs = ["Y:FP32:-1"]


class Plain:
    pass
'''
STREAMING = """
import shoal

class Twice(shoal.StreamingComponent):
    inputs, outputs = ["X:FP32:1"], ["Y:FP32:1"]

    def answers(self, inputs, stream):
        yield {"Y": inputs["X"]}
        yield {"Y": inputs["X"] * 2}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "factors", raising=False)
    Path("scaled.py").write_text(SCALED, encoding="utf-8")
    Path("factors.py").write_text("import numpy\n\nFACTOR = numpy.float32(3)\n", encoding="utf-8")


def test_a_class_of_a_file_becomes_a_model() -> None:
    assert [path.name for path in list_files(Path("scaled.py"))] == ["factors.py", "scaled.py"]
    recipe = find_recipe("scaled.py:Scaled", name="thrice")
    assert recipe.commands[0] == ("add-model", "scaled.py:Scaled", "thrice", "--project", "build/thrice")
    files = recipe.record["files"]
    assert {Path(name).name for name in files} == {"factors.py", "scaled.py"}
    add_model("scaled.py:Scaled", "thrice", project="p")
    code = Path("p/models/thrice/1/model.py").read_text(encoding="utf-8").splitlines()
    assert code[:6] == [*SCALED.splitlines()[:5], "import os, sys"]
    assert code[-1] == "TritonPythonModel = Scaled.for_triton()"
    pipeline = load(compose("thrice", "r", projects=["p"]) / "thrice")
    rows = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(pipeline(X=rows)["Y"], 3 * rows)
    pipeline.close()


def test_a_model_folder_is_copied_as_it_is() -> None:
    add_model("scaled.py:Scaled", "thrice", project="p")
    assert find_recipe("p/models/thrice/1/model.py").folder == Path("build/thrice")
    add_model("p/models/thrice/1/model.py:Scaled", "again", project="q")
    for name in ("1/model.py", "1/factors.py"):
        assert (Path("q/models/again") / name).read_bytes() == (Path("p/models/thrice") / name).read_bytes()


def test_the_only_component_of_a_file_and_one_that_streams() -> None:
    Path("twice.py").write_text(STREAMING, encoding="utf-8")
    add_model("twice.py", "twice", project="p")
    config = Path("p/models/twice/config.pbtxt").read_text(encoding="utf-8")
    assert "decoupled: true" in config
    assert 'name: "stop"' in config


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ("scaled.py", r"scaled.py has 5 components. Its components: scaled.py:Scaled, scaled.py:Without"),
        ("scaled.py:Scale", r"scaled.py has no class Scale. Its components: scaled.py:Scaled"),
        ("scaled.py:Plain", r"Plain of scaled.py is not a component. Its components: scaled.py:Scaled"),
        ("scaled.py:Without", r"Without of scaled.py has no run: it cannot answer. Write it: def run\(self, batch\)"),
        ("scaled.py:Silent", r"Silent of scaled.py has no answers: .* def answers\(self, inputs, stream\)"),
        ("scaled.py:Undeclared", r"does not declare its inputs. .* inputs = \[\"TEXT:STRING:1\"\]; outputs = "),
        ("scaled.py:Wrong", r"Wrong.inputs: 'X:FP31:-1' has an unknown dtype: FP31. Known: "),
        ("factors.py", r"factors.py has no component. Derive a class from shoal's Component, and write its run"),
        ("gone.py:Scaled", r"There is no file gone.py"),
        ("broken.py:Scaled", r"broken.py:3: SyntaxError: expected ':'. Correct that line"),
        ("lacking.py", r"lacking.py:2: ModuleNotFoundError: No module named 'absent_module'. .* or install"),
        ("using.py", r"^lacking.py:2: ModuleNotFoundError"),
        ("leaving.py", r"leaving.py:1: SystemExit: 3"),
    ],
)
def test_files_and_classes_that_are_refused(thing: str, message: str) -> None:
    written = {
        "broken": "import shoal\n\nclass Scaled(shoal.Component)\n    pass\n",
        "lacking": "import shoal\nimport absent_module\n",
        "using": "import lacking\n",
        "leaving": "raise SystemExit(3)\n",
    }
    for name, text in written.items():
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.raises(ShoalError, match=message):
        add_model(thing, "mine", project="p")
    assert not Path("p").exists()


def test_a_task_is_not_for_a_component() -> None:
    with pytest.raises(InputError, match=r"--task classify needs a tokenizer, and the file scaled.py has none"):
        find_recipe("scaled.py:Scaled", task="classify")
