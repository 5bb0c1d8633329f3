"""Repositories that ``shoal serve`` made of models."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.authoring.repository.config import CONFIG


def suggest_repository(path: Path) -> str:
    """Return the advice to name the repository that ``shoal serve`` made of a model; empty if it made none.

    ``path`` may be the model's file or folder, or its name.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem if path.is_file() else path.name)
    made = Path("build") / name / "repository"
    return f"Did you mean {made}?" if any(made.glob(f"*/{CONFIG}")) else ""
