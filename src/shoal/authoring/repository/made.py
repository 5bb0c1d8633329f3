"""Names that ``shoal serve`` gives to models, and the repositories that it made of them."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.authoring.repository.config import CONFIG


def make_name(text: str) -> str:
    """Return the name that a model gets from that of its file, without its ending, or of its folder."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_-").lstrip("0123456789_-")[:50] or "model"


def suggest_repository(path: Path) -> str:
    """Return the advice to name the repository that ``shoal serve`` made of a model; empty if it made none.

    ``path`` may be the model's file or folder, or its name.
    """
    made = Path("build") / make_name(path.stem if path.is_file() else path.name) / "repository"
    return f"Did you mean {made}?" if any(made.glob(f"*/{CONFIG}")) else ""
