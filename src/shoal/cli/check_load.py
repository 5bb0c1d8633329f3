"""Findings of ``shoal check``, with ``--load`` also those of a server; apart from the command, which services load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.authoring.check.families import check_together
from shoal.authoring.check.findings import Finding
from shoal.authoring.check.repositories import read_repository
from shoal.authoring.environment.targets import EMBEDDED
from shoal.cli.console import ERR, plain, show_progress
from shoal.errors import InputError


def find_all(paths: Sequence[Path], target: str | None, *, is_loaded: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Return the findings and, if the models are to be loaded, which of them were not tried, as JSON values.

    Raises:
        InputError: there is nothing to check, or the server cannot serve what was asked for.
        SetupError: this machine cannot run the server.
        ServerError: the server did not start.
    """
    if not is_loaded:
        return check_together(paths, target=target), {}
    from shoal.lab.trial.run import find_server, try_models
    from shoal.serving.server.runtime import SERVER_VARIABLE

    chosen = None if os.environ.get(SERVER_VARIABLE) else EMBEDDED
    if target and target != chosen:
        raise InputError(f"--load starts the embedded Triton, which is not {target}.", "Leave out --target, or --load.")
    static = check_together(paths, target=chosen)
    runtime = find_server(paths)
    with show_progress() as show:
        found, untried = try_models([read_repository(path) for path in paths], runtime, static, show)
    for each in untried:
        ERR.print(f"{plain(each.model)}: {plain(each.why)}", soft_wrap=True)
    places = {each.place for each in found if each.place.line}
    listed = [{"model": each.model, "folder": str(each.folder), "why": each.why} for each in untried]
    return [*(each for each in static if each.place not in places), *found], {"not_tried": listed}
