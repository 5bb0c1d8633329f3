"""Does an environment fit a stub and a server? Every way it may not is named, with a way out."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import struct
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.component.bundle import sha256
from shoal.environment.contents import ARCHIVE, CONDA, VENV, Environment, Need
from shoal.environment.elf import parse_version, read_binary, show_version, soname_python
from shoal.environment.fit import check_fit, find_misfits
from shoal.environment.inspect import inspect
from shoal.environment.stub import RECORD, STUB, Stub, read_stub
from shoal.environment.targets import Target, find_target, parse_release
from shoal.environment.wheel import find_installed
from shoal.errors import ArtifactError, InputError
from tests.environments import RUNNING
from tests.test_inspect import LIBRARY, lay

STUBS = (find_installed() or Path()) / "python_backend_stubs"
VERSIONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

GOOD = Environment(
    source=Path("/env"),
    kind=ARCHIVE,
    python="3.12.1",
    numpy="2.1.0",
    machine="x86_64",
    glibc=Need((2, 17), "lib/a.so"),
    glibcxx=Need((3, 4, 29), "lib/b.so"),
    own_libraries={"libpython3.12.so.1.0"},
    has_interpreter=True,
    has_activate=True,
)
COMPILED = Stub(
    path=Path("/stub"),
    python="3.12",
    machine="x86_64",
    glibc=(2, 34),
    glibcxx=(3, 4, 30),
    libraries=("libpython3.12.so.1.0", "libc.so.6"),
    bears_numpy_2=True,
    digest="",
    release="26.06",
)
SERVER = find_target("26.06")
OLD = replace(COMPILED, bears_numpy_2=False)
OF_WHEEL = replace(COMPILED, libraries=("libcudart-09529672.so.12", "libpython3.12.so.1.0"), release="24.10")
NUMPY_1, PYTHON_311 = replace(GOOD, numpy="1.26.4"), replace(GOOD, python="3.11.9")
ARM = replace(GOOD, machine="aarch64")

# What does not fit: what is said of it, the environment, the stub, the server.
WRONG: dict[str, tuple[str, Environment, Stub | None, Target]] = {
    "python of the stub": ("and the stub for Python 3.11", GOOD, replace(COMPILED, python="3.11"), SERVER),
    "python of the environment": ("for Python 3.11 and the stub for Python 3.12", PYTHON_311, COMPILED, SERVER),
    "python of the server": ("the stub of 26.06 for Python 3.12", PYTHON_311, None, SERVER),
    "python of an old server": ("the stub of 24.10 for Python 3.10", NUMPY_1, None, find_target("24.10")),
    "a digit more": ("for Python 3.1 and", replace(GOOD, python="3.1"), COMPILED, SERVER),
    "numpy 2, old stub": ("NumPy 2.1.0, and this stub silently corrupts", GOOD, OLD, SERVER),
    "numpy 2, early": ("NumPy 2.0.0rc1, and this stub", replace(GOOD, numpy="2.0.0rc1"), OLD, SERVER),
    "numpy 10": ("NumPy 10.0, and this stub", replace(GOOD, numpy="10.0"), OLD, SERVER),
    "numpy 2, old server": ("and the stub of 24.10 silently", GOOD, None, find_target("24.10")),
    "numpy 2, embedded": ("and the stub of embedded silently", GOOD, None, find_target("embedded")),
    "no numpy": ("no NumPy", replace(GOOD, numpy=""), COMPILED, SERVER),
    "no activate": ("no bin/activate", replace(GOOD, has_activate=False), None, SERVER),
    "no interpreter": ("no bin/python3", replace(GOOD, has_interpreter=False), None, SERVER),
    "no libpython": ("no libpython3.12.so.1.0", replace(GOOD, own_libraries=set()), COMPILED, SERVER),
    "another libpython": ("no libpython3.12", replace(GOOD, own_libraries={"libpython3.11.so.1.0"}), COMPILED, SERVER),
    "the wheel's stub": ("of the wheel nvidia-pytriton", NUMPY_1, OF_WHEEL, find_target("24.10")),
    "older release": ("of release 26.05, the server of 26.06", GOOD, replace(COMPILED, release="26.05"), SERVER),
    "newer release": ("release 26.06, the server of 25.01", GOOD, COMPILED, find_target("25.01")),
    "glibc of a library": ("lib/a.so needs glibc 2.40", replace(GOOD, glibc=Need((2, 40), "lib/a.so")), None, SERVER),
    "glibc of the stub": ("the stub needs glibc 2.40; Ubuntu 24.04", GOOD, replace(COMPILED, glibc=(2, 40)), SERVER),
    "libstdc++ of its own": ("its own libstdc++ gives 3.4.28", replace(GOOD, own_glibcxx=(3, 4, 28)), None, SERVER),
    "libstdc++, for the stub": ("stub needs GLIBCXX_3.4.30", replace(GOOD, own_glibcxx=(3, 4, 29)), COMPILED, SERVER),
    "libstdc++ of the server": (
        "lib/b.so needs GLIBCXX_3.4.34; Ubuntu 24.04 gives 3.4.33",
        replace(GOOD, glibcxx=Need((3, 4, 34), "lib/b.so")), None, SERVER,
    ),
    "machine of the environment": ("environment aarch64, stub x86_64, server x86_64", ARM, COMPILED, SERVER),
    "machine of the stub": ("stub aarch64", GOOD, replace(COMPILED, machine="aarch64"), SERVER),
    "machine of both": ("environment aarch64, stub none, server x86_64", ARM, None, SERVER),
    "folder too early": (
        "23.06 takes no folder",
        replace(NUMPY_1, kind=CONDA, python="3.10"), None, find_target("23.06"),
    ),
    "venv": ("It is a venv", replace(GOOD, kind=VENV), None, SERVER),
    "editable": ("In it, mine is editable.", replace(GOOD, editable=["mine is editable"]), None, SERVER),
    "leak": ("Its x.pth lets in.", replace(GOOD, leaks=["x.pth lets in"]), None, SERVER),
    "escape": ("It holds '../x': climbs.", replace(GOOD, escapes=["'../x': climbs"]), None, SERVER),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case: str) -> None:
    words, environment, stub, target = WRONG[case]
    misfits = find_misfits(environment, stub, target)
    assert [words in misfit.what for misfit in misfits].count(True) == 1
    assert all(misfit.what.endswith(".") and misfit.fix for misfit in misfits)
    with pytest.raises(ArtifactError, match=f"^env.zip does not fit target {target.name}: ") as caught:
        check_fit(environment, stub, target, "env.zip")
    assert misfits[0].what in caught.value.what
    assert ("more: shoal env fit lists them" in caught.value.what) == (len(misfits) > 1)


def test_what_fits() -> None:
    embedded = replace(find_target("embedded"), glibc=(2, 36), glibcxx=(3, 4, 30))
    wheel = replace(OF_WHEEL, bears_numpy_2=False)
    brings = replace(wheel, libraries=("libcudart-09529672.so.12", "libpython3-419a3a08.12.so.1.0"))
    pairs = [
        (GOOD, COMPILED, SERVER),
        (GOOD, None, SERVER),
        (GOOD, None, find_target("24.11")),
        (replace(GOOD, kind=CONDA), None, SERVER),
        (replace(GOOD, machine=""), COMPILED, SERVER),
        (replace(GOOD, own_libraries=set()), None, SERVER),
        (replace(GOOD, glibc=Need((2, 39), "x"), glibcxx=Need((3, 4, 33), "x")), COMPILED, SERVER),
        (replace(GOOD, glibcxx=Need((3, 4, 34), "x"), own_glibcxx=(3, 4, 34)), COMPILED, SERVER),
        (replace(NUMPY_1, python="3.10"), None, find_target("24.10")),
        (replace(NUMPY_1, python="3.10", kind=CONDA), None, find_target("23.07")),
        (PYTHON_311, replace(COMPILED, python="3.11", libraries=("libpython3-ab.11.so.1.0",)), SERVER),
        (NUMPY_1, wheel, embedded),
        (replace(NUMPY_1, kind=VENV, own_libraries=set()), brings, embedded),
        (GOOD, replace(COMPILED, release=""), find_target("25.01")),
        (replace(GOOD, unmet=["a needs b"], prefixes=["x links to /y"]), COMPILED, SERVER),
    ]
    for environment, stub, target in pairs:
        assert find_misfits(environment, stub, target) == []
        check_fit(environment, stub, target)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_stub_of_the_wheel(version: str) -> None:
    stub = read_stub(STUBS / version / STUB)
    assert (stub.python, stub.machine, stub.release, stub.bears_numpy_2) == (version, "x86_64", "24.10", False)
    assert stub.is_of_wheel
    assert stub.digest == sha256(stub.path)
    assert (stub.glibc, stub.glibcxx) >= ((2, 17), (3, 4))
    environment = replace(NUMPY_1, python=version, own_libraries={f"libpython{version}.so.1.0"})
    embedded = replace(find_target("embedded"), glibc=stub.glibc, glibcxx=stub.glibcxx)
    assert find_misfits(environment, stub, embedded) == []
    (corrupt,) = find_misfits(replace(environment, numpy="2.0.0"), stub, embedded)
    assert "this stub silently corrupts tensors" in corrupt.what
    assert f"--python {version} --stub compile" in corrupt.fix
    assert any("of the wheel" in misfit.what for misfit in find_misfits(environment, stub, find_target("24.10")))


def test_the_record_beside_a_stub_tells_its_release(tmp_path: Path) -> None:
    """But only of the file that it was written for."""
    stub = tmp_path / STUB
    shutil.copyfile(STUBS / "3.11" / STUB, stub)
    stub.write_bytes(stub.read_bytes().replace(b"libcudart-", b"libcudart_"))  # no longer told by its libraries
    assert read_stub(stub).release == ""
    record = {"files": {STUB: sha256(stub)}, "stub": {"release": "25.03"}}
    for text, release in (
        (json.dumps(record), "25.03"),
        (json.dumps({**record, "files": {STUB: "0" * 64}}), ""),
        (json.dumps({**record, "stub": None}), ""),
        (json.dumps({**record, "stub": {"release": None}}), ""),
        ("[]", ""),
        ("{", ""),
    ):
        (tmp_path / RECORD).write_text(text, encoding="utf-8")
        assert read_stub(stub).release == release
    (tmp_path / RECORD).write_text(json.dumps(record), encoding="utf-8")
    misfits = find_misfits(PYTHON_311, read_stub(stub), SERVER)
    assert any("The stub is of release 25.03, the server of 26.06" in misfit.what for misfit in misfits)


def test_what_is_no_stub_is_named(tmp_path: Path) -> None:
    whole = (STUBS / "3.11" / STUB).read_bytes()
    libpython = Path(str(sysconfig.get_config_var("LIBDIR"))) / str(sysconfig.get_config_var("INSTSONAME"))
    wrong = [(tmp_path, "cannot be read: Is a directory"), (tmp_path / "nope", "cannot be read: No such file")]
    wrong += [(path, "no Python backend stub, though an ELF file") for path in (LIBRARY, libpython) if path.is_file()]
    for name, content in {
        "text": b"#!/bin/sh\n",
        "empty": b"",
        "magic": b"\x7fELF",
        **{f"cut{at}": whole[:at] for at in (10, 63, 64, 1000, 10**5, len(whole) // 2, len(whole) - 9)},
    }.items():
        (tmp_path / name).write_bytes(content)
        wrong.append((tmp_path / name, "is not a whole ELF file"))
    for path, words in wrong:
        with pytest.raises(ArtifactError, match=words) as caught:
            read_stub(path)
        assert str(path) in caught.value.what
        assert caught.value.fix


def test_truncated_binaries_are_passed_over(tmp_path: Path) -> None:
    whole = LIBRARY.read_bytes()
    for at in (4, 5, 20, 63, 64, 100, 1000, len(whole) // 2, len(whole) - 64, len(whole) - 1):
        found = inspect(lay(tmp_path / str(at), {"lib/x.so": whole[:at]}))
        assert (found.machine, found.glibc, found.own_libraries) == ("", Need(), {"x.so"})


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        pytest.fail(f"took longer than {seconds} s")  # no Exception: the reader passes over all of those

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_binaries_that_would_be_read_for_ever(tmp_path: Path) -> None:
    """Counts as large as a field holds, of parts that all lie at one place."""
    whole = bytearray((STUBS / "3.11" / STUB).read_bytes())
    (table,) = struct.unpack_from("<Q", whole, 40)
    (count,) = struct.unpack_from("<H", whole, 60)
    headers = range(table, table + 64 * count, 64)
    needs = next(at for at in headers if struct.unpack_from("<I", whole, at + 4) == (0x6FFFFFFE,))
    (first,) = struct.unpack_from("<Q", whole, needs + 24)
    versions, sections = bytearray(whole), bytearray(whole)
    versions[needs + 44 : needs + 48] = b"\xff" * 4  # sh_info: how many
    versions[first + 12 : first + 16] = bytes(4)  # vn_next: the next one is this one
    sections[58:62] = bytes(4)  # e_shentsize and e_shnum: the number stands in the first header
    sections[table + 32 : table + 38] = b"\xff" * 6
    for name, content in (("versions", versions), ("sections", sections)):
        environment = lay(tmp_path / name, {"lib/x.so": bytes(content)})
        with at_most(seconds=2):
            assert inspect(environment).own_libraries == {"x.so"}, name


@pytest.mark.parametrize(
    "name", ["26.6", "22.12", "23.00", "26.13", "26.06 ", "26.06\n", "v26.06", "٢٦.٠٦", "latest", ""]
)
def test_there_is_no_such_release(name: str) -> None:
    for find in (parse_release, find_target):
        with pytest.raises(InputError, match=re.escape(f"There is no target {name!r}. Known: embedded")):
            find(name)


def test_servers_by_their_release() -> None:
    for name, system, python, glibc, glibcxx, bears_numpy_2 in (
        ("23.01", "Ubuntu 20.04", "3.8", (2, 31), (3, 4, 28), False),
        ("23.04", "Ubuntu 20.04", "3.8", (2, 31), (3, 4, 28), False),
        ("24.10", "Ubuntu 22.04", "3.10", (2, 35), (3, 4, 30), False),
        ("24.11", "Ubuntu 24.04", "3.12", (2, 39), (3, 4, 33), True),
        ("26.06", "Ubuntu 24.04", "3.12", (2, 39), (3, 4, 33), True),
        ("27.03", "Ubuntu 24.04", "3.12", (2, 39), (3, 4, 33), True),  # not made yet: taken to be like the last one
    ):
        release = (int(name[:2]), int(name[3:]))
        target = find_target(name)
        assert target == Target(name, release, system, "x86_64", python, glibc, glibcxx)
        assert (target.bears_numpy_2, target.is_embedded, parse_release(name)) == (bears_numpy_2, False, release)
    embedded = find_target("embedded")
    assert (embedded.release, embedded.python, embedded.is_embedded) == ((24, 10), RUNNING, True)
    assert not embedded.bears_numpy_2


def test_versions_and_names_of_libraries() -> None:
    assert [parse_version(text) for text in ("3.4.30", "2.0.0rc1", "", "x")] == [(3, 4, 30), (2, 0, 0), (), ()]
    assert show_version((2, 34)) == "2.34"
    assert soname_python(("libc.so.6", "libpython3-419a3a08.13.so.1.0")) == "3.13"
    assert soname_python(("libpython3.8.so.1.0",)) == "3.8"
    assert soname_python(("libc.so.6", "libpython3.so")) == ""
    with pytest.raises(ArtifactError, match=r"^text is not a whole ELF file"):
        read_binary(io.BytesIO(b"text"), "text")
