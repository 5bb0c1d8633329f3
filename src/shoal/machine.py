"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> dict[str, str | int]:
    """``cpu``, the processor's name, and ``cores``, those that this process may use."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {"cpu": next(names, platform.processor()), "cores": len(os.sched_getaffinity(0))}
