"""Mistakes are found before Triton does: each planted one by its rule, file and line; its corrected twin is clean."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.authoring.check import tried
from shoal.authoring.check.config import own_backends
from shoal.authoring.check.families import RULES, check
from shoal.authoring.check.reports import read_pages, split_entries
from tests.support import planted_onnx
from tests.support.once import ROOT
from tests.support.planted import Plant
from tests.support.plants import PLANTS

HERE = PLANTS + (planted_onnx.PLANTS if find_spec("onnx") else ())
# Of code, in twins for other rules: one simple model.py stands in for every model of the base.
STAND_INS = {"output-not-made", "optional-input-read", "wrong-answers"}
TWINS = {(plant.target, str(plant.good)): plant for plant in HERE}  # many mistakes have the same one


@pytest.mark.parametrize("plant", TWINS.values(), ids=lambda plant: plant.name)
def test_a_corrected_twin_is_clean(plant: Plant, tmp_path: Path) -> None:
    findings = check(plant.write(tmp_path, is_bad=False), target=plant.target)
    others = STAND_INS - {plant.rule}
    assert [finding for finding in findings if finding.rule.id not in others] == []


@pytest.mark.parametrize("plant", HERE, ids=lambda plant: plant.name)
def test_a_planted_mistake_is_found(plant: Plant, tmp_path: Path) -> None:
    bad = plant.write(tmp_path, is_bad=True)
    findings = check(bad, target=plant.target)
    found = [finding for finding in findings if finding.rule.id == plant.rule]
    assert found, findings
    assert found[0].place.path == bad / plant.file
    if plant.line:
        lines = (bad / plant.file).read_text(encoding="utf-8").split("\n")
        assert plant.line in lines[found[0].place.line - 1], found
    assert found[0].fix


@pytest.mark.skipif(not find_spec("onnx"), reason="onnx is not installed")
def test_the_dims_that_fit_a_graph_are_said(tmp_path: Path) -> None:
    plant = next(plant for plant in planted_onnx.PLANTS if plant.name == "the batch twice")
    assert [f.fix for f in check(plant.write(tmp_path, is_bad=True))] == ["Write dims: [128]."]


def test_the_version_folder_to_make_is_one_of_the_policy(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    text = 'backend: "dali"\nmax_batch_size: 8\nversion_policy { specific { versions: [ 2, 3 ] } }\n'
    (tmp_path / "first/config.pbtxt").write_text(text, encoding="utf-8")
    assert [f.fix for f in check(tmp_path) if f.rule.id == "no-version"] == ["Make first/2/ with its file."]


def test_pages_show_what_is_found() -> None:
    """The page's own diff is planted for these rules; other diffs are of commands, or of files that are not text."""
    proved = [plant.rule for plant in PLANTS + planted_onnx.PLANTS if plant.is_page]
    assert len(proved) == len(set(proved)) == 154


def test_every_rule_has_a_planted_mistake() -> None:
    plants = PLANTS + planted_onnx.PLANTS
    assert {plant.rule for plant in plants} == set(RULES) - {tried.LOAD.id, tried.REQUEST.id}
    assert len(plants) == len({plant.name for plant in plants})


def test_the_page_names_what_the_embedded_servers_backends_ignore() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## The embedded server's backends")[2]
    for backend, names in own_backends.PARAMETERS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {backend}: "))
        assert re.findall(r"`([\w.]+)`", row) == names.split(), backend
    assert all(f"`{name}`" in page for name in own_backends.OPTIMIZATIONS)


def test_configurations_that_core_refuses_are_errors() -> None:
    for plant in PLANTS:
        if plant.core:
            assert RULES[plant.rule].is_core, plant.name


def test_every_rule_has_an_entry_in_the_pages() -> None:
    index = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    entries = {}
    for name, page in read_pages().items():
        for rule_id, entry in split_entries(page).items():
            entries[rule_id] = entry
            assert re.search(rf"\(rules/{name}\.md\) \|.*`{rule_id}`", index), rule_id
    assert sorted(entries) == sorted(RULES)
    for rule in RULES.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.id)
        kind = f"*{rule.severity}{', core' if rule.is_core else ''}*"
        assert re.match(rf"### {rule.id}\n\n{re.escape(kind)} — .+\.\n\n[^`]", entries[rule.id]), rule.id
        diff, _, source = entries[rule.id].partition("```diff\n")[2].partition("```\n\nSource: ")
        assert re.search("(?m)^[-+] ", diff), rule.id
        assert source.endswith(".\n"), rule.id
