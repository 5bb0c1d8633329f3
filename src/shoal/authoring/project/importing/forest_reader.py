"""Program that converts a model file to a Treelite checkpoint, run in a subprocess by ``isolated_reader``."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.authoring.project.importing.estimators import import_estimator, load_skops
from shoal.authoring.project.importing.verify_forest import write_proven
from shoal.errors import ShoalError

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*?: )?")  # Treelite's source location


def _read_booster(format_name: str, source: str, target: str) -> dict[str, Any]:
    from treelite import frontend

    if format_name == "lightgbm":
        frontend.load_lightgbm_model(source).serialize(target)
    else:
        frontend.load_xgboost_model(source, format_choice=format_name).serialize(target)
    return {}


def _read_skops(source: str, target: str, name: str) -> dict[str, Any]:
    found = import_estimator(load_skops(Path(source), name))
    _, proven = write_proven(replace(found, name=name), Path(target))
    return {"what": found.what, "said": (*found.said, *proven), "labels": found.labels}


def main(format_name: str, source: str, target: str, name: str) -> None:
    """Convert the model file ``source`` to the Treelite checkpoint ``target``; ``name`` is used in errors.

    The last line of the output is JSON: the description, notes and labels of a skops forest, ``{}`` for any other
    format, or the error.
    """
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
