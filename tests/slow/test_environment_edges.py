"""Environments that are nearly right: what a user changes, moves, shares or types."""

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

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.composition.compose import compose
from shoal.authoring.environment.archive import unpack
from shoal.authoring.environment.building import Built, build, is_whole, read_built
from shoal.authoring.environment.engines import run, without_secrets
from shoal.authoring.environment.fit import find_misfits
from shoal.authoring.environment.inspection import inspect
from shoal.authoring.environment.spec import BuildRequest
from shoal.authoring.environment.targets import find_target
from shoal.errors import ArtifactError, InputError, SetupError
from tests.support.environments import RUNNING, Venvs


@pytest.fixture
def venv(venvs: Venvs, tmp_path: Path) -> Built:
    """A venv of one's own, to spoil."""
    shutil.copytree(venvs(RUNNING).environment.parent, tmp_path / "env", symlinks=True)
    built = read_built(tmp_path / "env")
    assert built
    return built


def test_a_venv_with_a_missing_python(venv: Built) -> None:
    assert is_whole(venv.environment.parent, venv)
    for name in ("bin/python3", f"lib/libpython{RUNNING}.so.1.0"):
        (venv.environment / name).unlink()
        (venv.environment / name).symlink_to("/gone/python")
    assert not is_whole(venv.environment.parent, venv)
    environment = inspect(venv.environment)
    assert "bin/python3 links to /gone/python, which is not there" in environment.remarks()
    misfits = [misfit.what for misfit in find_misfits(environment, None, find_target("embedded"))]
    assert any("It has no bin/python3" in what for what in misfits)


def test_without_a_stub_the_embedded_servers_own_must_fit(packed: Built) -> None:
    environment = inspect(packed.environment)
    assert find_misfits(environment, None, find_target("embedded")) == []
    other = replace(environment, python="3.13.1")
    (misfit, *_) = find_misfits(other, None, find_target("embedded"))
    assert misfit.what == f"It is for Python 3.13, and the stub of embedded is for Python {RUNNING}."


def test_a_python_that_the_source_does_not_bring(packed: Built, tmp_path: Path) -> None:
    folder = unpack(packed.environment, tmp_path / "there")
    with pytest.raises(InputError, match=rf"there brings Python {RUNNING}\.\d+, and --python asks for 3\.9"):
        build(BuildRequest(folder, tmp_path / "env", python="3.9"))


def test_a_linked_output_is_followed(packed: Built, environment_yml: Path, tmp_path: Path) -> None:
    shutil.copytree(packed.environment.parent, tmp_path / "large disk".replace(" ", "_"))
    (tmp_path / "env").symlink_to(tmp_path / "large_disk")
    built = build(BuildRequest(environment_yml, tmp_path / "env"))
    assert not built.is_new
    assert (tmp_path / "env").is_symlink()


def test_an_output_that_cannot_be_made_is_named(environment_yml: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot be built: (Not a directory|File exists)"):
        build(BuildRequest(environment_yml, tmp_path / "file" / "env"))


def test_secrets_stay_out_of_the_record(environment_yml: Path, tmp_path: Path) -> None:
    assert without_secrets("get https://me:pw@host/t/abc-1/label/x") == "get https://***@host/t/***/label/x"
    channel = "https://me:hidden@127.0.0.1:9/t/hidden/mine"
    with pytest.raises(SetupError) as refused:
        build(BuildRequest(environment_yml, tmp_path / "env", channels=(channel,)))
    log = (tmp_path / "env.build.log").read_text(encoding="utf-8")
    assert "hidden" not in log + str(refused.value)


def test_whatever_ends_a_tool_ends_what_it_started(tmp_path: Path) -> None:
    """A build program's children are ended too; they would go on writing files."""
    script = tmp_path / "tool.sh"
    script.write_text(f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/child\nwait\n", encoding="utf-8")
    script.chmod(0o755)
    code = (
        "import signal, sys; from pathlib import Path; from shoal.authoring.environment.engines import run;"
        "signal.signal(signal.SIGTERM, signal.default_int_handler);"
        "run([sys.argv[1]], log=Path(sys.argv[2]), what='It')"
    )
    process = subprocess.Popen([sys.executable, "-c", code, script, tmp_path / "log"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    time.sleep(0.5)  # the tool may write before the call that starts it has returned
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) != 0
    while Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_files_of_the_users_folder_are_not_taken_for_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit('hijacked')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run(["true"], log=tmp_path / "log", what="Nothing")


def test_stubs_without_an_environment_are_not_lost(packed: Built, artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Model postprocess was given a stub, and no environment"):
        compose(
            "ensemble_all",
            tmp_path / "repository",
            artifacts=artifacts,
            environments={"preprocess": packed.environment.parent},
            stubs={"postprocess": packed.stub or Path()},
        )


def test_a_full_disk_while_composing(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.authoring.composition.writing.write_config", full)
    with pytest.raises(SetupError, match="repository cannot be written: No space left on device"):
        compose("ensemble_all", tmp_path / "repository", artifacts=artifacts)
    assert list(tmp_path.iterdir()) == []


def test_paths_with_an_equals_sign(packed: Built, artifacts: Path, tmp_path: Path) -> None:
    place = tmp_path / "a=b"
    shutil.copytree(packed.environment.parent, place)
    for option in (str(place), f"preprocess={place}"):
        arguments = ["compose", "ensemble_all", str(tmp_path / "r"), "--artifacts", str(artifacts), "--env", option]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.exception
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text(encoding="utf-8"))
    assert set(manifest["environments"]) == {"preprocess"}


def test_names_of_packages_are_not_markup(packed: Built, tmp_path: Path) -> None:
    folder = unpack(packed.environment, tmp_path / "there")
    odd = folder / "lib" / f"python{RUNNING}" / "site-packages" / "odd-1.dist-info"
    odd.mkdir()
    (odd / "METADATA").write_text("Name: [/red]odd\nVersion: 1\n", encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["env", "inspect", str(folder)])
    assert result.exit_code == 0, result.exception
    assert "[/red]odd 1" in result.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(packed: Built, tmp_path: Path) -> None:
    folder = unpack(packed.environment, tmp_path / "there")
    (folder / "bin" / "python3").resolve().chmod(0)
    with pytest.raises(ArtifactError, match="cannot be read: Permission denied"):
        inspect(folder)
