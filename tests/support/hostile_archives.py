"""Archives that a stranger might make, and what must hold when they are unpacked."""

from __future__ import annotations

import errno
import os
import tarfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shoal.authoring.environment.archive import unpack
from shoal.authoring.environment.inspection import inspect
from shoal.errors import ArtifactError, ShoalError, printable
from tests.support.entries import DIR, HARD, PYTHON, item, lay_out, pack, pax, snapshot

SYM = tarfile.SYMTYPE
_PART = st.sampled_from(
    ["a", "b", "c", "d"] * 3 + ["..", "..", ".", "", "canary", "beside", "é", "\n\x1b[2J", "n" * 300]
)
_PATH = st.lists(_PART, min_size=1, max_size=4).map("/".join)
_CLEAN = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map("/".join)
_NAME = st.one_of(*[_CLEAN] * 8, _PATH, _PATH.map("/{}".format), st.sampled_from(["", "/", "n/" * 3000]))
_LINK = st.one_of(*[_CLEAN] * 4, _CLEAN.map("../{}".format), st.just(".."), _NAME)
_COMMON, _ODD = [tarfile.REGTYPE, DIR, SYM, SYM, HARD], list(map(bytes, zip(b"23467LKSxgXZ\0")))
_KIND = st.sampled_from(_COMMON * 10 + _ODD)
_NUMBER = st.sampled_from(["0", "1", "-1", "-512", "1e400", "nan", "inf", "9" * 30, "", "x", "1 2"])
_TEXT = st.sampled_from(
    ["a\0b", "\0", "../canary", "a", "a/b", "", "/canary", "\ud800".encode(errors="replace").decode()]
)
_PAX = st.fixed_dictionaries(
    {},
    optional={"path": _TEXT | _NAME, "linkpath": _TEXT | _LINK, "size": _NUMBER, "mtime": _NUMBER, "uid": _NUMBER}
    | {"GNU.sparse.major": _NUMBER, "GNU.sparse.map": _NUMBER, "GNU.sparse.size": _NUMBER, "hdrcharset": _TEXT},
)


@st.composite
def _items(draw: Any) -> bytes:
    kind, data = draw(_KIND), draw(st.sampled_from([b"", b"", b"evil", b"e" * 600]))
    fields: dict[str, Any] = {"type": kind, "linkname": draw(_LINK)}
    if draw(st.integers(0, 9)) == 9:
        fields |= draw(st.sampled_from([{"size": -1}, {"size": 2**60}, {"mtime": 2**70}, {"mode": -1}, {"size": 600}]))
    made = item(draw(_NAME), data if kind in (tarfile.REGTYPE, tarfile.CONTTYPE) else b"", **fields)
    return (
        pax(draw(st.sampled_from([b"x", b"x", b"g"])), **draw(_PAX)) if draw(st.integers(0, 4)) == 4 else b""
    ) + made


ARCHIVES = st.lists(_items(), min_size=1, max_size=5)


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def check_unpacking(top: Path, items: list[bytes]) -> str:
    """Unpack an archive of these entries; return the name of the error, or an empty string.

    Nothing beside the folder changes, nothing in it leads out, and ``inspect`` refuses what ``unpack`` does.
    """
    yard = lay_out(top)
    archive, target = pack(yard / "env.tar.gz", PYTHON, *items), yard / "env"
    before = snapshot(top)
    error = None
    try:
        unpack(archive, target)
    except ShoalError as caught:
        error = caught
    after = snapshot(top)
    assert {
        path: what for path, what in after.items() if Path(path) != target and target not in Path(path).parents
    } == before
    for path in target.rglob("*"):
        if _is_loop(path):  # cannot be opened; os.path.realpath of a link "a" to "a//b" is "/b"
            continue
        real = os.path.realpath(path)
        assert f"{real}/".startswith(f"{target}/"), (path, real)
    damage = None
    try:
        remarks = inspect(archive).remarks()
    except ArtifactError as caught:  # perhaps of an entry behind the one that was refused
        damage, remarks = caught, [caught.what]
    escapes = [sentence for sentence in remarks if sentence.startswith("'")]
    assert isinstance(error, ArtifactError) == bool(escapes or damage), (error, escapes, damage)
    assert not escapes or printable(escapes[0]) in str(error)
    assert str(error).isprintable(), error
    return type(error).__name__ if error else ""
