"""Ledger of durations: seconds of work of each test file, and a budget for each tier.

``--store-durations`` writes what the run measured to ``tests/durations.json``. Files that take longest begin first, so
that workers end together. A run in which a tier takes longer than its budget says so at its end; one that takes twice
as long fails with exit code 7: CI's machine may be half as fast as the one that was measured.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.secured import VARIABLE

LEDGER = Path(__file__).parents[1] / "durations.json"
# Seconds of work, which two workers share.
BUDGETS = {"unit": 900, "served": 240, "slow": 6000}
OVER, EXIT_CODE = 2.0, 7
UNKNOWN = 60.0  # seconds of a file that the ledger does not have


def read_ledger(path: Path = LEDGER) -> dict[str, float]:
    """Return the seconds of each file, by its path from the root."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def tier_of(nodeid: str) -> str:
    return nodeid.partition("tests/")[2].partition("/")[0]


def by_file(seconds: Mapping[str, float]) -> dict[str, float]:
    """Add up the seconds of tests, by node id, for each of their files."""
    found: defaultdict[str, float] = defaultdict(float)
    for nodeid, each in seconds.items():
        found[file_of(nodeid)] += each
    return dict(found)


def find_excess(seconds: Mapping[str, float], budgets: Mapping[str, float] = BUDGETS) -> dict[str, float]:
    """Return how many times its budget each tier took, of those that took longer."""
    tiers: defaultdict[str, float] = defaultdict(float)
    for nodeid, each in seconds.items():
        tiers[tier_of(nodeid)] += each
    return {tier: tiers[tier] / budget for tier, budget in budgets.items() if tiers[tier] > budget}


def store(seconds: Mapping[str, float], existing: Iterable[str], path: Path = LEDGER) -> None:
    """Write the seconds of the files of a run to the ledger, which loses the files that are gone."""
    ledger = {**read_ledger(path), **by_file(seconds)}
    kept = {name: round(ledger[name], 1) for name in sorted(ledger.keys() & {*existing})}
    path.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


class Durations:
    """A plugin of the process that started the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_full = config.getoption("--verify")
        # A second try runs a part of a file, and the pass with keys some files in another way.
        is_whole = not (config.getoption("lf", default=False) or config.option.keyword or os.environ.get(VARIABLE))
        self._stores = config.getoption("--store-durations") and is_whole
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._excess: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        root = session.config.rootpath
        if self._stores:
            store(self._seconds, (path.relative_to(root).as_posix() for path in root.glob("tests/**/test_*.py")))
        self._excess = {} if self._is_full else find_excess(self._seconds)
        if any(times > OVER for times in self._excess.values()) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = EXIT_CODE

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for tier, times in self._excess.items():
            terminalreporter.line(f"OVER BUDGET: {tier} took {times:.1f} times its {BUDGETS[tier]} s of work", red=True)
