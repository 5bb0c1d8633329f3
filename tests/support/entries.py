"""Archives, entry by entry."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.environment.archive import unpack
from shoal.errors import ArtifactError

HARD, DIR, NODE = tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE
END = bytes(1024)


def item(name: str, data: bytes = b"", **fields: Any) -> bytes:
    """An entry in the format of tar; tarfile itself would not write some of these."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    return item(name, type=kind, linkname=to)


def pax(kind: bytes = b"x", **records: str) -> bytes:
    """A pax header, with more fields of the entry after it; ``_`` means a dot."""
    data = b""
    for key, value in records.items():
        record = f" {key.replace('_', '.')}={value}\n".encode()
        size = len(record) + 1
        while len(str(size)) + len(record) != size:
            size += 1
        data += b"%d" % size + record
    return item("pax", data, type=kind)


def pack(path: Path, *items: bytes) -> Path:
    path.write_bytes(gzip.compress(b"".join(items) + END, 1))
    return path


PYTHON = item("bin/python3.11", b"#!")  # without one, `inspect` would find no environment to speak of


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a folder: modes, numbers of links, contents."""
    found = {}
    for path in folder.rglob("*"):
        status, is_folder = path.lstat(), path.is_dir()
        content = bytes(path.readlink()) if path.is_symlink() else b"" if is_folder else path.read_bytes()
        found[str(path)] = status.st_mode, 0 if is_folder else status.st_nlink, content
    return found


def refused(archive: Path, target: Path) -> ArtifactError:
    """The error of `unpack`, which leaves nothing behind and touches nothing beside or above."""
    before = snapshot(target.parents[1])
    with pytest.raises(ArtifactError) as caught:
        unpack(archive, target)
    assert snapshot(target.parents[1]) == before
    assert str(archive) in caught.value.what
    return caught.value


def lay_out(top: Path) -> Path:
    """A folder to unpack in, with canaries beside and above it."""
    for at in (top, top / "yard", top / "yard" / "beside"):
        at.mkdir(exist_ok=True)
        (at / "canary").write_text("sings", encoding="utf-8")
    return top / "yard"
