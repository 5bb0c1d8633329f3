"""Conversion of foreign model files to Treelite checkpoints, in a subprocess: libraries may crash on damaged files.

The subprocess runs this module as a program.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.errors import ArtifactError, ShoalError
from shoal.forests.checkpoints import Forest, parse_forest

CHECKPOINT = "checkpoint.tl"
SAVE_AGAIN = "Save it again, with the library that trained it."
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*?: )?")  # Treelite's source location, in its messages


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
        command = [
            sys.executable,
            "-P",
            "-m",
            "shoal.project.importing.isolated_reader",
            format_name,
            str(source),
            str(target),
            name,
        ]
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


# --- the subprocess --------------------------------------------------------------------------------------------------


def _read_booster(format_name: str, source: str, target: str) -> dict[str, Any]:
    from treelite import frontend

    if format_name == "lightgbm":
        frontend.load_lightgbm_model(source).serialize(target)
    else:
        frontend.load_xgboost_model(source, format_choice=format_name).serialize(target)
    return {}


def _read_skops(source: str, target: str, name: str) -> dict[str, Any]:
    from shoal.project.importing.estimators import import_estimator, load_skops
    from shoal.project.importing.verify_forest import write_proven

    found = import_estimator(load_skops(Path(source), name))
    _, proven = write_proven(replace(found, name=name), Path(target))
    return {"what": found.what, "said": (*found.said, *proven), "labels": found.labels}


def main(format_name: str, source: str, target: str, name: str) -> None:
    """Read ``source``, write ``target``, and print the findings as JSON in the last line."""
    try:
        is_skops = format_name == "skops"
        answer = _read_skops(source, target, name) if is_skops else _read_booster(format_name, source, target)
    except ShoalError as error:
        answer = {"refused": type(error).__name__, "what": error.what, "fix": error.fix}
    except Exception as error:  # libraries raise anything on damaged files
        lines = [_PLACE.sub("", line) for line in str(error).splitlines() if line.strip()]
        answer = {"error": (lines or [type(error).__name__])[0].rstrip(".")}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
