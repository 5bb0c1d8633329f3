"""The machine of a figure with its quotas, and the time of what runs in the client."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal import machine
from shoal.bench.measure import _time_within
from tests.unit.test_bench import table


def test_the_machine() -> None:
    found = machine.describe_machine()
    assert found["cpu"]
    assert 1 <= found["physical_cores"] <= found["cores"]
    assert found["memory_gib"] > 0
    assert isinstance(found["flags"], str)
    json.dumps(found)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/of/the/host\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("3:cpuset:/\n2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "7\n", "cpu/a/cpu.cfs_period_us": "10\n"}, 0.7),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
    ],
)
def test_a_quota_of_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: Mapping[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        table(tmp_path / name, text)
    monkeypatch.setattr(machine, "_CGROUP", table(tmp_path / "cgroup", groups))
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    assert machine.usable_cores() == (len(os.sched_getaffinity(0)) if cores is None else cores)
    assert machine.describe_machine()["cores"] == math.ceil(machine.usable_cores())


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/a\n", {"a/memory.max": "5000\n", "a/memory.current": "2000\n"}),
        ("0::/a\n", {"a/memory.max": "max\n", "memory.max": "3001\n", "memory.current": "1\n"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "4000\n", "memory/memory.usage_in_bytes": "1000\n"}),
    ],
)
def test_a_limit_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: Mapping[str, str]
) -> None:
    free = machine.available_memory()
    assert 2**20 < free <= machine.describe_machine()["memory_gib"] * 2**30
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        table(tmp_path / name, text)
    monkeypatch.setattr(machine, "_CGROUP", table(tmp_path / "cgroup", groups))
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    assert machine.available_memory() == 3000


def test_time_of_calls_within_a_window() -> None:
    """Calls that cross an edge of the window count with the part inside it."""
    calls = [(0.0, 1.5), (1.2, 1.4), (1.9, 9.0), (3.0, 4.0)]
    assert _time_within(calls, 1.0, 2.0) == pytest.approx(0.5 + 0.2 + 0.1)
