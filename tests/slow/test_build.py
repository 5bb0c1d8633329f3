"""Building environments: what is made, kept and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.environment.archive import unpack
from shoal.authoring.environment.building import Built, build, pack, read_built
from shoal.authoring.environment.inspection import inspect
from shoal.authoring.environment.spec import BuildRequest
from shoal.errors import ArtifactError, InputError, SetupError
from shoal.system.paths import alone
from tests.conftest import Scale
from tests.support.environments import NUMPY_1, NUMPY_2, RUNNING, WHEELS, Venvs, skip_without

SHOAL = [sys.executable, "-c", "from shoal.cli import main; main()", "env", "build"]


def small(channel: str, folder: Path, *names: str) -> Path:
    """An environment.yml of little: Python alone, and ``names``."""
    specs = [f"python ={RUNNING}", *names]
    lines = ["channels:", f"  - {channel}", "dependencies:", *(f"  - {spec}" for spec in specs)]
    path = folder / "environment.yml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def request(source: Path, folder: Path, **more: Any) -> BuildRequest:
    return replace(BuildRequest(source, folder / "env"), **more)


def test_a_packed_environment_runs_where_it_is_unpacked(packed: Built, tmp_path: Path) -> None:
    environment = inspect(packed.environment)
    assert environment.has_libpython
    assert environment.has_activate
    assert environment.remarks() == []
    folder = unpack(packed.environment, tmp_path / "env")
    assert inspect(folder).packages == environment.packages
    code = "import numpy, sys, tokenizers; print(sys.prefix, numpy.__version__, numpy.__file__)"
    answer = subprocess.run([folder / "bin" / "python3", "-c", code], capture_output=True, text=True, check=True)
    prefix, version, module = answer.stdout.split()
    assert (prefix, version) == (str(folder), packed.record["numpy"])
    assert module.startswith(str(folder))
    subprocess.run([folder / "bin" / "conda-unpack"], check=True)
    assert "/packed" not in next((folder / "lib").glob("python*/_sysconfigdata*.py")).read_text(encoding="utf-8")


def test_the_record_says_what_was_made(packed: Built, channel: str) -> None:
    record = json.loads((packed.environment.parent / "env.json").read_text(encoding="utf-8"))
    assert record["python"].startswith(RUNNING)
    assert record["target"] == "embedded"
    assert record["stub"] == {"made": "wheel", "release": "24.10", "supports_numpy_2": False}
    assert record["made"] == {"engine": "rattler", "from": "environment.yml", "channels": [channel, "nodefaults"]}
    assert set(record["files"]) == {"build.log", "custom_env.tar.gz", "triton_python_backend_stub"}
    assert record["packages"]["numpy"] == record["numpy"]
    assert f"{channel}/linux-64/numpy-" in (packed.environment.parent / "build.log").read_text(encoding="utf-8")


def test_a_second_run_does_nothing_and_damage_is_repaired(packed: Built, environment_yml: Path, tmp_path: Path) -> None:
    shutil.copytree(packed.environment.parent, tmp_path / "env")
    again = request(environment_yml, tmp_path)
    before = (tmp_path / "env").stat().st_ino
    assert not build(again).is_new
    assert (tmp_path / "env").stat().st_ino == before
    (tmp_path / "env" / "triton_python_backend_stub").write_bytes(b"")
    repaired = build(again)
    assert repaired.is_new
    assert repaired.stub
    assert repaired.stub.stat().st_size


def test_an_interruption_leaves_what_was_there(packed: Built, environment_yml: Path, tmp_path: Path) -> None:
    out = tmp_path / "env"
    shutil.copytree(packed.environment.parent, out)
    (out / "triton_python_backend_stub").write_bytes(b"")  # so that there is something to do
    before = listing(tmp_path)
    for kind, left in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        process = subprocess.Popen([*SHOAL, environment_yml, "--out", out], stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while (
            process.poll() is None
            and time.monotonic() < deadline
            and not list(tmp_path.glob(".env.making-*/environment/bin/python3"))
        ):
            time.sleep(0.01)
        process.send_signal(kind)
        _, printed = process.communicate(timeout=30)
        assert process.returncode != 0, printed
        aside = list(tmp_path.glob(".env.making-*"))
        assert bool(aside) == left
        assert {k: v for k, v in listing(tmp_path).items() if not k.startswith((".env.", "env.build.log"))} == before
    build(request(environment_yml, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env"]


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_disk(tmp_path: Path) -> object:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here: that takes root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # a failed test may hold a file open


@pytest.mark.parametrize(
    ("stage", "free"), [("environment", 0), ("environment", 2**24), ("stub", 0), ("pack", 2**20), ("verify", 0)]
)
def test_a_full_disk_leaves_what_was_there(
    packed: Built, environment_yml: Path, small_disk: Path, stage: str, free: int, scale: Scale
) -> None:
    """Filled as a stage begins: not a byte left, or some of what it needs."""
    if free == 2**24 and not scale.is_full:
        pytest.skip("in make verify")
    out = small_disk / "env"
    shutil.copytree(packed.environment.parent, out)
    (out / "triton_python_backend_stub").write_bytes(b"")
    before = listing(small_disk)

    def fill(name: str, done: int, _: int) -> None:
        if (name, done) == (stage, 0):
            with (small_disk / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(small_disk).free - free))

    with pytest.raises(SetupError, match="No space left on device"):
        build(request(environment_yml, small_disk), fill)
    (small_disk / "filler").unlink()
    (small_disk / "env.build.log").unlink(missing_ok=True)
    assert listing(small_disk) == before
    assert sorted(path.name for path in small_disk.iterdir()) == ["env"]
    old = read_built(out)
    assert old
    assert inspect(old.environment).numpy


def test_files_not_made_by_shoal_are_not_replaced(environment_yml: Path, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "thesis.tex").touch()
    with pytest.raises(InputError, match="exists and shoal did not make it"):
        build(request(environment_yml, tmp_path))
    with pytest.raises(InputError, match=r"Triton does not support the path"):
        build(BuildRequest(environment_yml, tmp_path / "my env"))
    with pytest.raises(InputError, match=r"Unknown engine 'magic'\. Known: rattler, conda"):
        build(BuildRequest(environment_yml, tmp_path / "other", engine="magic"))
    with pytest.raises(InputError, match=r"26\.06 runs in a container without it\. Use --engine rattler"):
        build(BuildRequest(NUMPY_1, tmp_path / "other", engine="venv", target="26.06"))
    with alone(tmp_path / "other", "build"), pytest.raises(SetupError, match="Another build is running"):
        build(BuildRequest(environment_yml, tmp_path / "other"))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (("nosuch",), "Installing by rattler failed: error: .*No candidates were found for nosuch"),
        (("numpy >=9",), "Installing by rattler failed: error: .*numpy >=9"),
        (("numpy = = 1",), "'numpy = = 1' is not a package specification"),
    ],
)
def test_unsolvable_requirements_are_reported(channel: str, tmp_path: Path, specs: tuple[str, ...], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        build(request(small(channel, tmp_path, *specs), tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env.build.log", "environment.yml"]


def test_channels_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"Installing by rattler failed: error: .*subdir"):
        build(request(small((tmp_path / "nowhere").as_uri(), tmp_path), tmp_path))
    source = tmp_path / "environment.yml"
    source.write_text("dependencies: [python]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"environment\.yml names no channels"):
        build(request(source, tmp_path))


def test_existing_environments(packed: Built, venvs: Venvs, tmp_path: Path) -> None:
    folder = unpack(packed.environment, tmp_path / "there")
    built = build(request(folder, tmp_path))
    assert built.record["packages"] == packed.record["packages"]
    assert folder.is_dir()
    site = folder / "lib" / f"python{RUNNING}" / "site-packages"
    (site / "mine-1.dist-info").mkdir()
    (site / "mine-1.dist-info" / "METADATA").write_text("Name: mine\nVersion: 1\n", encoding="utf-8")
    origin = {"url": "file:///home/me/mine", "dir_info": {"editable": True}}
    (site / "mine-1.dist-info" / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    with pytest.raises(ArtifactError, match="In there, mine is an editable install of file:///home/me/mine"):
        build(BuildRequest(folder, tmp_path / "editable"))
    with pytest.raises(InputError, match="is a venv, whose Python is outside of it"):
        pack(venvs("3.11").environment, tmp_path / "x.tar.gz", tmp_path / "log")
    with pytest.raises(InputError, match="is not a conda environment"):
        pack(tmp_path, tmp_path / "x.tar.gz", tmp_path / "log")


def test_a_venv_is_at_home_where_it_was_moved_to(venvs: Venvs) -> None:
    built = venvs("3.11")
    assert built.environment.name == "environment"
    script = (built.environment / "bin" / "activate").read_text(encoding="utf-8")
    assert str(built.environment) in script
    assert ".making-" not in script
    pip = (built.environment / "bin" / "pip").read_text(encoding="utf-8")
    assert f"{built.environment}/bin/python" in pip  # in its first line, or in the second where that would be too long
    assert (built.environment / "lib" / "libpython3.11.so.1.0").is_file()


def test_pip_follows_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SetupError, match=r"Installing packages by pip failed: ERROR: Could not find a version"):
        build(request(NUMPY_1, tmp_path, engine="venv"))


def test_a_users_own_packages_stay_out(channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip would take a package of ~/.local for installed, and leave it out of the environment."""
    if not any(WHEELS.glob("array_api_compat-*")):
        pytest.skip(f"{WHEELS} holds no wheels: `make test` downloads them")
    site = tmp_path / "home" / ".local" / "lib" / f"python{RUNNING}" / "site-packages"
    (site / "array_api_compat-9.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: array-api-compat\nVersion: 9\n"
    (site / "array_api_compat-9.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(WHEELS))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = small(channel, tmp_path, "numpy", "pip", "pip: [array-api-compat]")
    built = build(request(source, tmp_path))
    assert built.record["packages"]["array-api-compat"] != "9"


@pytest.mark.parametrize("tool", ["conda", "mamba", "micromamba"])
def test_a_conda_of_the_users(tool: str, channel: str, tmp_path: Path) -> None:
    source = small(channel, tmp_path, "numpy")
    if shutil.which(tool) is None:
        with pytest.raises(SetupError, match=rf"{tool} is not installed\. Install it, or use --engine rattler"):
            build(request(source, tmp_path, engine=tool))
        pytest.skip(f"{tool} is not installed")
    assert build(request(source, tmp_path, engine=tool)).record["numpy"]


def test_packages_installed_last_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("3.12")
    monkeypatch.setenv("PIP_FIND_LINKS", str(WHEELS))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wanted = request(NUMPY_2, tmp_path, python="3.12", engine="venv", overrides=("numpy<2",))
    built = build(wanted)
    assert built.record["numpy"].startswith("1.")
    assert not build(wanted).is_new
    assert build(replace(wanted, overrides=("numpy==1.26.4",))).is_new
