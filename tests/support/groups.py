"""Distribution of tests over workers (pytest-xdist): a group stays together."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.support.durations import UNKNOWN, file_of, read_ledger

SHARED = {"served", "language", "openai"}  # folders with one server


def group_of(nodeid: str) -> str:
    """Return the group of a test: its file, or its folder where all tests ask one server."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return path.parent.name if path.parent.name in SHARED else path.stem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups that take longest: workers that end together waste nothing."""
    ledger, seconds = read_ledger(), defaultdict[str, float](float)
    for path in {file_of(item.nodeid) for item in items}:
        seconds[group_of(path)] += ledger.get(path, UNKNOWN)
    items.sort(key=lambda item: -seconds[group_of(item.nodeid)])


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out groups in the order of the items."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which a worker was lost, and give what it had left to others, without that test.

        pytest-xdist 3.8 gives it to them again, and finished groups too, for which they wait without end.
        """
        groups = self.assigned_work.pop(node)
        lost = next((test for tests in groups.values() for test, is_over in tests.items() if not is_over), None)
        for name, tests in groups.items():
            if left := {test: False for test, is_over in tests.items() if not (is_over or test == lost)}:
                self.workqueue[name] = left
        for other in self.assigned_work:
            self._reschedule(other)
        return lost


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    config.option.loadscopereorder = False
    return Groups(config, log)
