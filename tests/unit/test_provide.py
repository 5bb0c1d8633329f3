"""Choice of the stub for an environment, and its source."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from shoal.authoring.environment.embedded import find_installed
from shoal.authoring.environment.inspection import CONDA, Environment
from shoal.authoring.environment.spec import BuildRequest
from shoal.authoring.environment.stub import read_stub
from shoal.authoring.environment.stub_source import check_choice, choose, provide_stub, take_stub
from shoal.authoring.environment.targets import find_target
from shoal.errors import ArtifactError, InputError, SetupError
from tests.support.environments import find_stub

pytestmark = pytest.mark.usefixtures("may_start_processes")  # a program in place of a compiler


def provide(
    stub: Path,
    choice: str = "auto",
    python: str = "3.12",
    numpy: str = "1.26.4",
    target: str = "embedded",
    builder: Path | None = None,
) -> str:
    """Return how the stub was made; the log is beside the stub."""
    environment = Environment(stub.with_name("env"), CONDA, python=python, numpy=numpy)
    request = BuildRequest(Path("environment.yml"), stub.parent, target=target, stub=choice, builder=builder)
    return provide_stub(request, environment, find_target(target), stub, stub.with_name("log"))


def program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", "set -e", *lines]) + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("target", "python", "has_numpy_2", "choice"),
    [
        ("embedded", "3.11", False, "wheel"),
        ("embedded", "3.12", False, "wheel"),
        ("embedded", "3.12", True, "compile"),
        ("24.10", "3.10", False, "none"),
        ("24.10", "3.10", True, "compile"),
        ("24.10", "3.12", False, "compile"),
        ("24.11", "3.12", True, "none"),
        ("26.06", "3.12", False, "none"),
        ("26.06", "3.13", False, "compile"),
        ("23.04", "3.8", False, "none"),
    ],
)
def test_choice_of_auto(target: str, python: str, has_numpy_2: bool, choice: str) -> None:
    assert choose(find_target(target), python, has_numpy_2=has_numpy_2) == choice


@pytest.mark.parametrize("python", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_has_a_stub_for_each_python(tmp_path: Path, python: str) -> None:
    assert provide(tmp_path / "stub", python=f"{python}.1") == "wheel"
    stub = read_stub(tmp_path / "stub")
    assert (stub.python, stub.release, stub.supports_numpy_2) == (python, "24.10", False)
    assert os.access(tmp_path / "stub", os.X_OK)


def test_a_python_that_the_wheel_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"has no stub for Python 3\.14\. Use one of 3\.8, 3\.9, 3\.10, .*3\.13, or --stub"
    ):
        take_stub("3.14", tmp_path / "stub", log=tmp_path / "log")


def test_without_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.authoring.environment.stub_source.find_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SetupError, match=r"Downloading nvidia-pytriton failed: ERROR: Could not find a version"):
        take_stub("3.12", tmp_path / "stub", log=tmp_path / "log")


def test_the_wheel_is_downloaded_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = "nvidia_pytriton-0.7.0.dist-info"
    with zipfile.ZipFile(tmp_path / "nvidia_pytriton-0.7.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pytriton/tritonserver/python_backend_stubs/3.12/triton_python_backend_stub", b"a stub")
        wheel.writestr(f"{record}/METADATA", "Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n")
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")
    monkeypatch.setattr("shoal.authoring.environment.stub_source.find_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "out").mkdir()
    take_stub("3.12", tmp_path / "out" / "stub", log=tmp_path / "log")
    assert (tmp_path / "out" / "stub").read_bytes() == b"a stub"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stub"]
    with pytest.raises(SetupError, match=r"has no stub for Python 3\.13\. Use one of 3\.12, or"):
        take_stub("3.13", tmp_path / "out" / "other", log=tmp_path / "log")


def test_no_stub_is_needed(tmp_path: Path) -> None:
    assert provide(tmp_path / "stub", target="26.06") == ""
    assert not (tmp_path / "stub").exists()


def test_a_finished_stub_is_used_unchanged(tmp_path: Path) -> None:
    installed = find_installed()
    assert installed
    finished = next(installed.glob("python_backend_stubs/3.12/*"))
    assert provide(tmp_path / "stub", str(finished)) == "given"
    assert (tmp_path / "stub").read_bytes() == finished.read_bytes()
    with pytest.raises(InputError, match=r"Unknown stub 'latest'\. Known: auto, wheel, compile, none"):
        check_choice(BuildRequest(Path("environment.yml"), tmp_path, stub="latest"))
    with pytest.raises(ArtifactError, match="is not a whole ELF file"):
        check_choice(BuildRequest(Path("environment.yml"), tmp_path, stub=__file__))


# --- a stub that is compiled: by a program of the user's ----------------------------------------------------------

COMPILES = 'exported=$(export | grep SHOAL_STUB); echo "$exported"; cp "$FINISHED" "$SHOAL_STUB_OUT"'


def test_the_program_is_passed_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = find_installed()
    assert installed
    monkeypatch.setenv("FINISHED", str(next(installed.glob("python_backend_stubs/3.12/*"))))
    builder = program(tmp_path / "build.sh", COMPILES)
    assert provide(tmp_path / "stub", "compile", target="26.06", builder=builder) == "compile"
    log = (tmp_path / "log").read_text(encoding="utf-8")
    for line in (
        "SHOAL_STUB_BRANCH='r26.06'",
        "SHOAL_STUB_PYBIND11=''",
        "SHOAL_STUB_GPU='OFF'",
        f"{tmp_path}/env/bin/python3",
    ):
        assert line in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build.sh", "log", "stub"]


def test_the_built_stub_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = find_installed()
    assert installed
    monkeypatch.setenv("FINISHED", str(next(installed.glob("python_backend_stubs/3.12/*"))))
    builder = program(tmp_path / "build.sh", COMPILES)
    with pytest.raises(
        ArtifactError, match=r"corrupts tensors under NumPy 2: its pybind11 is too old\. Build it with pybind11 2\.12"
    ):
        provide(tmp_path / "a", numpy="2.5.5", builder=builder)
    builder = program(tmp_path / "build.sh", "true")
    with pytest.raises(ArtifactError, match=r"build\.sh wrote no stub"):
        provide(tmp_path / "b", numpy="2.5.5", builder=builder)
    builder = program(tmp_path / "build.sh", "echo 'x.cc:1: error: no Boost'", "false")
    with pytest.raises(SetupError, match=r"Compiling the stub by build\.sh failed: x\.cc:1: error: no Boost"):
        provide(tmp_path / "c", numpy="2.5.5", builder=builder)


def test_without_a_program_the_way_out_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^Python 3\.12 with NumPy 2\.5\.5 for target embedded needs a program that compiles a stub"
    ):
        provide(tmp_path / "stub", numpy="2.5.5")


def test_a_finished_stub_that_supports_numpy_2() -> None:
    stub = read_stub(Path(find_stub("3.12")))
    assert stub.supports_numpy_2
    assert stub.release == ""
    assert stub.python == "3.12"
