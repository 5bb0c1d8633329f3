"""The wheel of the embedded Triton, and the program in which Triton runs a Python model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

STUB = "triton_python_backend_stub"  # Triton looks for this name in the backend's and the model's folder
NAME = "embedded"  # as a target
DISTRIBUTION, VERSION = "nvidia-pytriton", "0.7.0"  # the wheel of the embedded server


def find_installed() -> Path | None:
    """Return the folder of the embedded server in the installed wheel; None if the wheel is not installed."""
    spec = importlib.util.find_spec("pytriton")
    return Path(spec.origin).parent / "tritonserver" if spec and spec.origin else None


def served_model(arguments: Sequence[str]) -> str:
    """Return the name of the model that a stub process serves, from its command line; empty for other processes.

    Triton starts a stub as STUB model.py REGION ... INSTANCE RUNTIME-FOLDER, where REGION names its shared memory, and
    INSTANCE is MODEL_GROUP_NUMBER. The path of ``model.py`` does not identify the model: for a backend written in
    Python, that file is in the backend's folder.
    """
    if len(arguments) < 3 or not arguments[0].endswith(STUB):
        return ""
    return re.sub(r"(_\d+){1,2}$", "", arguments[-2])
