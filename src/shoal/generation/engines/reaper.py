"""A helper process that removes what a library has left, also if this process is killed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_MARK = "SHOAL_ENDS_WITH"  # environment variable of every process that is started while a reaper is open
_CLOSE_SECONDS = 5.0

# Shared memory is usually removed by the resource tracker of multiprocessing, another process; but that is killed with
# the server's process group. Where it lives, it ends by itself.
_REAP = """
import os, shutil, signal, sys
mark, folder, shared = os.fsencode(sys.argv[1]), sys.argv[2], set()
def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file: return file.read()
def find():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in read(pid, "environ").split(b"\\0") and b"resource_tracker" not in read(pid, "cmdline"):
                found.append(int(pid))
                shared.update(word for word in read(pid, "maps").split() if word.startswith(b"/dev/shm/psm_"))
        except OSError: pass
    return found
for line in sys.stdin: find()  # until the process at the other end has ended
while found := find():
    for pid in found:
        try: os.kill(pid, signal.SIGKILL)
        except ProcessLookupError: pass
for path in shared:
    try: os.unlink(path)
    except FileNotFoundError: pass
shutil.rmtree(folder, ignore_errors=True)
"""


class Reaper:
    """Context manager that ends the processes started within it, also if this process ends in any other way.

    They are found by an environment variable that they inherit. So at most one is open in a process. ``folder`` is for
    their files: it is made here, and removed after them, with their shared memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Reaper:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        mark = secrets.token_hex(8)
        own = {name: value for name, value in os.environ.items() if name not in (_MARK, "LD_PRELOAD")}
        # -I -S: neither the current folder nor any package is imported
        command = [sys.executable, "-I", "-S", "-c", _REAP, f"{_MARK}={mark}", str(self._folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=own, start_new_session=True)
        os.environ[_MARK] = mark
        os.environ["SPT_NOENV"] = "1"  # or setproctitle, with which vLLM names its processes, overwrites the variables
        return self

    def note(self) -> None:
        """Note the shared memory of the processes, which may all die at once."""
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def __exit__(self, *error: object) -> None:
        os.environ.pop(_MARK, None)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_CLOSE_SECONDS)
