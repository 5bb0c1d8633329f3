"""Description of this machine: processor, memory, GPUs, container limits, library versions."""

from __future__ import annotations

import importlib
import math
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import SetupError

# Instruction sets that decide an encoder's speed on a CPU: BF16 and INT8 tiles and dot products, vector width.
FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "avx_vnni", "bf16")
BF16 = "SHOAL_BF16"  # an environment variable
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # with BF16 arithmetic
_CPUS, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_GPUS = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # an environment variable
_NUMBER = re.compile(r"[+-]?\d+")  # CUDA ignores what follows it in an entry
_CGROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def describe_machine() -> dict[str, Any]:
    """Describe the machine. ``cpu`` is the processor's name, ``cores`` the number of cores that this process may use.

    A container's CPU quota counts as cores, rounded up. ``physical_cores`` excludes hyper-threads, ``flags`` are the
    instruction sets among ``FLAGS``, ``memory_gib`` is the machine's memory, and ``python`` is this interpreter's
    version. On a machine with NVIDIA GPUs that CUDA shows to this process, ``gpu`` names the first one, and
    ``num_gpus`` counts them.
    """
    entries = [_fields(block) for block in _read(_CPUS).split("\n\n") if block.strip()]
    allowed = os.sched_getaffinity(0)
    first = entries[0] if entries else {}
    mine = [entry for entry in entries if entry.get("processor", "").isdigit() and int(entry["processor"]) in allowed]
    places = {(entry.get("physical id"), entry.get("core id", entry["processor"])) for entry in mine}
    cores = math.ceil(usable_cores())
    flags = {*first.get("flags", "").split(), *first.get("Features", "").split()}
    machine = {
        "cpu": first.get("model name") or platform.processor(),
        "cores": cores,
        "physical_cores": min(len(places) or cores, cores),
        "flags": " ".join(flag for flag in FLAGS if flag in flags),
        "memory_gib": _memory_gib(),
        "python": platform.python_version(),
    }
    gpus = find_gpus()
    return {**machine, "gpu": gpus[0].name, "num_gpus": len(gpus)} if gpus else machine


class Gpu(NamedTuple):
    """NVIDIA GPU. ``memory`` is in bytes, 0 if unknown."""

    name: str
    uuid: str
    memory: int


def find_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that CUDA shows to this process, in the order of their numbers there.

    The driver lists them through NVML if the package nvidia-ml-py is installed, else, without their memory, in
    ``/proc``. The environment variable CUDA_VISIBLE_DEVICES selects from them as CUDA 13 does: by number or by the
    start of a UUID, as the first entry has it; an entry of the other form or of no GPU ends the list, and a GPU that is
    named twice makes it empty. A part of a GPU (``MIG-...``) counts as one.
    """
    gpus = _list_by_nvml() or _list_in_proc()
    if VISIBLE not in os.environ:
        return gpus
    found: list[int] = []
    entries = [part.strip() for part in os.environ[VISIBLE].split(",")]
    for entry in entries:
        if (number := _NUMBER.match(entry)) is not None:
            same = [index for index in range(len(gpus)) if index == int(number[0])]
        elif entry.startswith("MIG-"):
            same = [0] if gpus else []
        else:
            same = [index for index, gpu in enumerate(gpus) if entry and gpu.uuid.startswith(entry)]
        if len(same) != 1 or (number is None) != (_NUMBER.match(entries[0]) is None):
            break
        if same[0] in found and not entry.startswith("MIG-"):
            return []
        found += same
    return [gpus[index] for index in found]


def _list_by_nvml() -> list[Gpu]:
    """Return the GPUs that NVML lists; empty without its package, its library or a GPU."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                str(nvml.nvmlDeviceGetName(each)),
                str(nvml.nvmlDeviceGetUUID(each)),
                int(nvml.nvmlDeviceGetMemoryInfo(each).total),
            )
            for each in handles
        ]
    except Exception:  # ModuleNotFoundError, or the package's own NVMLError: /proc is read instead
        return []


def _list_in_proc() -> list[Gpu]:
    """Return the GPUs that the driver lists, in the order of their PCI addresses."""
    entries = [_fields(_read(path)) for path in sorted(_GPUS.glob("*/information"))]
    return [Gpu(entry.get("Model", "a GPU"), entry.get("GPU UUID", ""), 0) for entry in entries]


def usable_cores() -> float:
    """Return the cores that this process may use, limited by its CPU affinity and its control groups' quotas."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas()])


def available_memory() -> int:
    """Return the bytes available without swapping, by Linux's estimate, within this container's limit."""
    free = int(_fields(_read(_MEMORY)).get("MemAvailable", "0 kB").split()[0]) * 1024
    for group, is_old in _groups("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
        limit, used = (_read(group / name).strip() for name in names)
        if limit.isdecimal() and used.isdecimal():  # not "max"
            free = min(free, int(limit) - int(used))
    return free


def total_memory() -> int:
    """Return the bytes of memory that processes here may use together: the machine's, or this container's limit."""
    total = int(_fields(_read(_MEMORY)).get("MemTotal", "0 kB").split()[0]) * 1024
    for group, is_old in _groups("memory"):
        limit = _read(group / ("memory.limit_in_bytes" if is_old else "memory.max")).strip()
        total = min(total, int(limit)) if limit.isdecimal() else total
    return total


def peak_memory() -> int:
    """Return the greatest number of bytes of memory that this process has used at a time."""
    return int(_fields(_read(_STATUS))["VmHWM"].split()[0]) * 1024


def _quotas() -> Iterator[float]:
    """CPU quotas of this process's control groups, in cores."""
    for group, is_old in _groups("cpu"):
        limits = _read(group / "cpu.max").split()
        if is_old:
            limits = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(limits) == 2 and all(limit.isdigit() for limit in limits):  # neither "max" nor -1
            yield int(limits[0]) / int(limits[1])


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's control groups and of their parents, each with whether it is of cgroup version 1."""
    for line in _read(_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # a container may see the host's path, which does not exist in it: its own group is then the root
        top = _CGROUPS / controller if controllers else _CGROUPS
        place = Path(path.lstrip("/"))
        for group in (top / place, *(top / parent for parent in place.parents)):
            yield group, bool(controllers)


def library_versions(*names: str) -> dict[str, str]:
    """Return the versions of the named distributions that are installed."""
    found = {name: _version(name) for name in names}
    return {name: number for name, number in found.items() if number}


def computes_bf16() -> bool:
    """Whether the processor has instructions for BF16; without them, BF16 is emulated, and slower than FP32.

    The environment variable SHOAL_BF16, ``0`` or ``1``, overrides what the machine reports.

    Raises:
        SetupError: SHOAL_BF16 has another value.
    """
    said = os.environ.get(BF16, "")
    if said not in ("", "0", "1"):
        raise SetupError(f"{BF16} is {said!r}.", f"Set it to 0 or 1, or type: unset {BF16}")
    if said:
        return said == "1"
    return not set(BF16_FLAGS).isdisjoint(describe_machine()["flags"].split())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _memory_gib() -> float:
    kilobytes = _fields(_read(_MEMORY)).get("MemTotal", "0 kB").split()[0]
    return round(int(kilobytes) / 2**20, 1)


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
