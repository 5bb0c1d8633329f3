"""What would get out of its folder is refused by name; what is good comes out whole."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.environment.archive import Guard, Limits, read_archive
from shoal.environment.fit import find_misfits
from shoal.environment.inspection import inspect
from shoal.environment.targets import find_target
from shoal.environment.unpacking import unpack
from shoal.errors import ArtifactError, InputError, SetupError

HARD, DIR, NODE = tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE
END = bytes(1024)


def item(name: str, data: bytes = b"", **fields: Any) -> bytes:
    """An entry as it stands in a tar; tarfile itself would not write some of these."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    return item(name, type=kind, linkname=to)


def pax(kind: bytes = b"x", **records: str) -> bytes:
    """A header of pax's, which says more of the entry after it; ``_`` stands for a dot."""
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
SPARSE = pax(GNU_sparse_major="1", GNU_sparse_minor="0")
STEPS = b"".join(item("a/" * n + "a", type=DIR) for n in range(1100))  # too deep for what recurses

# What gets out, or could: an entry's name, what the error says of it, the entries.
ESCAPES: dict[str, tuple[str, str, Callable[[Path], bytes]]] = {
    "climbs": ("../x", "climbs out", lambda out: item("../x")),
    "climbs behind a name": ("a/../../b", "climbs out", lambda out: item("a/../../b")),
    "climbs and comes back": ("a/../b", "climbs out", lambda out: item("a/../b")),
    "climbs as a folder": ("..", "climbs out", lambda out: item("..", type=DIR)),
    "climbs by pax": ("../x", "climbs out", lambda out: pax(path="../x") + item("x")),
    "climbs by pax for all": ("../x", "climbs out", lambda out: pax(b"g", path="../x") + item("x")),
    "climbs by a sparse file's name": ("../x", "climbs out", lambda out: pax(GNU_sparse_name="../x") + item("x")),
    "absolute": ("/x", "is absolute", lambda out: item(f"{out}/x")),
    "absolute twice": ("//x", "is absolute", lambda out: item("//x")),
    "symlink absolute": ("l", "outside", lambda out: link("l", f"{out}/canary")),
    "symlink out": ("l", "links to ../canary, outside", lambda out: link("l", "../canary")),
    "symlink out from a folder": ("d/l", "outside", lambda out: link("d/l", "../../canary")),
    "symlink out behind a dot": ("l", "outside", lambda out: link("l", "./../canary")),
    "symlink out behind a link": ("e", "outside", lambda out: link("d/x", "..") + link("e", "d/x/../..")),
    "symlink out by pax": ("l", "outside", lambda out: pax(linkpath="../canary") + link("l", "x")),
    "symlink to nothing": ("l", "outside", lambda out: link("l", "")),
    "through a link": ("l/f", "through l, which is a symbolic", lambda out: link("l", "d") + item("l/f")),
    "through a link to here": ("l/l", "through l, which", lambda out: link("l", ".") + link("l/l", "..")),
    "through a deep link": ("d/l/m/f", "through d/l, which", lambda out: link("d/l", ".") + item("d/l/m/f")),
    "through a link, a folder": ("l/d", "through l,", lambda out: link("l", ".") + item("l/d", type=DIR)),
    "through a file": ("f/g", "through f, which is a file", lambda out: item("f") + item("f/g")),
    "file over a link": ("l", "appears twice", lambda out: link("l", "x") + item("l")),
    "folder over a link": ("l", "appears twice", lambda out: link("l", "x") + item("l", type=DIR)),
    "link over a folder": ("d", "appears twice", lambda out: item("d/f") + link("d", "..")),
    "hard link out": ("h", "hard link to ../canary", lambda out: link("h", "../canary", HARD)),
    "hard link absolute": ("h", "which is not a file before it", lambda out: link("h", f"{out}/canary", HARD)),
    "hard link to a later file": ("h", "not a file before", lambda out: link("h", "f", HARD) + item("f")),
    "hard link to nothing": ("h", "not a file before", lambda out: link("h", "nope", HARD)),
    "hard link to itself": ("h", "not a file before", lambda out: link("h", "h", HARD)),
    "hard link to a link": ("h", "not a file before", lambda out: link("l", "x") + link("h", "l", HARD)),
    "hard link to a folder": ("h", "not a file before", lambda out: item("d", type=DIR) + link("h", "d", HARD)),
    "hard link through a link": ("h", "not a file", lambda out: link("l", ".") + item("f") + link("h", "l/f", HARD)),
    "character device": ("n", "a character device", lambda out: item("n", type=NODE, devmajor=1)),
    "block device": ("n", "a block device", lambda out: item("n", type=tarfile.BLKTYPE, devmajor=8)),
    "named pipe": ("n", "a named pipe", lambda out: item("n", type=tarfile.FIFOTYPE)),
    "of no known type": ("n", "entry of type b'Z'", lambda out: item("n", type=b"Z")),
    "setuid": ("s", "setuid", lambda out: item("s", mode=0o4755)),
    "setgid": ("s", "setgid", lambda out: item("s", mode=0o2755)),
    "sparse": ("s", "sparse file", lambda out: item("s", type=tarfile.GNUTYPE_SPARSE)),
    "sparse by pax": ("s", "sparse file", lambda out: pax(GNU_sparse_map="0,1", GNU_sparse_size="9") + item("s")),
    "sparse by pax 1.0": ("s", "sparse file", lambda out: SPARSE + item("s", b"0\n".ljust(512, b"\0"))),
    "long name": ("a/a/a", "too long", lambda out: item("a/" * 2048 + "a")),
    "long part of a name": ("b" * 200, "too long", lambda out: item("b" * 256)),
    "long part, in bytes": ("é" * 100, "too long", lambda out: item("é" * 128)),
    "deep": ("a/a/a", "", lambda out: item("a/" * 1800 + "b")),
    "deep by steps": ("", "", lambda out: STEPS + item("../x")),
    "zero byte in a name": ("", "", lambda out: pax(path="a\0b") + item("x")),
    "zero byte in a link": ("l", "", lambda out: pax(linkpath="a\0b") + link("l", "x")),
    "long link": ("l", "", lambda out: link("l", "a/" * 2048 + "a")),
    "time that is no number": ("t", "", lambda out: pax(mtime="nan") + item("t")),
    "time out of range": ("t", "", lambda out: pax(mtime="1e20") + item("t")),
    "link twice": ("l", "appears twice", lambda out: link("l", "x") + link("l", "x")),
    "file, then hard link": ("f", "appears twice", lambda out: item("f") + link("./f", "f", HARD)),
    "hard link, then file": ("h", "appears twice", lambda out: item("f") + link("h", "f", HARD) + item("h")),
    "file, then folder": ("f", "appears twice", lambda out: item("f") + item("f", type=DIR)),
    "folder, then file": ("d", "appears twice", lambda out: item("d", type=DIR) + item("d")),
    "folder of a file, then file": ("d", "appears twice", lambda out: item("d/f") + item("d")),
    "dot as a file": (".", "names the folder itself", lambda out: item(".")),
    "no name": ("", "names the folder itself", lambda out: item("")),
}  # fmt: skip


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below, without recursion: some of these archives are made to break that."""
    found, rest = {}, [str(folder)]
    while rest:
        for at in os.scandir(rest.pop()):
            status, path = at.stat(follow_symlinks=False), Path(at.path)
            is_folder = stat.S_ISDIR(status.st_mode)
            rest += [at.path] if is_folder else []
            content = bytes(path.readlink()) if at.is_symlink() else b"" if is_folder else path.read_bytes()
            found[at.path] = status.st_mode, 0 if is_folder else status.st_nlink, content
    return found


def refused(archive: Path, target: Path, limits: Limits | None = None) -> ArtifactError:
    """The error of `unpack`, which leaves nothing behind and touches nothing beside or above."""
    before = snapshot(target.parents[1])
    with pytest.raises(ArtifactError) as caught:
        unpack(archive, target, limits=limits)
    assert snapshot(target.parents[1]) == before
    assert str(archive) in caught.value.what
    return caught.value


def lay_out(top: Path) -> Path:
    """A folder to unpack in, with canaries beside and above it."""
    for at in (top, top / "yard", top / "yard" / "beside"):
        at.mkdir(exist_ok=True)
        (at / "canary").write_text("sings", encoding="utf-8")
    return top / "yard"


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Path]:
    yield lay_out(tmp_path)
    subprocess.run(["rm", "-rf", tmp_path / "yard"], check=True)  # shutil's would not bear what is too deep


@pytest.mark.parametrize("case", ESCAPES)
def test_what_would_get_out_is_refused_by_name(case: str, yard: Path) -> None:
    name, words, make = ESCAPES[case]
    archive = pack(yard / "env.tar.gz", PYTHON, make(yard))
    error = refused(archive, yard / "env")
    assert words in error.what
    assert name in error.what
    assert error.fix
    environment = inspect(archive)
    assert any(words in escape and name in escape for escape in environment.escapes)
    misfits = find_misfits(environment, None, find_target("26.06"))
    assert environment.escapes[0] in misfits[0].what
    assert misfits[0].fix


NAMES = st.lists(st.sampled_from([*"aabbc", "canary", "..", ".", ""]), min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from([bytes([kind]) for kind in b"0022156"])  # files, symbolic and hard links, folders, pipes


def is_circle(path: str) -> bool:
    """Links in a circle lead nowhere, whatever `realpath` makes of them (of `b -> b//a`, `/a`)."""
    try:
        return not Path(path).stat()
    except OSError as error:
        return error.errno == errno.ELOOP


@settings(max_examples=300, deadline=None)
@given(entries=st.lists(st.tuples(KINDS, NAMES, NAMES), min_size=1, max_size=12))
def test_nothing_is_written_outside_whatever_the_entries(entries: list[tuple[bytes, str, str]]) -> None:
    """Once with all entries, once with those only that the guard lets pass: they must all be writable."""
    with tempfile.TemporaryDirectory() as folder:
        yard = lay_out(Path(folder).resolve())
        items = [item(n, b"new" if k == tarfile.REGTYPE else b"", type=k, linkname=to) for k, n, to in entries]
        archive, guard = pack(yard / "env.tar.gz", *items), Guard()
        good = [not guard.refusal(entry) for entry in read_archive(archive)]
        if not all(good):
            refused(archive, yard / "env")
        pack(archive, *(item for item, is_good in zip(items, good, strict=True) if is_good))
        before = snapshot(yard.parent)
        target = str(unpack(archive, yard / "env"))
        after = snapshot(yard.parent)
        written = {path for path in after if path == target or path.startswith(f"{target}/")}
        assert {path: state for path, state in after.items() if path not in written} == before
        for path in written:
            if not is_circle(path):
                assert f"{os.path.realpath(path)}/".startswith(f"{target}/")


GOOD = (
    item("./", type=DIR),
    item("./bin/run", b"#!/bin/sh\n", mode=0o755, mtime=1_000_000_000),
    item("lib/deep/er/x.py", b"x = 1\n", mode=0o600, mtime=1_600_000_000),
    item("lib/deep", type=DIR, mode=0o2755),
    item("lib", type=DIR, mode=0o700),
    item("share/", type=DIR),
    link("bin/x", "../lib/deep/er/x.py"),
    link("lib/deep/up", ".."),
    link("lib64", "lib"),
    item("./lib/walk", type=HARD, linkname="./bin/run", mode=0o755, mtime=1_000_000_000),
    item("é" * 60, b"n" * 1000),
    pax(path="l/" * 40 + "o", mtime="1500000000.25") + item("short", b"pax"),
)


def test_what_is_good_comes_out_whole(tmp_path: Path) -> None:
    archive = pack(tmp_path / "env.tar.gz", *GOOD)
    stages = []
    target = unpack(archive, tmp_path / "new" / "env", on_progress=lambda *stage: stages.append(stage))
    assert target == tmp_path / "new" / "env"
    assert stages == [("unpack", 0, 1), ("unpack", 1, 1)]
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "other", filter="data")
    ours, others = ({p.relative_to(top): p for p in top.rglob("*")} for top in (target, tmp_path / "other"))
    assert ours.keys() == others.keys()
    for name, path in ours.items():
        other = others[name]
        assert path.is_symlink() == other.is_symlink()
        if path.is_symlink():
            assert path.readlink() == other.readlink()
        elif path.is_file():
            assert path.read_bytes() == other.read_bytes()
            assert (path.stat().st_mtime, path.stat().st_nlink) == (other.stat().st_mtime, other.stat().st_nlink)
            assert os.access(path, os.X_OK) == os.access(other, os.X_OK)


def test_another_user_can_read_it_all(tmp_path: Path) -> None:
    mask = os.umask(0o077)  # of a careful user; Triton runs as another one
    try:
        target = unpack(pack(tmp_path / "env.tar.gz", *GOOD, item("private", mode=0)), tmp_path / "env")
    finally:
        os.umask(mask)
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [target, *target.rglob("*")] if not path.is_symlink()}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o755}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o755, 0o644}


def test_a_file_packed_twice_is_the_second_one(tmp_path: Path) -> None:
    """As conda-pack packs some scripts; what is linked to the first keeps it."""
    items = item("f", b"first"), link("h", "f", HARD), item("./f", b"second"), link("g", "f", HARD)
    target = unpack(pack(tmp_path / "env.tar.gz", *items), tmp_path / "env")
    assert [(target / name).read_bytes() for name in "fgh"] == [b"second", b"second", b"first"]


def test_what_stands_there_is_kept_and_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    archive = pack(tmp_path / "env.tar.gz", PYTHON)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("empty", "dangling", "env.tar.gz"):
        with pytest.raises(InputError, match=f"{name} exists; it will not be replaced"):
            unpack(archive, tmp_path / name)
    with pytest.raises(InputError, match="Triton does not support the path"):
        unpack(archive, tmp_path / "with blank")
    for parent in (archive, Path("/proc")):
        with pytest.raises(SetupError, match=f"cannot be unpacked into {parent}/env: "):
            unpack(archive, parent / "env")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "dangling", "env.tar.gz"}


def test_a_full_or_locked_disk(tmp_path: Path, mount_disk: Callable[[str], Path]) -> None:
    disk, archive = mount_disk("128k"), pack(tmp_path / "env.tar.gz", *GOOD, item("large", os.urandom(2**18)))
    with pytest.raises(SetupError, match=r"No space left on device\. Nothing was left there\."):
        unpack(archive, disk / "env")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(SetupError, match=r"Read-only file system\. Nothing"):
        unpack(archive, disk / "env")
    assert list(disk.iterdir()) == []
