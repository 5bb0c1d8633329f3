"""The manifest that ``compose`` writes into a repository: sizes, launch flags and file hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.component.artifact_files import sha256
from shoal.errors import ArtifactError

MANIFEST = "manifest.json"


def check_manifest(repository: Path) -> None:
    """Check every file of a composed repository against its manifest, before anything is loaded from it.

    Model files and ``model.py`` are programs. Configurations may be tuned by hand, and a repository without a manifest
    is its owner's own.

    Raises:
        ArtifactError: a file is missing or changed.
    """
    manifest = read_manifest(repository)
    _check_weights(manifest)
    files: dict[str, str] = manifest.get("files", {})
    for name, expected in files.items():
        path = repository / name
        if path.name != "config.pbtxt" and (not path.is_file() or sha256(path) != expected):
            raise ArtifactError(
                f"{name} in {repository} is {'not what' if path.is_file() else 'missing, though'} {MANIFEST} says.",
                f"Compose again; if the change is yours, remove {MANIFEST}.",
            )


def _check_weights(manifest: Mapping[str, Any]) -> None:
    """Check the small files of the weights folder, such as the tokenizer; shards are too large to hash each time."""
    weights = manifest.get("weights", {})
    for name, expected in weights.get("files", {}).items():
        path = Path(weights["folder"]) / name
        if not path.is_file() or sha256(path) != expected:
            found = "not what it was" if path.is_file() else "missing, and was there"
            raise ArtifactError(f"{path} is {found} when this was composed.", "Compose again, with --weights.")


def launch_flags(repository: Path) -> list[str]:
    """Return the tritonserver flags that a composed repository was sized for; none without a manifest."""
    return list(read_manifest(repository).get("launch", {}).get("flags", []))


def read_composed(repository: Path) -> tuple[str, ...]:
    """Return the names that a repository was composed for; none if it was not composed.

    Raises:
        ArtifactError: its manifest is damaged.
    """
    return tuple(read_manifest(repository).get("ensembles", ()))


def read_manifest(repository: Path) -> dict[str, Any]:
    """Read the manifest of a composed repository; empty where there is none.

    Raises:
        ArtifactError: it is damaged.
    """
    path = repository / MANIFEST
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}.", "Compose again.") from None
