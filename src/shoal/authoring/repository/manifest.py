"""The manifest that ``compose`` writes into a repository: sizes, launch flags and file hashes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from shoal.authoring.repository.config import CONFIG
from shoal.errors import ArtifactError
from shoal.kit.component.files import sha256
from shoal.system.files import read_json

MANIFEST = "manifest.json"


class _Launch(TypedDict, total=False):
    flags: list[str]
    shared_memory: int


class _Weights(TypedDict, total=False):
    folder: str
    files: dict[str, str]


class _Manifest(TypedDict, total=False):
    """Entries that shoal reads; a manifest that another program wrote may have others."""

    files: dict[str, str]
    launch: _Launch
    weights: _Weights
    ensembles: list[str]
    gpus: list[int] | None
    environments: dict[str, str]
    contents: dict[str, str]
    load_seconds: float


def check_manifest(repository: Path) -> None:
    """Check the files of a composed repository against its manifest, before anything is loaded from them.

    Model files and ``model.py`` are programs, so a changed file is refused. ``config.pbtxt`` is not checked, because it
    may be tuned by hand. A repository without a manifest is not checked.

    Raises:
        ArtifactError: a file is missing or changed.
    """
    manifest = read_manifest(repository)
    files: dict[str, str] = manifest.get("files", {})
    for name, digest in files.items():
        change = "" if Path(name).name == CONFIG else find_change(repository / name, digest)
        if change:
            fix = f"Compose again; if the change is yours, remove {MANIFEST}."
            raise ArtifactError(f"{name} in {repository} {change}.", fix)
    # The small files of the weights folder, such as the tokenizer; shards are too large to hash each time.
    weights = manifest.get("weights", {})
    for name, digest in weights.get("files", {}).items():
        path = Path(weights["folder"]) / name
        if change := find_change(path, digest):
            raise ArtifactError(f"{path} {change}.", "Compose again, with --weights.")


def find_change(path: Path, digest: str) -> str:
    """Return the difference between a file and its digest in the manifest, as the end of a sentence; empty if none."""
    if not path.is_file():
        return f"is missing, and {MANIFEST} lists it"
    return "" if sha256(path) == digest else f"is not the file that {MANIFEST} lists"


def launch_flags(repository: Path) -> list[str]:
    """Return the tritonserver flags, which set memory pools, from a repository's manifest; empty without a manifest."""
    return list(read_manifest(repository).get("launch", {}).get("flags", []))


def read_composed(repository: Path) -> tuple[str, ...]:
    """Return the names of the ensembles or models that a repository was composed for; empty without a manifest.

    Raises:
        ArtifactError: the manifest is damaged.
    """
    return tuple(read_manifest(repository).get("ensembles", ()))


def read_manifest(repository: Path) -> dict[str, Any]:
    """Read the manifest of a composed repository; empty if there is none.

    Raises:
        ArtifactError: the manifest is damaged.
    """
    path = repository / MANIFEST
    if not os.path.lexists(path):
        return {}
    try:
        manifest = read_json(path)
        msgspec.convert(manifest, _Manifest)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.", "Compose again.") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {str(error).rstrip('.')}.", "Compose again.") from None
    return dict(manifest)
