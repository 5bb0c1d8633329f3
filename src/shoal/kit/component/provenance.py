"""Ties between artifacts: an artifact's *ties* are the names and SHA-256 hashes of the files that it was made with.

An artifact contains its ties. With another ``preprocess.json`` a forest gives wrong scores, and so does an encoder with
another ``vocab.txt``. Shapes and dtypes still fit, so no other check finds the mistake. A TorchScript archive is read
whole here, because torch does not verify its checksums. `shoal.kit.forests.checkpoints` reads those of forests.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import ArtifactError
from shoal.kit.component.files import MAKE_AGAIN, check_file, describe_bytes, refusal, sha256
from shoal.system.files import MAX_TEXT, parse_json

METADATA = "shoal.json"  # name of the ties in a TorchScript archive, and in an ONNX model's metadata
_ARCHIVE = "TorchScript file"
_CHUNK = 2**20
_DIRECTORY = 0x10  # of a zip entry's attributes
# Errors of zipfile for damaged archives; RuntimeError: they seem encrypted, or compressed in an unknown way.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError)


def dump_ties(ties: Mapping[str, str]) -> str:
    """Serialise ties (file name -> SHA-256) to the text that an artifact stores."""
    return json.dumps({"shoal_ties": dict(ties)}, sort_keys=True)


def check_ties(ties: Mapping[str, str], artifact: Path) -> None:
    """Check that an artifact, ``REPOSITORY/MODEL/VERSION/FILE``, was made with the files that its repository contains.

    If the repository contains files with a name in ``ties``, one of them must have the SHA-256 that ``ties`` has for
    this name. A missing file is not an error: a client may have it.

    Raises:
        ArtifactError: the repository contains another file of that name.
    """
    repository = artifact.parents[2]
    for name in ties:
        check_tie(ties, artifact, sorted(repository.glob(f"*/[0-9]*/{name}")))


def check_tie(ties: Mapping[str, str], artifact: Path, neighbours: Iterable[Path]) -> None:
    """Check that an artifact was made with one of ``neighbours``, files of one name; ``neighbours`` may be empty.

    Raises:
        ArtifactError: the artifact was made with another file of that name.
    """
    found = {path: sha256(path) for path in neighbours if path.is_file()}
    for path, digest in found.items():
        wanted = ties.get(path.name)
        if wanted and wanted not in found.values():
            raise ArtifactError(
                f"{artifact.name} was made with another {path.name} than {path}"
                f" (expected sha256 {wanted[:12]}, found {digest[:12]}).",
                f"Take both from one artifact folder. {MAKE_AGAIN}",
            )


def parse_ties(text: str | bytes) -> dict[str, str]:
    """Parse a text from ``dump_ties``; other attributes in it are ignored, and an empty text has no ties.

    Raises:
        ValueError: the text has another form.
    """
    attributes = parse_json(text or "{}")
    ties = attributes.get("shoal_ties", {}) if isinstance(attributes, dict) else None
    if not isinstance(ties, dict) or not all(isinstance(digest, str) for digest in ties.values()):
        raise ValueError("its ties to other files are damaged")
    return ties


# --- TorchScript archives ----------------------------------------------------------------------------------------


def read_archive(path: Path) -> dict[str, str]:
    """Read a whole TorchScript archive, verify its checksums, and return its ties.

    Raises:
        ArtifactError: the file is not such an archive, or is damaged.
    """
    begins = check_file(path, _ARCHIVE)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if not all(any(part in name for name in names) for part in ("/data.pkl", "/constants.pkl", "/code/")):
                raise refusal(
                    path, _ARCHIVE, "it is a zip archive without code; torch.jit.save writes it, not torch.save"
                )
            for entry in archive.infolist():
                _read_entry(archive, entry)
            ties = [name for name in names if name.endswith(f"/extra/{METADATA}")]
            return parse_ties(archive.open(ties[0]).read(MAX_TEXT)) if ties else {}
    except _UNREADABLE as error:
        is_zip = begins.startswith(b"PK")
        raise refusal(path, _ARCHIVE, (not is_zip and describe_bytes(begins)) or f"it is damaged: {error}") from error


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    size = 0
    if entry.external_attr & _DIRECTORY:
        raise ValueError(f"{entry.filename} is marked as a folder")  # torch would leave a weight uninitialised
    with archive.open(entry) as content:
        while chunk := content.read(_CHUNK):  # the last one compares the checksum
            size += len(chunk)
    is_stored = entry.compress_type == zipfile.ZIP_STORED  # then torch uses the compressed size
    if size != entry.file_size or (is_stored and size != entry.compress_size):
        raise EOFError(f"{entry.filename} has {size:,} bytes, expected {max(entry.file_size, entry.compress_size):,}")
