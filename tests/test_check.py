"""Mistakes are found before Triton does: each planted one by its rule, file and line; its mended twin is clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.repository.check import RULES, check
from tests import planted_fields
from tests.planted import Plant

PLANTS: tuple[Plant, ...] = planted_fields.PLANTS


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_mistake_is_found_and_its_mended_twin_clean(plant: Plant, tmp_path: Path) -> None:
    assert check(plant.write(tmp_path / "good", is_bad=False), target=plant.target) == []
    bad = plant.write(tmp_path / "bad", is_bad=True)
    findings = check(bad, target=plant.target)
    found = [finding for finding in findings if finding.rule.id == plant.rule]
    assert found, findings
    assert found[0].place.path == bad / plant.file
    if plant.line:
        lines = (bad / plant.file).read_text(encoding="utf-8").split("\n")
        assert plant.line in lines[found[0].place.line - 1], found
    assert found[0].fix


def test_every_rule_has_a_planted_mistake() -> None:
    assert {plant.rule for plant in PLANTS} == set(RULES)
    assert len(PLANTS) == len({plant.name for plant in PLANTS})


def test_what_core_refuses_is_an_error() -> None:
    for plant in PLANTS:
        if plant.core:
            assert RULES[plant.rule].is_core, plant.name
