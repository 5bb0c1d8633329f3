"""Reader of other libraries' model files. It runs in a subprocess, because a damaged file may crash a library."""

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
from shoal.kit.forests.checkpoints import Forest, parse_forest

CHECKPOINT = "checkpoint.tl"
SAVE_AGAIN = "Save it again, with the library that trained it."
_READER = "shoal.authoring.project.importing.forest_reader"


def refuse(name: str, why: str, fix: str = SAVE_AGAIN) -> ArtifactError:
    """Build the error for a model that cannot be added."""
    return ArtifactError(f"{name} cannot be added: {why}.", fix)


def read_apart(format_name: str, content: bytes, name: str) -> tuple[Any, dict[str, Any]]:
    """Convert the content of a model file to a Treelite model in a subprocess; return the model and a dictionary.

    ``format_name`` is json or ubjson (XGBoost), lightgbm, or skops. The dictionary is empty, except for skops: it has
    the forest's description (``what``), notes for the user (``said``) and ``labels``. ``name`` is used in errors.

    Raises:
        ArtifactError: the file cannot be read.
        ShoalError: any other error of shoal's that the subprocess reports.
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
    """Load a Treelite checkpoint; return Treelite's model and the header.

    shoal's own reader checks it first, because Treelite may abort the process on a damaged checkpoint.

    Raises:
        ArtifactError: the checkpoint is damaged.
    """
    import treelite

    try:
        forest = parse_forest(content)
    except ValueError as error:
        raise refuse(name, str(error)) from error
    return treelite.Model.deserialize_bytes(content), forest
