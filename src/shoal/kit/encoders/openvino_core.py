"""OpenVINO's core."""

from __future__ import annotations

from functools import cache
from typing import Any

from shoal.errors import needs


@cache
def find_core() -> Any:
    """Return OpenVINO's core: one for the process, which lasts as long.

    The plugin for CPUs gives the thread that loads it a stack for signals, and takes the one before it back when its
    last model goes. After two cores, the one before may be freed memory, and the next signal, such as Ctrl-C, would end
    the process with SIGSEGV (seen with OpenVINO 2026.4.1).

    Raises:
        SetupError: OpenVINO is not installed.
    """
    with needs("int8"):
        import openvino

    return openvino.Core()
