"""The environment files that shoal ships, for its own components."""

from __future__ import annotations

from pathlib import Path

from shoal.environment.engines import VENV
from shoal.environment.targets import FIRST_NUMPY_2, parse_release
from shoal.errors import InputError
from shoal.paths import shipped_root


def find_file(target: str, engine: str, *, is_for_gpu: bool) -> Path:
    """Return the environment file of the readability components: for GPU, CPU, or the embedded server.

    Raises:
        InputError: the target's own stub cannot serve RAPIDS.
    """
    is_old = parse_release(target) < FIRST_NUMPY_2
    if is_for_gpu and is_old:
        raise InputError(
            f"RAPIDS needs NumPy 2, whose tensors the stub of target {target} corrupts.",
            "Name a release from 24.11 on, such as --target 26.06; or a file of your own, and --stub compile.",
        )
    flavour = "-gpu" if is_for_gpu else "-embedded" if is_old else ""
    name = f"requirements{flavour}.txt" if engine == VENV else f"environment{flavour}.yml"
    return shipped_root() / "env" / name
