"""No member of an archive is written through a link that the archive brought; odd entries are refused by name."""

from __future__ import annotations

import gzip
import tarfile
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings

from shoal.authoring.environment import archive as reader
from shoal.authoring.environment.archive import read_archive, unpack
from shoal.authoring.environment.inspection import inspect
from shoal.errors import ArtifactError, printable
from tests.support.entries import DIR, END, HARD, PYTHON, item, lay_out, link, pack, pax, refused
from tests.support.hostile_archives import ARCHIVES, check_unpacking

FOLDERS = item("d", type=DIR), item("d/e", type=DIR)
# What each archive tries, the words of its refusal, and its entries. By its name, each link stays inside.
ATTACKS: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "chain of two": ("links to d/up/../canary, but d/up is a symbolic link", (
        item("d", type=DIR), link("d/up", ".."), link("out", "d/up/../canary"), item("out", b"evil"))),
    "chain of two, the second link first": ("d/up is a symbolic link|d/up.*was a folder", (
        item("d", type=DIR), link("out", "d/up/.."), link("d/up", ".."), item("out/canary", b"evil"))),
    "chain of three": ("d/e/up is a symbolic link", (
        *FOLDERS, link("d/e/up", "../.."), link("x", "d/e/up/../.."), link("y", "x/.."), item("y/canary", b"evil"))),
    "file through a link": ("l is a symbolic link", (item("d", type=DIR), link("l", "d"), item("l/f", b"evil"))),
    "folder through a link": ("l is a symbolic link", (item("d", type=DIR), link("l", "d"), item("l/f", type=DIR))),
    "folder implied through a link": ("l is a symbolic link", (link("l", "."), item("l/f/g", b"evil"))),
    "link through a link": ("l is a symbolic link", (link("l", "d"), link("l/m", "."))),
    "hard link through a link": ("hard link to l/f, which is not a file before", (
        *FOLDERS, item("d/f", b"x"), link("l", "d"), link("h", "l/f", HARD), item("h", b"evil"))),
    "hard link to a link": ("hard link to l, which is not a file before", (link("l", "f"), link("h", "l", HARD))),
    "hard link in a link": ("l is a symbolic link", (item("f"), link("l", "d"), link("l/h", "f", HARD))),
    "hard link to itself": ("not a file before", (item("f"), link("f", "./f", HARD))),
    "hard link to what became a link": ("not a file before", (item("f"), link("f", "g"), link("h", "f", HARD))),
    "link in place of a folder": ("symbolic link, and was a folder", (*FOLDERS, link("d", "."), item("d/f", b"evil"))),
    "link in place of a folder by name": ("and was a folder", (item("d/e/f"), link("d/e", "../.."))),
    "file in place of a folder": ("it is a file, and was a folder", (item("d/f"), item("d", b"x"))),
    "folder in place of a link": ("l is a symbolic link in the archive, not a folder", (
        link("l", "."), item("l", type=DIR), item("l/f", b"evil"))),
    "folder in place of a file": ("f is a file in the archive, not a folder", (item("f"), item("f/", type=DIR))),
    "below a file": ("f is a file in the archive, not a folder", (item("f"), item("f/g"))),
    "climbs out of a link, and back": ("d/up is a symbolic link", (
        *FOLDERS, link("d/up", "e"), link("x", "d/up/../e"))),
    "the top": ("its name is empty", (link("./", "d"),)),
    "null character in a name": ("a null character", (pax(path="a\0b") + item("x"),)),
    "null character in a link": ("a null character", (pax(linkpath="a\0b") + link("x", "y"),)),
    "long name": ("more than 1,024 characters", (pax(path="n/" * 600 + "n") + item("x"),)),
    "long part": ("or 255 bytes between slashes", (item("d/" + "é" * 128),)),
    "long part of a link": ("or 255 bytes between slashes", (link("x", "y" * 256),)),
    "link to nothing": ("it links to nothing", (link("x", ""),)),
    "time of nan": ("its time is nan", (pax(mtime="nan") + item("x"),)),
    "time of inf": ("its time is inf", (pax(mtime="inf") + item("x"),)),
    "late time": ("its time is 1.18059e", (item("x", mtime=2**70),)),
    "sparse": ("a sparse file", (pax(GNU_sparse_map="0,1", GNU_sparse_size="1") + item("x", b"x"),)),
    "sparse of old": ("a sparse file", (item("x", type=tarfile.GNUTYPE_SPARSE),)),
    "escape codes": (r"holds 'a\\n\\x1b\[2Jb/\.\./\.\.': its path", (item("a\n\x1b[2Jb"), item("a\n\x1b[2Jb/../.."),)),
    "escape codes in a link": (r"links to \.\./\\x1b\[2J, outside", (link("x", "../\x1b[2J"),)),
}  # fmt: skip
# What is damaged: tarfile alone would read on without end, take all memory, or raise an error of another kind.
DAMAGED: dict[str, bytes] = {
    "negative size": item("x", size=-512),
    "negative size by pax": pax(size="-512") + item("x"),
    "negative size of what is refused": pax(size="-512") + item("../x"),
    "large size of what is refused": pax(size="9" * 30) + item("../x"),
    "large size of a folder of an unknown kind": item("x", type=b"Z", size=2**60),
    "negative size of a header": item("x", type=b"x", size=-512),
    "large size of a header": item("x", type=b"x", size=2**40),
    "large size of a long name": item("x", type=tarfile.GNUTYPE_LONGNAME, size=2**40),
    "headers of headers": pax(path="x") * 3000 + item("x"),
    "size over all disks": item("x", size=2**87),
    "size over all disks by pax": pax(size="9" * 400) + item("x"),
    "sparse map of words": pax(GNU_sparse_map="a,b") + item("x"),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_no_entry_goes_through_a_link(case: str, tmp_path: Path) -> None:
    words, items = ATTACKS[case]
    yard = lay_out(tmp_path)
    archive = pack(yard / "env.tar.gz", PYTHON, *items)
    error = refused(archive, yard / "env")
    with pytest.raises(ArtifactError, match=words):
        raise error
    assert str(error).isprintable()
    assert printable(inspect(archive).escapes[0]) in error.what


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers(case: str, tmp_path: Path) -> None:
    yard = lay_out(tmp_path)
    archive = pack(yard / "env.tar.gz", PYTHON, DAMAGED[case])
    error = refused(archive, yard / "env")
    assert str(error).isprintable()
    with pytest.raises(ArtifactError, match="is damaged or cut off: "):
        raise error
    with pytest.raises(ArtifactError, match="is damaged or cut off: "):
        inspect(archive)


def test_links_that_stay_inside_are_unpacked(tmp_path: Path) -> None:
    """So are a link to itself and one without a target, which give an error to those who follow them."""
    links = {
        "self": "self",
        "d/e/up": "../../d",
        "x": "d/e/../f",
        "chain": "d/e/up/f",
        "late": "z/../d",
        "no": "nothing",
    }
    archive = pack(
        tmp_path / "env.tar.gz", PYTHON, *FOLDERS, item("d/f", b"x"), *(link(*each) for each in links.items())
    )
    target = unpack(archive, tmp_path / "env")
    assert {name: str((target / name).readlink()) for name in links} == links
    assert (target / "x").read_bytes() == (target / "chain").read_bytes() == b"x"
    assert inspect(archive).escapes == []


def test_a_folder_is_not_made_through_a_link_that_only_the_disk_sees(tmp_path: Path) -> None:
    """Simulate a disk that ignores case: names differ for the reader, but not on the disk."""
    (tmp_path / "l").symlink_to(tmp_path / "beside")
    (tmp_path / "beside").mkdir()
    with pytest.raises(NotADirectoryError, match="l is not a folder"):
        reader._make_folder(tmp_path / "l" / "f", {tmp_path})
    assert list((tmp_path / "beside").iterdir()) == []


def test_the_number_of_entries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders count that only names show."""
    monkeypatch.setattr(reader, "_MOST_ENTRIES", 100)
    for items in ([item(f"f{n}") for n in range(101)], [item("same")] * 101, [item("d/" * 99 + "f"), item("f")]):
        archive = tmp_path / "env.tar.gz"
        archive.write_bytes(gzip.compress(b"".join(items) + END))
        with pytest.raises(ArtifactError, match=r"more than 100 entries\. If you trust it, unpack it with tar -xzf"):
            unpack(archive, tmp_path / "env")
        archive.write_bytes(gzip.compress(b"".join(items[:-1]) + END))
        assert list(read_archive(archive))


def test_archives_of_a_stranger() -> None:
    outcomes = Counter[str]()

    @settings(max_examples=150)
    @given(ARCHIVES)
    def check(items: list[bytes]) -> None:
        with TemporaryDirectory() as folder:
            outcomes[check_unpacking(Path(folder), items)] += 1

    check()
    assert min(outcomes[""], outcomes["ArtifactError"]) > 3, outcomes
