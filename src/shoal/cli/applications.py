"""Applications: packages that add commands, texts, and a tuning of their artifacts, by entry points.

Each entry point leads to one object: ``shoal.commands`` to a ``typer.Typer`` whose help heads its commands in
``shoal --help``; ``shoal.texts`` and ``shoal.tuning`` to functions, which `read_texts` and `tune_artifacts` call.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import InputError, needs
from shoal.system.progress import OnProgress


class Texts(Protocol):
    """Texts and, if they are labelled, FP64 targets ``[len(texts)]``."""

    name: str
    texts: Sequence[str]
    targets: Any


def _load(group: str, fix: str) -> Any:
    """Load what the first application offers.

    Raises:
        InputError: no installed application offers it.
        SetupError: a library that it needs is not installed.
    """
    for entry in entry_points(group=group):
        with needs("train"):
            return entry.load()
    raise InputError(f"No installed application has an entry point {group}.", fix)


def read_texts(path: Path | None = None, **columns: Any) -> Texts:
    """Read labelled texts from a file, or return the application's own.

    ``columns`` are the names ``text_column`` and ``target_column``, and the callback ``on_progress``.
    """
    found: Texts = _load("shoal.texts", "Name a file of your own texts.")(path, **columns)
    return found


def sample_texts() -> tuple[str, Sequence[str]]:
    """Return the name and the texts of what `read_texts` finds, for use as requests."""
    found = read_texts()
    return found.name, found.texts


def tune_artifacts(
    artifacts: Path, texts: Texts, out: Path, *, seconds: float, on_progress: OnProgress
) -> dict[str, Any]:
    """Choose the precision for an application's artifact folder; return the plan."""
    tune = _load("shoal.tuning", "Name a repository instead of artifacts.")
    plan: dict[str, Any] = tune(artifacts, texts, out, seconds=seconds, on_progress=on_progress)
    return plan
