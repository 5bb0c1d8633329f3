"""The machine of a figure with its quotas, and the time of what runs in the client."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.errors import SetupError
from shoal.lab.bench.measure import _time_within
from shoal.serving.server.checks import check_gpus
from shoal.system import machine
from tests.support.bench import table


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


INFORMATION = "Model: \t\t {name}\nIRQ: \t\t 12\nGPU UUID: \t {uuid}\n"
TWO = [("H100", "GPU-aaaa-1"), ("L4", "GPU-bbbb-2")]


@pytest.mark.parametrize("is_from_nvml", [False, True])
@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["H100", "L4"]),
        ("", []),
        ("-1", []),
        ("1", ["L4"]),
        ("1, 0", ["L4", "H100"]),
        ("0,5,1", ["H100"]),
        ("GPU-bbbb", ["L4"]),
        ("GPU-bbbb-2,0", ["L4"]),
        ("0,GPU-bbbb-2", ["H100"]),
        ("1,1", []),
        ("1,0,1", []),
        ("GPU-aaaa,GPU-aaaa-1", []),
        ("1,5,1", ["L4"]),
        ("1,,1", ["L4"]),
        (",0", []),
        ("+1", ["L4"]),
        ("1x", ["L4"]),
        ("GPU-", []),
        ("NoDevFiles", []),
        ("MIG-GPU-aaaa/1/0", ["H100"]),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    visible: str | None, names: list[str], is_from_nvml: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's list, from NVML or from /proc, and CUDA's rules for CUDA_VISIBLE_DEVICES."""
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(TWO),
        nvmlDeviceGetHandleByIndex=lambda index: TWO[index],
        nvmlDeviceGetName=lambda gpu: gpu[0],
        nvmlDeviceGetUUID=lambda gpu: gpu[1],
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=2**30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml if is_from_nvml else None)
    for index, (name, uuid) in enumerate([] if is_from_nvml else TWO):
        (tmp_path / f"0000:0{index}:00.0").mkdir()
        table(tmp_path / f"0000:0{index}:00.0" / "information", INFORMATION.format(name=name, uuid=uuid))
    monkeypatch.setattr(machine, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in machine.find_gpus()] == names
    assert {gpu.memory for gpu in machine.find_gpus()} <= {2**30 if is_from_nvml else 0}
    assert machine.describe_machine().get("num_gpus", 0) == len(names)
    (tmp_path / "manifest.json").write_text('{"gpus": [1], "ensembles": ["a", "b"]}', encoding="utf-8")
    if len(names) < 2:
        shown = "" if visible is None else rf" \(CUDA_VISIBLE_DEVICES is '{re.escape(visible)}'\)"
        with pytest.raises(
            SetupError, match=f"composed for GPU 1, and this machine has {len(names) or 'none'}{shown}"
        ) as error:
            check_gpus(tmp_path)
        assert error.value.fix.endswith(f"shoal compose a b {tmp_path}-cpu --placement cpu")
        (tmp_path / "a").mkdir()
        text = 'parameters { key: "artifacts" value { string_value: "a.json" } }'
        (tmp_path / "a" / "config.pbtxt").write_text(text, encoding="utf-8")
        with pytest.raises(SetupError, match=r"-cpu --artifacts DIR --placement cpu$"):
            check_gpus(tmp_path)
    else:
        check_gpus(tmp_path)


def test_time_of_calls_within_a_window() -> None:
    """Calls that cross an edge of the window count with the part inside it."""
    calls = [(0.0, 1.5), (1.2, 1.4), (1.9, 9.0), (3.0, 4.0)]
    assert _time_within(calls, 1.0, 2.0) == pytest.approx(0.5 + 0.2 + 0.1)
