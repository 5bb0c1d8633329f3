"""Readers of artifact files (text, JSON); their error messages say what was found and what was expected."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

from shoal.errors import ArtifactError
from shoal.system.files import MAX_TEXT, describe_special, open_regular, parse_json
from shoal.system.files import read_text as read_plain

MAKE_AGAIN = "Make it again, or copy it whole; shoal's own come from shoal train --out FOLDER"
GREATEST = 3.4e38  # greatest number of FP32, rounded down
_SIGNS = {  # files often mistaken for an artifact, by their first bytes
    b"\x89PNG": "a PNG image",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
    b"\x80": "a Python pickle",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself",
    b"<": "a web page or XML",
}


def refusal(path: Path, kind: str, why: str) -> ArtifactError:
    """Return the error for a file that is not an artifact of the expected ``kind``, with the reason ``why``."""
    return ArtifactError(f"{path} is not a {kind}: {why}.", MAKE_AGAIN)


def check_file(path: Path, kind: str) -> bytes:
    """Check that a file exists, is readable and not empty; return its first 32 bytes.

    Raises:
        ArtifactError: the check failed; the message says what was found.
    """
    try:
        if not path.is_file():
            raise refusal(path, kind, f"it is {describe_place(path)}")
        with open_regular(path) as file:
            begins = file.read(32) or b""  # None from a file of /proc that waits
    except OSError as error:
        raise refusal(path, kind, f"it cannot be read: {error.strerror}") from error
    if not begins:
        raise refusal(path, kind, "it is empty")
    return begins


def describe_place(path: Path) -> str:
    """Describe what is at ``path`` in place of a regular file."""
    if path.is_symlink() and not path.exists():
        return f"a link to {path.readlink()}, which is not there"
    if path.is_dir():
        return "a folder"
    return describe_special(path.stat().st_mode) if path.exists() else "missing"


def describe_bytes(begins: bytes) -> str:
    """Guess a file's type from its first bytes; empty if unknown."""
    return next((f"it is {what}" for sign, what in _SIGNS.items() if begins.startswith(sign)), "")


def read_text(path: Path, kind: str, most: int = MAX_TEXT) -> str:
    """Read an artifact of at most ``most`` bytes as UTF-8 text.

    Raises:
        ArtifactError: the file is missing or too large, or is not UTF-8 text.
    """
    begins = check_file(path, kind)
    try:
        return read_plain(path, most)
    except OSError as error:
        raise refusal(path, kind, f"{error.strerror}") from error
    except UnicodeDecodeError as error:
        why = describe_bytes(begins) or f"it is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        raise refusal(path, kind, why) from error


def read_json(path: Path, kind: str, most: int = MAX_TEXT) -> dict[str, Any]:
    """Read a JSON object, refusing duplicate names.

    Raises:
        ArtifactError: the file is missing or larger than ``most`` bytes, or does not contain such an object.
    """
    text = read_text(path, kind, most)
    try:
        value = parse_json(text, object_pairs_hook=_unite)
    except ValueError as error:
        is_other = not text.lstrip().startswith("{")
        raise refusal(path, kind, (is_other and describe_bytes(text[:32].encode())) or f"{error}") from error
    if not isinstance(value, dict):
        raise refusal(path, kind, f"it is the JSON value {shorten(value)}, expected an object")
    return value


def _unite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := find_repeated(name for name, _ in pairs):
        raise ValueError(f"it holds {shorten(repeated)} twice")
    return dict(pairs)


def read_object(path: Path, kind: str, names: Iterable[str]) -> dict[str, Any]:
    """Read a JSON object that has exactly these names.

    Raises:
        ArtifactError: the file is missing, or does not contain such an object.
    """
    entries, wanted = read_json(path, kind), set(names)
    if missing := sorted(wanted - set(entries)):
        raise refusal(path, kind, f"it lacks {', '.join(missing)}")
    if unknown := sorted(set(entries) - wanted):
        raise refusal(path, kind, f"it holds {shorten(unknown[0])}, which this shoal does not know")
    return entries


def find_changed(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Return the names of ``files`` (name -> sha256) that are missing from ``folder`` or have another hash."""
    return [name for name, kept in files.items() if not (folder / name).is_file() or sha256(folder / name) != kept]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_repeated(values: Iterable[str]) -> str:
    """Return the first value that occurs a second time; empty if all are distinct."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return ""


def is_number(value: Any) -> bool:
    """Whether ``value`` is an int or float, not a bool, within FP32's range."""
    return type(value) in (int, float) and abs(value) <= GREATEST  # false for NaN
