"""Files that belong together say so: an artifact carries the sha256 of those it was made with.

A forest's columns mean nothing under another ``preprocess.json``, an encoder's ids nothing under another ``vocab.txt``.
Nothing else would notice: shapes and dtypes fit.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.component.bundle import sha256
from shoal.errors import ArtifactError, needs

METADATA = "shoal.json"  # the entry of a TorchScript archive that carries the ties


def dump_ties(ties: Mapping[str, str]) -> str:
    """The text that an artifact carries: file name -> sha256."""
    return json.dumps({"shoal_ties": dict(ties)}, sort_keys=True)


def read_ties(artifact: Path) -> dict[str, str]:
    """The ties that a file carries; none where it is of no kind that could carry any.

    Raises:
        ArtifactError: it is a TorchScript archive or a Treelite checkpoint by its name, and not by its content.
    """
    if artifact.suffix == ".pt":
        return _archive_ties(artifact)
    return forest_ties(load_forest(artifact)) if artifact.suffix == ".tl" else {}


def _archive_ties(artifact: Path) -> dict[str, str]:
    try:
        with zipfile.ZipFile(artifact) as archive:  # what torch.jit.save writes
            entries = [name for name in archive.namelist() if name.endswith(f"/extra/{METADATA}")]
            return _ties(archive.read(entries[0]).decode()) if entries else {}
    except zipfile.BadZipFile as error:
        raise ArtifactError(f"{artifact.name} is not a TorchScript file: {error}", "Export it again.") from error


def load_forest(artifact: Path) -> Any:
    """The ``treelite.Model`` in a checkpoint.

    Raises:
        ArtifactError: it is no Treelite checkpoint.
    """
    with needs("serve"):
        from treelite import Model, TreeliteError
    try:
        return Model.deserialize(str(artifact))
    except TreeliteError as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(f"{artifact.name} is not a Treelite checkpoint: {reason}", "Export it again.") from error


def forest_ties(model: Any) -> dict[str, str]:
    """The ties that a loaded forest carries."""
    return _ties(str(model.get_header_accessor().get_field("attributes")))


def _ties(attributes: str) -> dict[str, str]:
    return dict(json.loads(attributes or "{}").get("shoal_ties", {}))


def check_ties(ties: Mapping[str, str], artifact: Path) -> None:
    """Check an artifact that lies in a model repository, ``REPOSITORY/MODEL/VERSION/FILE``.

    For each tie, a file of that name anywhere in the repository must be the one it was made with. Where there is none,
    nothing is said: a client may hold it.

    Raises:
        ArtifactError: the repository holds another one.
    """
    repository = artifact.parents[2]
    for name, wanted in ties.items():
        found = sorted(repository.glob(f"*/[0-9]*/{name}"))
        if found and wanted not in map(sha256, found):
            model = found[0].parents[1].name
            raise ArtifactError(
                f"{artifact.name} was made with another {name} than the one of model {model}"
                f" (expected sha256 {wanted[:12]}, found {sha256(found[0])[:12]}).",
                "Take both from one artifact folder.",
            )
