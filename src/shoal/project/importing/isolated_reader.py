"""Reader of foreign model files in a subprocess, since a library may crash on a damaged one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import ArtifactError, ShoalError

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*?: )?")  # Treelite's source location


def read_apart(format_name: str, source: Path, name: str, fix: str) -> tuple[bytes, dict[str, Any]]:
    """Convert ``source`` to a Treelite checkpoint in a subprocess; return it and the reader's findings.

    ``format_name``: json or ubjson (XGBoost), lightgbm, skops.

    Raises:
        ArtifactError: it cannot be read; ``fix`` is the advice if only the library's message is known.
        ShoalError: as raised by the reader.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        target = Path(folder) / "checkpoint.tl"
        command = [sys.executable, "-P", "-m", __name__, format_name, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode < 0:
            ended_by = signal.Signals(-done.returncode).name
            raise ArtifactError(f"{name} cannot be added: it is damaged: its reader was killed by {ended_by}.", fix)
        try:
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise ArtifactError(f"{name} cannot be added: its reader ended: {said}.", fix) from None
        if "refused" in answer:
            raise _ERRORS[answer["refused"]](answer["what"], answer["fix"])
        if "error" in answer:
            raise ArtifactError(f"{name} cannot be added: {answer['error']}.", fix)
        return target.read_bytes(), answer


def _errors(parent: type[ShoalError]) -> dict[str, type[ShoalError]]:
    return {child.__name__: child for child in (parent, *parent.__subclasses__())}


_ERRORS = _errors(ShoalError)


def _read_xgboost(format_name: str, source: str, target: str) -> dict[str, Any]:
    import treelite

    treelite.frontend.load_xgboost_model(source, format_choice=format_name).serialize(target)
    return {}


def _read_lightgbm(_: str, source: str, target: str) -> dict[str, Any]:
    import treelite

    treelite.frontend.load_lightgbm_model(source).serialize(target)
    return {}


def _read_skops(format_name: str, source: str, target: str) -> dict[str, Any]:
    from shoal.project.importing.estimators import import_estimator, load_skops
    from shoal.project.importing.verify_forest import write_proven

    del format_name
    found = import_estimator(load_skops(Path(source)))
    _, proven = write_proven(replace(found, name=source), Path(target))
    return {"what": found.what, "said": (*found.said, *proven), "labels": found.labels}


_READERS: Mapping[str, Callable[[str, str, str], dict[str, Any]]] = {
    "json": _read_xgboost,
    "ubjson": _read_xgboost,
    "lightgbm": _read_lightgbm,
    "skops": _read_skops,
}


def main(format_name: str, source: str, target: str) -> None:
    """Read ``source``, write ``target``, and print the findings as JSON in the last line."""
    try:
        answer = _READERS[format_name](format_name, source, target)
    except ShoalError as error:
        answer = {"refused": type(error).__name__, "what": error.what, "fix": error.fix}
    except Exception as error:  # libraries raise anything on damaged files
        lines = [_PLACE.sub("", line) for line in str(error).splitlines() if line.strip()]
        answer = {"error": (lines or [type(error).__name__])[0].rstrip(".")}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
