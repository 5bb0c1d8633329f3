"""A small disk, for what must survive a full one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a disk of a size such as ``2m``; skips where that takes rights that this user lacks."""
    with ExitStack() as mounted:

        def mount(size: str) -> Path:
            disk = tmp_path / "disk"
            disk.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
            if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("mounting a small disk takes root's rights")
            mounted.callback(lambda: subprocess.run(["umount", "--lazy", disk], check=True))
            return disk

        yield mount
