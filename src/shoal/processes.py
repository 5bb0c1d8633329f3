"""Child processes that end when their parent does, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]): sys.exit("the parent is gone")
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"error: {sys.argv[2]}: {error.strerror}")
"""


def bound(command: Sequence[str | Path]) -> list[str]:
    """``command``, such that it gets SIGTERM when the *thread* that starts it is gone."""
    # -I: nothing of the current folder, or of the user, is taken for one of Python's modules
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *map(str, command)]
