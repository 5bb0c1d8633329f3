"""Processes that end with the one that started them, whatever becomes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.system.processes import find_process

pytestmark = pytest.mark.usefixtures("may_start_processes")
SECONDS = 20.0
# A process with a child of a session of its own, which has a child too, and shared memory of which no tracker knows.
CHILD = """
import subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(below.pid, memory.name, flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
from pathlib import Path
from shoal.system.processes import Reaper
with Reaper(Path(sys.argv[1])) as reaper:
    command = [sys.executable, sys.argv[2]]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    line = child.stdout.readline()
    (Path(sys.argv[1]) / "file").touch()
    reaper.note()
    print(child.pid, line, flush=True)
    sys.stdin.read()
print("left", flush=True)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    process = find_process(pid)
    return process is not None and not process.is_ended


@pytest.mark.parametrize("end", ["killed", "left", "all killed"])
def test_nothing_is_left(end: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    command = [sys.executable, "-c", PARENT, str(folder), str(tmp_path / "child.py")]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child, below, name = parent.stdout.readline().split()
        parent.stdout.readline()
        memory = Path("/dev/shm") / name
        assert memory.exists()
        assert is_running(int(child))
        assert is_running(int(below))
        if end == "left":
            parent.stdin.close()
            assert parent.stdout.readline() == "left\n"
        else:
            for pid in (int(child), int(below)) if end == "all killed" else ():  # the memory has been noted
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
            parent.kill()
        wait_until(lambda: not (is_running(int(child)) or is_running(int(below)) or memory.exists() or folder.exists()))
    finally:
        parent.kill()
        parent.wait()
        for stream in (parent.stdin, parent.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
