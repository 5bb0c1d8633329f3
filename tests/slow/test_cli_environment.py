"""`shoal env`: what is typed, and what it prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.environment.building import Built
from shoal.errors import InputError, ShoalError
from tests.support.environments import NUMPY_1, RUNNING, WHEELS, Venvs
from tests.support.once import ROOT


def shoal(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if isinstance(result.exception, ShoalError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def test_inspect(packed: Built) -> None:
    printed = shoal("env", "inspect", packed.environment.parent)
    assert f"Python: {RUNNING}" in printed
    assert "libpython: in lib/" in printed
    assert "MiB  numpy 1." in printed
    found: dict[str, Any] = json.loads(shoal("env", "inspect", packed.environment, "--json"))
    assert found["numpy"] == packed.record["numpy"]
    assert found["escapes"] == []
    assert {package["name"] for package in found["packages"]} >= {"numpy", "python", "tokenizers"}


def test_fit(packed: Built) -> None:
    assert "fits embedded: Python 3." in shoal("env", "fit", packed.environment.parent)
    assert json.loads(shoal("env", "fit", packed.environment.parent, "--json")) == []
    printed = shoal("env", "fit", packed.environment, "--stub", packed.stub, "--target", "26.06", code=1)
    assert "does not fit The stub is of the wheel nvidia-pytriton" in printed
    assert "Compile a stub: shoal env build --target 26.06" in printed
    reasons = json.loads(shoal("env", "fit", packed.environment.parent, "--target", "26.06", "--json", code=1))
    assert all(set(reason) == {"what", "fix"} for reason in reasons)


def test_unpack(packed: Built, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    assert shoal("env", "unpack", packed.environment.parent, folder) == f"environment: {folder}\n"
    assert (folder / "bin" / "python3").exists()
    with pytest.raises(InputError, match="exists; it will not be replaced"):
        shoal("env", "unpack", packed.environment, folder)


def test_build_says_what_to_type_next(packed: Built, environment_yml: Path) -> None:
    out = packed.environment.parent
    printed = shoal("env", "build", environment_yml, "--out", out)
    assert f"environment: {packed.environment}  (unchanged)" in printed
    assert f"next: shoal compose ENSEMBLE build/repository --target embedded --env {out}" in printed
    printed = json.loads(shoal("env", "build", environment_yml, "--out", out, "--json"))
    assert printed == {**packed.record, "is_new": False}


def test_an_environment_for_one_model(venvs: Venvs, artifacts: Path, tmp_path: Path) -> None:
    out = venvs("3.11").environment.parent
    repository = tmp_path / "repository"
    shoal("compose", "ensemble_all", repository, "--artifacts", artifacts, "--env", f"preprocess={out}")
    manifest = json.loads((repository / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["environments"] == {"preprocess": str(out / "environment")}
    assert manifest["without_environment"] == ["postprocess"]


def test_the_script_is_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`env/build_env.sh`, from another folder, in a checkout whose .venv has the tools."""
    if not (ROOT / ".venv" / ".installed").exists() or not any(WHEELS.glob("*.whl")):
        pytest.skip("make has not installed .venv here, with the wheels for tests")
    monkeypatch.setenv("PIP_FIND_LINKS", str(WHEELS))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    command: list[str | Path] = [ROOT / "env" / "build_env.sh", NUMPY_1, "--engine", "venv", "--out", "env"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"environment: {tmp_path}/env/environment" in done.stdout
    assert "verify" in done.stderr
    refused = subprocess.run([*command, "--target", "next"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "error: Unknown target 'next'." in refused.stderr
