"""Reader of foreign model files. It runs in a subprocess, because their libraries may crash on a damaged file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.errors import ArtifactError
from shoal.forests.checkpoints import Forest, parse_forest

CHECKPOINT = "checkpoint.tl"
SAVE_AGAIN = "Save it again, with the library that trained it."
_READER = "shoal.project.importing.forest_reader"


def refuse(name: str, why: str, fix: str = SAVE_AGAIN) -> ArtifactError:
    """Build the error for a model that cannot be added."""
    return ArtifactError(f"{name} cannot be added: {why}.", fix)


def read_apart(format_name: str, content: bytes, name: str) -> tuple[Any, dict[str, Any]]:
    """Convert a model file to Treelite's model in a subprocess; return it and the reader's findings.

    ``format_name``: json or ubjson (XGBoost), lightgbm, skops. ``name`` is used in errors.

    Raises:
        ArtifactError: it cannot be read.
        ShoalError: as raised by the reader.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        source, target = Path(folder) / "model", Path(folder) / CHECKPOINT
        source.write_bytes(content)
        command = [sys.executable, "-P", "-m", _READER, format_name, str(source), str(target), name]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode < 0:
            ended_by = signal.Signals(-done.returncode).name
            raise refuse(name, f"it is damaged: its reader was killed by {ended_by}")
        try:
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise refuse(name, f"its reader ended: {said}") from None
        if "refused" in answer:
            raise getattr(errors, answer["refused"])(answer["what"], answer["fix"])
        if "error" in answer:
            raise refuse(name, answer["error"])
        return load_checkpoint(target.read_bytes(), name)[0], answer


def load_checkpoint(content: bytes, name: str) -> tuple[Any, Forest]:
    """Load a Treelite checkpoint, after shoal's own reader has accepted it.

    Treelite may abort the process on a damaged checkpoint.
    """
    import treelite

    try:
        forest = parse_forest(content)
    except ValueError as error:
        raise refuse(name, str(error)) from error
    return treelite.Model.deserialize_bytes(content), forest
