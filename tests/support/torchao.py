"""torchao in a folder of its own: beside transformers, every command would load it, and print its warnings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.once import ROOT, once


def add_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchao importable; skips where it cannot be installed."""
    try:
        folder = once("torchao", _install, depends_on=[Path(__file__)])
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or [str(error)]
        pytest.skip(f"torchao cannot be installed here: {lines[-1]}")
    monkeypatch.syspath_prepend(folder)


def _install(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        "torchao==0.18.0",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
