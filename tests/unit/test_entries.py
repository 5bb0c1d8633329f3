"""Entries that would leave their folder are refused by name; good ones are unpacked whole."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.authoring.environment.archive import unpack
from shoal.authoring.environment.fit import find_misfits
from shoal.authoring.environment.inspection import inspect
from shoal.authoring.environment.targets import find_target
from shoal.errors import InputError, SetupError
from tests.support.entries import DIR, HARD, NODE, PYTHON, item, lay_out, link, pack, pax, refused

# What a careless tar packs, or a part of an archive lacks: an entry's name, what the error says of it, the entries.
ESCAPES: dict[str, tuple[str, str, bytes]] = {
    "climbs": ("../x", "leaves the folder", item("../x")),
    "climbs behind a name": ("a/../../b", "leaves the folder", item("a/../../b")),
    "climbs as a folder": ("..", "leaves the folder", item("..", type=DIR)),
    "climbs by pax": ("../x", "leaves the folder", pax(path="../x") + item("x")),
    "absolute": ("/opt/env/x", "is absolute", item("/opt/env/x")),
    "symlink absolute": ("l", "links to /opt/x, outside", link("l", "/opt/x")),
    "symlink out": ("l", "links to ../canary, outside", link("l", "../canary")),
    "symlink to what is above": ("l", "links to .., outside", link("l", "..")),
    "symlink out from a folder": ("d/l", "outside", link("d/l", "../../canary")),
    "symlink out behind a dot": ("l", "outside", link("l", "./../canary")),
    "symlink out by pax": ("l", "outside", pax(linkpath="../canary") + link("l", "x")),
    "hard link out": ("h", "hard link to ../canary, which is not a file before", link("h", "../canary", HARD)),
    "hard link to a later file": ("h", "not a file before", link("h", "f", HARD) + item("f")),
    "hard link to nothing": ("h", "not a file before", link("h", "nope", HARD)),
    "character device": ("n", "a special file", item("n", type=NODE, devmajor=1)),
    "named pipe": ("n", "a special file", item("n", type=tarfile.FIFOTYPE)),
}  # fmt: skip


@pytest.mark.parametrize("case", ESCAPES)
def test_entries_that_would_leave_the_folder_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, words, entries = ESCAPES[case]
    yard = lay_out(tmp_path)
    archive = pack(yard / "env.tar.gz", PYTHON, entries)
    error = refused(archive, yard / "env")
    assert words in error.what
    assert name in error.what
    assert error.fix
    environment = inspect(archive)
    assert any(words in escape and name in escape for escape in environment.escapes)
    misfits = find_misfits(environment, None, find_target("26.06"))
    assert environment.escapes[0] in misfits[0].what
    assert misfits[0].fix


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


def test_good_archives_are_unpacked_whole(tmp_path: Path) -> None:
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
    """conda-pack packs some scripts twice; a hard link to the first keeps that one."""
    items = item("f", b"first", mode=0o444), link("h", "f", HARD), item("./f", b"second"), link("g", "f", HARD)
    target = unpack(pack(tmp_path / "env.tar.gz", *items), tmp_path / "env")
    assert [(target / name).read_bytes() for name in "fgh"] == [b"second", b"second", b"first"]


def test_existing_targets_are_kept_and_unwritable_ones_named(tmp_path: Path) -> None:
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
