"""One model.py for several configurations, one repository on several machines: what may be right is left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.authoring.check import security
from shoal.authoring.check.families import check
from shoal.authoring.check.repositories import read_repository
from shoal.authoring.environment.targets import find_target
from tests.support import planted_modules
from tests.support.planted import MODEL, Edit, Plant, config
from tests.support.planted import write as write_file
from tests.support.planted_scheduling import SEQUENCE
from tests.support.sources import check_source, find

MASK = 'pb_utils.get_input_tensor_by_name(request, "MASK").as_numpy()'
LEFT_ALONE = {
    "another configuration's input": f"if self.is_short:\n    continue\nx = {MASK}",
    "another configuration's input, asked for": f'if "MASK" in self.inputs:\n    x = {MASK}',
    "another configuration's output": 'dtype = pb_utils.get_output_config_by_name(self.config, "SCORES")["data_type"]',
    "a name that is computed": "x = pb_utils.get_input_tensor_by_name(request, self.name).as_numpy()",
}


@pytest.mark.parametrize("body", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_name_unlike_those_declared_may_be_another_configurations(body: str, tmp_path: Path) -> None:
    lines = "".join(f"            {line}\n" for line in body.split("\n"))
    assert check_source(tmp_path, MODEL.replace("            responses", f"{lines}            responses")) == []


def test_a_misspelt_name_is_found_wherever_it_is(tmp_path: Path) -> None:
    read = 'pb_utils.get_input_tensor_by_name(request, "{}").as_numpy()'
    method = f"{MODEL}\n    def read(self, request):\n        return {read}\n"
    more = 'input { name: "TEXT" data_type: TYPE_FP32 dims: [ 4 ] }\n'
    for name, rules in (("text", ["reads-unknown-input"]), ("TXET", ["reads-unknown-input"]), ("TEXT2", [])):
        assert check_source(tmp_path / name, method.format(name), more) == rules


def test_names_that_no_release_minds(tmp_path: Path) -> None:
    group = 'instance_group [ { name: "%s" kind: KIND_CPU } ]\n'
    assert check_source(tmp_path / "a", MODEL, group % "a%b^c") == []
    assert check_source(tmp_path / "b", MODEL, group % "a#b") == ["unsafe-name"]


def links(folder: Path, target: str | None = None) -> list[str]:
    """Return the findings about links, for a server."""
    repository = read_repository(folder, find_target(target) if target else None)
    return [f"{f.rule.id} {f.place.path.name}" for m in repository.models for f in security.find(m, repository)]


def test_a_link_may_lead_to_a_file_of_the_container(tmp_path: Path) -> None:
    assert check_source(tmp_path, MODEL) == []
    folder = tmp_path / "m" / "1"
    (folder / "absolute").symlink_to("/no/such/weights")
    (folder / "chained").symlink_to("absolute")
    (folder / "inside").symlink_to(folder / "missing")
    (folder / "relative").symlink_to("../../../runs/7/weights")
    (folder / ".#config.pbtxt").symlink_to("me@there.1234:5678")
    found = ["dangling-link chained", "dangling-link inside", "dangling-link relative"]
    outside = ["symlink-leaves-repository absolute"]
    assert sorted(links(tmp_path)) == sorted(links(tmp_path, "26.06")) == found + outside
    embedded = ["dangling-link absolute", *found]
    assert sorted(links(tmp_path, "embedded")) == embedded


def test_unreadable_files_do_not_stop_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_source(tmp_path, MODEL) == []
    folder = tmp_path / "m" / "1"
    (folder / "long").symlink_to("/".join(["a" * 300] * 3))
    assert links(tmp_path) == []
    (folder / "hidden.pt").symlink_to("/elsewhere/hidden.pt")
    (folder / "mine.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "m" / "private").mkdir()
    refused = PermissionError(errno.EACCES, "Permission denied")
    stat, scan = Path.stat, os.scandir

    def refuse(path: Path, **more: bool) -> os.stat_result:
        if path.name.endswith(".pt") and more.get("follow_symlinks", True):
            raise refused
        return stat(path, **more)

    def refuse_folder(path: Path | str) -> os._ScandirIterator[str]:
        if Path(path).name == "private":
            raise refused
        return scan(path)

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "scandir", refuse_folder)
    assert links(tmp_path) == ["symlink-leaves-repository hidden.pt"]
    assert [finding.rule.id for finding in find(tmp_path)] == ["symlink-leaves-repository"]


# --- settings that may be right -----------------------------------------------------------------------------------

FIRST = "first/config.pbtxt"
PATH_OF_MODEL = 'parameters { key: "model_checkpoint_path" value { string_value: "/models/gpt" } }\ninstance_group'
ARTIFACTS = 'parameters { key: "artifacts" value { string_value: "vocab.txt" } }\ninstance_group'
ALONE = "alone/config.pbtxt"
OPEN = config("first").replace("instance_group [ { kind: KIND_CPU } ]\n", "")
IMPORTS = "import torch\n" + MODEL
CONTROLS = """model_warmup { name: "w" batch_size: 1
  inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
  inputs { key: "START" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
}
"""
ENSEMBLE_WITHOUT_END: dict[str, Edit] = {"all/config.pbtxt": ("ensemble_scheduling {", "ensemble_scheduling { {")}
RIGHT: dict[str, dict[str, Edit]] = {
    "a backend of one's own": {FIRST: ('backend: "python"', 'backend: "my_decoder"')},
    "a backend's library beside the model": {
        FIRST: ('backend: "python"', 'backend: "pythom"'),
        "first/libtriton_pythom.so": b"",
    },
    "a runtime of one's own": {FIRST: ("max_batch", 'runtime: "decode.py"\nmax_batch')},
    "artifacts of another kind of model": {FIRST: ("instance_group", ARTIFACTS)},
    "an import that a changed sys.path finds": {
        **planted_modules.FOLDER,
        "first/1/model.py": "import sys\nsys.path.append('/opt/libraries')\n" + IMPORTS,
    },
    "an import that a .pth file finds": {
        **planted_modules.FOLDER,
        f"{planted_modules.PACKAGES}/torch.pth": "/opt/torch\n",
        "first/1/model.py": IMPORTS,
    },
    "an import of the system's packages": {
        **planted_modules.FOLDER,
        "first/env/pyvenv.cfg": "include-system-site-packages = true\n",
        "first/1/model.py": IMPORTS,
    },
    "an import beside model.py, which puts its folder first": {
        **planted_modules.FOLDER,
        "first/1/model.py": "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\n"
        "import beside\n" + MODEL,
    },
    "a warm-up of a sequence": {ALONE: config("alone", batching=SEQUENCE) + CONTROLS, "alone/1/model.py": MODEL},
}


@pytest.mark.parametrize("edits", RIGHT.values(), ids=RIGHT)
def test_settings_that_may_be_right(edits: dict[str, Edit], tmp_path: Path) -> None:
    assert check(Plant("", "", "", "", edits).write(tmp_path, is_bad=True)) == []


def test_a_backend_that_takes_its_path_from_a_parameter(tmp_path: Path) -> None:
    named = config("gpt").replace('"python"', '"fastertransformer"\ndefault_model_filename: "gpt"')
    edits: dict[str, Edit] = {"gpt/config.pbtxt": named, "gpt/1/.gitkeep": ""}
    (finding,) = check(Plant("", "", "", "", edits).write(tmp_path / "bad", is_bad=True))
    assert finding.rule.id == "model-file-missing"
    edits["gpt/config.pbtxt"] = named.replace("instance_group", PATH_OF_MODEL)
    assert check(Plant("", "", "", "", edits).write(tmp_path / "good", is_bad=True)) == []


def test_no_advice_about_members_of_an_ensemble_that_cannot_be_read(tmp_path: Path) -> None:
    plant = Plant("", "", "", "", {**ENSEMBLE_WITHOUT_END, FIRST: OPEN})
    (finding,) = check(plant.write(tmp_path, is_bad=True))
    assert finding.rule.id == "config-syntax"
    assert finding.what.startswith("failed to read text proto. In the words of Python's protobuf: ")


def test_artifacts_of_a_model_folder_come_from_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "preprocess" / "first"
    write_file(folder / "config.pbtxt", config("first").replace("instance_group", ARTIFACTS))
    write_file(folder / "1" / "model.py", f"# A component of shoal.\n{MODEL}")
    assert check(tmp_path) == []
