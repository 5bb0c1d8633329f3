"""Contents of environments, read from folders and archives; and archives that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.authoring.environment.archive import read_archive, read_folder
from shoal.authoring.environment.embedded import find_installed
from shoal.authoring.environment.fit import find_misfits
from shoal.authoring.environment.inspection import Environment, Need, Package, inspect
from shoal.authoring.environment.stub import read_binary
from shoal.authoring.environment.targets import find_target
from shoal.errors import ArtifactError
from tests.support.entries import END, PYTHON, item, lay_out, link, pack, pax, refused

SITE = "lib/python3.11/site-packages"
LIBRARY = min(Path(np.__file__).parent.rglob("*.so"), key=lambda path: path.stat().st_size)
PYTHON_RECORD = "conda-meta/python-3.11.9-h.json"
STDCXX = Path("/usr/lib/x86_64-linux-gnu/libstdc++.so.6")
NOISE = random.Random(0).randbytes(3000)  # that gzip cannot make smaller


def zipped() -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("bin/python3.11", "")
    return file.getvalue()


def cut(num_bytes: int) -> bytes:
    return gzip.compress((PYTHON + item("f", NOISE) + END)[:num_bytes])


# What is not a whole archive: what the error says, and the bytes.
DAMAGED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("not a gzip file", lambda: b""),
    "text": ("not a gzip file", lambda: b"bin/python3.11\n"),
    "plain tar": ("not a gzip file", lambda: PYTHON + END),
    "zip": ("a zip file", zipped),
    "xz": ("a xz file", lambda: lzma.compress(PYTHON + END)),
    "bzip2": ("a bzip2 file", lambda: bz2.compress(PYTHON + END)),
    "zstandard": ("a zstandard file", lambda: b"\x28\xb5\x2f\xfd" + NOISE),
    "git lfs": ("a Git LFS pointer", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
    "gzip of nothing": ("damaged or cut off", lambda: gzip.compress(b"")),
    "junk behind": ("damaged or cut off", lambda: cut(9999) + b"junk"),
    "tar without its end": ("damaged or cut off", lambda: cut(-1024)),
    "tar cut in its end": ("damaged or cut off", lambda: cut(-924)),
    "tar cut in a file": ("damaged or cut off", lambda: cut(3000)),
    "tar cut in a header": ("damaged or cut off", lambda: cut(1024 + 100)),
    "tar cut behind a header": ("damaged or cut off", lambda: cut(1024 + 512)),
    "tar cut behind a pax header": ("damaged or cut off", lambda: gzip.compress(PYTHON + pax(path="x"))),
    "bad checksum": ("damaged or cut off", lambda: gzip.compress(PYTHON + b"x" + item("f")[1:] + END)),
    "size over the end": ("damaged or cut off", lambda: gzip.compress(item("f", size=10 * 2**30) + END)),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_archives_and_other_formats_are_refused(case: str, tmp_path: Path) -> None:
    words, make = DAMAGED[case]
    yard = lay_out(tmp_path)
    archive = yard / "env.tar.gz"
    archive.write_bytes(make())
    assert words in refused(archive, yard / "env").what
    with pytest.raises(ArtifactError, match=words):
        inspect(archive)


def test_no_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    yard = lay_out(tmp_path)
    assert "cannot be read: No such file" in refused(yard / "nope.tar.gz", yard / "env").what
    assert "cannot be read: Is a directory" in refused(yard / "beside", yard / "env").what
    with pytest.raises(ArtifactError, match="There is no environment at"):
        next(read_folder(yard / "nope"))


def test_whatever_is_cut_off_or_flipped_is_refused(tmp_path: Path) -> None:
    yard, whole = lay_out(tmp_path), cut(9999)
    archive = yard / "env.tar.gz"
    for at in (1, 2, 5, 9, 10, 11, 50, 1500, len(whole) // 2, *range(len(whole) - 12, len(whole))):
        archive.write_bytes(whole[:at])
        refused(archive, yard / "env")
    for at in (*range(10, len(whole) - 9, 97), *range(len(whole) - 8, len(whole))):  # not what the last bits pad
        archive.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        refused(archive, yard / "env")


def test_records_of_entries_are_not_kept(tmp_path: Path) -> None:
    """Only the names of files are; tarfile alone would take 1 KB per entry."""
    archive = pack(tmp_path / "env.tar.gz", b"".join(item(f"f{n}") for n in range(4000)))
    tracemalloc.start()
    assert sum(1 for _ in read_archive(archive)) == 4000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**21


def metadata(name: str, version: str = "1.0", *requires: str) -> bytes:
    return "\n".join([f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]).encode()


def lay(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    """Lay out an environment: file names with their contents, links with their targets."""
    for name, content in {"bin/python3.11": b"#!", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)
    return folder


def pack_folder(folder: Path) -> Path:
    """In no order to rely on, as conda-pack does."""
    paths = sorted(folder.rglob("*"))
    random.Random(1).shuffle(paths)
    with tarfile.open(folder.with_suffix(".tar.gz"), "w:gz") as archive:
        for path in paths:
            archive.add(path, path.relative_to(folder), recursive=False)
    return folder.with_suffix(".tar.gz")


def test_an_environment_is_read_the_same_from_a_folder_and_an_archive(tmp_path: Path) -> None:
    installed = find_installed()
    assert installed
    library, needy = (
        LIBRARY.read_bytes(),
        (installed / "python_backend_stubs/3.11/triton_python_backend_stub").read_bytes(),
    )
    conda = {"name": "numpy", "version": "1.26.4", "files": ["lib/x.so"]}, {"name": "python", "version": "3.11.9"}
    folder = lay(
        tmp_path / "env",
        {
            "bin/python3.11": Path(sys.executable).resolve().read_bytes(),
            "bin/python3": "python3.11",
            "bin/activate": b"",
            "lib/libpython3.11.so.1.0": b"",
            "lib/libpython3.11.so": "libpython3.11.so.1.0",
            "lib/x.so": library,
            "lib/deep/needy": needy,
            "lib/deep/needy-too": needy,
            "conda-meta/numpy-1.26.4-py311.json": json.dumps(conda[0]).encode(),
            "conda-meta/python-3.11.9-h1.json": json.dumps(conda[1]).encode(),
            f"{SITE}/numpy/x.so": library,
            f"{SITE}/numpy-1.26.4.dist-info/METADATA": metadata("NumPy", "1.26.4"),
            f"{SITE}/numpy-1.26.4.dist-info/RECORD": b'numpy/x.so,sha256=x,1\n"numpy/y.py",,\n',
            f"{SITE}/numpy/y.py": b"y = 1\n",
            f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1", "b", "numpy"),
            f"{SITE}/a.pth": b"/home/u/.local/lib\n/opt/c\n",
            f"{SITE}/b.pth": b"/opt/b\n",
            f"{SITE}/__editable__.d-1.pth": b"/src/d\n",
            **({"lib/libstdc++.so.6": STDCXX.read_bytes()} if STDCXX.is_file() else {}),
        },
    )
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    with (folder / "lib/deep/needy").open("rb") as file:
        stub = read_binary(file, "")
    found = inspect(folder)
    assert found == Environment(
        source=folder,
        kind="folder",
        python="3.11.9",
        numpy="1.26.4",
        machine=stub.machine,
        glibc=found.glibc,
        glibcxx=Need(stub.requires["GLIBCXX"], "lib/deep/needy-too"),
        own_glibcxx=find_target("embedded").glibcxx if STDCXX.is_file() else (),
        own_libraries={path.name for path in (folder / "lib").glob("*.so*")},
        has_interpreter=True,
        has_activate=True,
        packages=[Package("a", "1", 0), Package("NumPy", "1.26.4", len(library) + 6), Package("python", "3.11.9", 0)],
        num_entries=len(list(folder.rglob("*"))),
        num_bytes=sum(path.stat().st_size for path in files),
        leaks=[
            f"{SITE}/__editable__.d-1.pth lets packages outside in: /src/d",
            f"{SITE}/a.pth lets a user's own packages in: /home/u/.local/lib",
            f"{SITE}/a.pth lets packages outside in: /opt/c",
            f"{SITE}/b.pth lets packages outside in: /opt/b",
        ],
        modules=found.modules,
        is_open=True,
    )
    assert found.glibc.version >= stub.requires["GLIBC"]
    assert (found.python_minor, found.has_libpython) == ("3.11", True)
    assert found.remarks() == [*found.editable, *found.leaks]
    assert json.loads(json.dumps(found.as_dict()))["glibcxx_needed_by"] == "lib/deep/needy-too"
    archive = pack_folder(folder)
    assert replace(inspect(archive), source=folder, kind="folder") == found
    assert inspect(archive).kind == "archive"


PACKAGE = f"{SITE}/mine-1.dist-info"
EDITABLE = b'{"url": "file:///src/mine", "dir_info": {"editable": true}}'
ODD: dict[str, tuple[dict[str, bytes | str], list[str]]] = {
    "editable": ({f"{PACKAGE}/direct_url.json": EDITABLE}, ["mine is an editable install of file:///src/mine"]),
    "editable, listed twice": (
        {f"{PACKAGE}/direct_url.json": EDITABLE, f"{SITE}/__editable__.mine-1.pth": b"/src/mine"},
        [
            "mine is an editable install of file:///src/mine",
            f"{SITE}/__editable__.mine-1.pth lets packages outside in: /src/mine",
        ],
    ),
    "a folder, installed": ({f"{PACKAGE}/direct_url.json": b'{"url": "file:///src", "dir_info": {}}'}, []),
    "a link to itself": ({f"{SITE}/x.pth": b"@/lib/more\nimport x\nrelative\n#/comment\n\n"}, []),
    "a link beside": ({f"{SITE}/x.pth": b"@-other/lib"}, [f"{SITE}/x.pth lets packages outside in: @-other/lib"]),
    "a link that climbs": (
        {f"{SITE}/x.pth": b"../../../../other"},
        [f"{SITE}/x.pth lets packages outside in: ../../../../other"],
    ),
    "weights of a network": ({f"{SITE}/net/x.pth": b"\x80\n/junk", "share/y.pth": b"/junk"}, []),
    "system packages": (
        {"pyvenv.cfg": b"home = /usr/bin\ninclude-system-site-packages = TRUE\nversion_info = 3.11.2\n"},
        ["pyvenv.cfg lets the base Python's packages in", "pyvenv.cfg names /usr/bin, where its Python is"],
    ),
    "template of a venv": ({f"{SITE}/x/pyvenv.cfg": b"home = /x\ninclude-system-site-packages = true\n"}, []),
    "absolute link": ({"bin/python3": "/usr/bin/python3"}, ["bin/python3 links to /usr/bin/python3"]),
    "nested JSON": ({f"{PACKAGE}/direct_url.json": b"[" * 10**5, "conda-meta/x.json": b"[" * 10**5}, []),
    "no JSON": ({f"{PACKAGE}/direct_url.json": b"\xff", "conda-meta/x.json": b"", "conda-meta/y.json": b"[]"}, []),
    "JSON of another form": ({f"{PACKAGE}/direct_url.json": b'{"dir_info": "x"}'}, []),
    "JSON without files": ({"conda-meta/x.json": b'{"name": "x", "files": 5}'}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_oddities_are_reported_in_one_sentence(case: str, tmp_path: Path) -> None:
    files, sentences = ODD[case]
    at = str(tmp_path / "env")
    files = {n: c.replace(b"@", at.encode()) if isinstance(c, bytes) else c for n, c in files.items()}
    found = inspect(lay(tmp_path / "env", files))
    assert found.remarks() == [sentence.replace("@", at) for sentence in sentences]
    assert found.kind == ("venv" if "pyvenv.cfg" in files else "folder")
    assert found.python == ("3.11.2" if "pyvenv.cfg" in files else "3.11")


def test_hard_links_and_what_holds_no_python(tmp_path: Path) -> None:
    archive = pack(tmp_path / "env.tar.gz", PYTHON, link("bin/python3", "bin/python3.11", tarfile.LNKTYPE))
    assert inspect(archive).remarks() == ["1 entries are hard links"]
    assert inspect(archive).has_interpreter
    with pytest.raises(ArtifactError, match="beside holds no Python environment"):
        inspect(lay_out(tmp_path) / "beside")
    assert inspect(lay(tmp_path / "env", {f"{SITE}/x-1.dist-info/METADATA": b"nothing"})).packages == []


@pytest.mark.parametrize(
    ("file", "content", "machine"),
    [
        ("bin/python3.11", b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\xb7\0\1\0\0\0" + bytes(44), "aarch64"),
        (PYTHON_RECORD, b'{"name": "python", "subdir": "osx-arm64"}', "osx-arm64"),
        (PYTHON_RECORD, b'{"name": "python", "subdir": "win-64"}', "win-64"),
        (PYTHON_RECORD, b'{"name": "python", "subdir": "linux-ppc64le"}', "ppc64le"),
        (PYTHON_RECORD, b'{"name": "python", "subdir": "linux-64"}', "x86_64"),
        (f"{SITE}/numpy/core/_umath.cpython-311-darwin.so", b"\xcf\xfa\xed\xfe", "darwin"),
        (f"{SITE}/numpy/core/_umath.cpython-311-aarch64-linux-gnu.so", b"", "aarch64"),
        (f"{SITE}/numpy/core/_umath.cpython-311-x86_64-linux-gnu.so", b"", "x86_64"),
    ],
)
def test_the_machine_that_an_environment_is_for(file: str, content: bytes, machine: str, tmp_path: Path) -> None:
    folder = lay(tmp_path / "env", {"lib/python3.11/os.py": b"", file: content})
    environment = inspect(pack_folder(folder))
    assert environment.machine == machine
    said = [misfit.what for misfit in find_misfits(environment, None, find_target("26.06"))]
    other = f"Their machine types differ: environment {machine}, stub none, server x86_64."
    assert (other in said) == (machine != "x86_64")
