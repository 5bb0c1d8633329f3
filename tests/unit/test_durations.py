"""The ledger of durations: what is kept, and what is over the budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.durations import find_excess, read_ledger, store
from tests.support.groups import group_of

SECONDS = {
    "tests/slow/test_a.py::test_one": 30.04,
    "tests/slow/test_a.py::test_two[x::y]": 10.0,
    "tests/unit/b.py::c": 1,
}


def test_the_ledger_has_each_file_and_loses_those_that_are_gone(tmp_path: Path) -> None:
    ledger = tmp_path / "durations.json"
    assert read_ledger(ledger) == {}
    ledger.write_text(json.dumps({"tests/slow/kept.py": 5.0, "tests/slow/gone.py": 7.0, "tests/slow/test_a.py": 1.0}))
    store(SECONDS, ["tests/slow/test_a.py", "tests/slow/kept.py"], ledger)
    assert read_ledger(ledger) == {"tests/slow/kept.py": 5.0, "tests/slow/test_a.py": 40.0}


@pytest.mark.parametrize(("budget", "excess"), [(50, {}), (20, {"slow": 2.0})])
def test_what_is_over_the_budget(budget: float, excess: dict[str, float]) -> None:
    found = find_excess(SECONDS, {"slow": budget, "served": 1, "unit": 10})
    assert found == pytest.approx(excess, rel=0.01)


@pytest.mark.parametrize(
    ("path", "group"),
    [("slow/test_a.py", "test_a"), ("served/test_client.py", "served"), ("slow/language/test_llm.py", "language")],
)
def test_files_with_one_server_stay_together(path: str, group: str) -> None:
    assert group_of(f"tests/{path}::test_it") == group
