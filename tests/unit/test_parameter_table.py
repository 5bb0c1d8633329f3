"""The table of parameters: it is what the code reads, what the page says, and what a misspelt name is compared with."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shoal.authoring.check.families import check
from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.authoring.repository.parameters import (
    ANY,
    COMPONENT,
    NAMES,
    TABLE,
    Parameter,
    ParameterProperties,
    find_right_name,
)
from shoal.errors import ArtifactError
from shoal.kit.component.spec import ModelSpec
from tests.support.once import ROOT

PAGE = ROOT / "docs" / "parameters.md"
CATEGORIES = ("preprocess", "postprocess", "models", "ensembles")
FOLDERS = sorted(path.parent for category in CATEGORIES for path in (ROOT / category).glob("*/config.pbtxt"))
CODE = [
    path for place in ("src/shoal", *CATEGORIES[:3]) for path in sorted((ROOT / place).rglob("*.py"))
    if "templates" not in path.parts
]  # fmt: skip
NVIDIAS = ROOT / "src" / "shoal" / "authoring" / "check" / "config" / "trtllm.py"  # reads parameters of NVIDIA's models
# Calls of shoal.Parameters, with the default if it is a literal; and what reads a configuration directly.
READS = r"""\.(?:text|whole|number|flag|choice|texts|numbers)\(\s*"(\w+)"(?:, (?:default=)?([\w.]+|"[^"]*"))?"""
DIRECT = r"""(?<!request\.)parameters(?:\.get\(|\[)"(\w+)"|(?:read_alone\(self\.spec, |_seconds\()"(\w+)"\)"""


def row(parameter: Parameter) -> str:
    cells = (f"`{parameter.name}`", parameter.kind, parameter.default, parameter.readers, parameter.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def test_the_page_has_the_table() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    order = sorted(TABLE, key=lambda p: 0 if p.scope == ANY else 2 if p.scope == COMPONENT else 1)
    assert lines == [row(parameter) for parameter in order]


def test_the_table_has_what_the_code_reads() -> None:
    defaults: dict[str, set[str]] = {name: set() for name in NAMES}
    for parameter in TABLE:
        defaults[parameter.name].add(parameter.default)
    read = set()
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        for name, default in re.findall(READS, text) if "arameters" in text else ():
            read.add(name)
            assert name in NAMES, (path, name)
            literal = default.replace("_", "").strip('"').replace("True", "true").replace("False", "false")
            if re.fullmatch(r"[0-9.]+|true|false|{}", literal) and defaults[name] != {""}:
                assert literal in defaults[name] or (literal == "0" and "" in defaults[name]), (path, name, default)
        is_ours = path.parts[-2] not in ("client", "v2", "core") and path != NVIDIAS
        for found in re.findall(DIRECT, text) if is_ours else ():
            read |= {*found} - {""}
    assert {"calls", "threads", "max_length", "labels"} <= read
    assert read <= NAMES


def test_the_table_has_what_the_shipped_folders_give() -> None:
    for folder in FOLDERS:
        config = read_config(folder)
        for name in config.spec.parameters:
            rows = [each for each in TABLE if each.name == name]
            assert any(each.scope in (ANY, config.backend) or config.name in each.readers for each in rows), (
                folder, name,
            )  # fmt: skip


def misspell(name: str) -> set[str]:
    """Return the usual slips: capitals, a letter twice, left out or exchanged with the next; not of a single letter."""
    middle = len(name) // 2
    slips = {name.upper() if name.islower() else name.lower()}
    if len(name) > 1:
        slips |= {name[:middle] + name[middle - 1 :], name[:middle] + name[middle + 1 :], f"{name}s"}
        slips |= {name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]}
    return slips - {name}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_misspelt_parameter_of_a_shipped_folder_is_named(folder: Path, tmp_path: Path) -> None:
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    expected = {}
    for name in read_config(folder).spec.parameters:
        for number, slip in enumerate(sorted(misspell(name))):
            copy = tmp_path / folder.parent.name / f"{folder.name}-{name}-{number}"
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
            (copy / "config.pbtxt").write_text(text.replace(f'key: "{name}"', f'key: "{slip}"'), encoding="utf-8")
            expected[copy / "config.pbtxt", slip] = f"Write {name}, if that is meant."
    assert not [f for f in check(folder) if f.rule.id == "parameter-misspelt"]
    found = {}
    for finding in check(tmp_path) if expected else ():
        if finding.rule.id == "parameter-misspelt":
            line = finding.place.path.read_text(encoding="utf-8").splitlines()[finding.place.line - 1]
            found[finding.place.path, line.partition('"')[2].partition('"')[0]] = finding.fix
    assert found == expected


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_parameter_of_a_component_is_known_to_its_folder(folder: Path) -> None:
    """A parameter that its folder leaves out may be misspelt too."""
    config = read_config(folder)
    for parameter in TABLE:
        if config.name in re.split(r",? ", parameter.readers) and parameter.name not in config.spec.parameters:
            slip = f"{parameter.name}s"
            assert find_right_name(slip, (ANY, config.backend, COMPONENT), config.spec.parameters) == parameter.name


def test_a_name_of_the_user_is_no_slip(tmp_path: Path) -> None:
    """Not if it resembles none, if the right one is given too, or if the model's code reads it."""
    scopes = (ANY, COMPONENT)
    assert find_right_name("vocabulary", scopes, ()) == find_right_name("tokenizer_dir", scopes, ()) == ""
    assert find_right_name("label", scopes, ()) == "labels"
    assert find_right_name("label", scopes, ("label", "labels")) == ""
    assert find_right_name("label", (ANY,), ()) == ""
    place = tmp_path / "postprocess" / "label"
    shutil.copytree(ROOT / "postprocess" / "label", place, ignore=shutil.ignore_patterns("__pycache__"))
    for path, old, new in (
        ("config.pbtxt", 'key: "labels"', 'key: "label"'),
        ("1/model.py", "import", "X = 'label'\nimport"),
    ):
        text = (place / path).read_text(encoding="utf-8")
        (place / path).write_text(text.replace(old, new, 1), encoding="utf-8")
        found = [finding for finding in check(place) if finding.rule.id == "parameter-misspelt"]
        assert bool(found) == (path == "config.pbtxt")


def make(**parameters: str) -> ParameterProperties:
    return ModelConfig(ModelSpec("m", (), (), parameters=parameters), "python", "", (), Path(), None)


def test_properties_without_parameters_have_the_defaults_of_the_table() -> None:
    config = make()
    assert (config.calls, config.requires, config.content, config.mask) == ((), (), "", "")
    assert (config.canary, config.hang_seconds, config.slots, config.weights) == (None, None, None, None)
    assert (config.is_public, config.load_seconds, config.gets_host_inputs) == (False, 0, True)


def test_properties_are_typed() -> None:
    config = make(calls="a b", canary='{"X": [1]}', hang_seconds="0.5", public="true", slots="16", load_seconds="90")
    assert (config.calls, config.canary, config.hang_seconds) == (("a", "b"), {"X": [1]}, 0.5)
    assert (config.is_public, config.slots, config.load_seconds) == (True, 16, 90)
    assert make(slot="many").slots is None  # a user's own


@pytest.mark.parametrize(
    ("name", "value", "attribute", "expected"),
    [
        ("public", "yes", "is_public", "expected false or true"),
        ("slots", "0", "slots", "expected a whole number from 1"),
        ("slots", "many", "slots", "expected a whole number from 1"),
        ("hang_seconds", "-1", "hang_seconds", "expected a number of seconds"),
        ("hang_seconds", "inf", "hang_seconds", "expected a number of seconds"),
        ("load_seconds", "1m", "load_seconds", "expected a number of seconds"),
        ("canary", "[1]", "canary", "expected a JSON object of inputs"),
        ("canary", "{", "canary", "expected a JSON object of inputs"),
    ],
)
def test_a_wrong_value_is_named_with_the_way_out(name: str, value: str, attribute: str, expected: str) -> None:
    with pytest.raises(ArtifactError) as raised:
        getattr(make(**{name: value}), attribute)
    assert f"Parameter {name} of model m is {value!r}; {expected}" in raised.value.what
    assert f'key: "{name}"' in raised.value.fix
