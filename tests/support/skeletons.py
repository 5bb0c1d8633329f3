"""A project of a user's own, as tests need it: leaves, the commands that write some, and what all of them must hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.authoring.check.families import check
from shoal.cli import app
from shoal.errors import ShoalError
from tests.support.once import ROOT

LEAF = 'name: "{0}"\nbackend: "python"\nmax_batch_size: {3}\ninput [ {1} ]\noutput [ {2} ]\n'
LEAF += "dynamic_batching {{ }}\ninstance_group [ {{ kind: KIND_CPU }} ]\n"
MODEL_PY = """\
import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np

from shoal.kit.component.base import Component


class Zeros(Component):
    def run(self, batch):
        rows = len(next(iter(batch.values())))
        return {
            t.name: np.full((rows, *map(abs, t.dims)), b"" if t.dtype == "TYPE_STRING" else 0, t.numpy_dtype)
            for t in self.context.spec.outputs
        }


TritonPythonModel = Zeros.for_triton()
"""


def run(*arguments: object, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=typed)


def new(*arguments: object) -> str:
    result = run("new", *arguments)
    if isinstance(result.exception, ShoalError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def write_leaf(project: Path, name: str, inputs: str, outputs: str, *, size: int = 512, more: str = "") -> None:
    """A leaf whose tensors are ``X FP32 4; Y INT64 -1 optional``."""
    folder = project / "preprocess" / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL_PY, encoding="utf-8")
    tensors = (_tensors(inputs), _tensors(outputs))
    (folder / "config.pbtxt").write_text(LEAF.format(name, *tensors, size) + more, encoding="utf-8")


def _tensors(text: str) -> str:
    entries = []
    for each in text.split("; "):
        name, dtype, dims, *optional = each.split()
        more = " optional: true" if optional else ""
        entries.append(f'{{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ]{more} }}')
    return ", ".join(entries)


def run_test(project: Path, test: str) -> None:
    """Its test passes in a process of its own, as a newcomer would type it."""
    _run(project, "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", test)


_written: list[Path] = []  # copies of projects, whose style is checked together


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Check the style of all that a module's tests wrote, at its end: one start of ruff and of mypy is for all."""
    _written.clear()
    yield
    folder = tmp_path_factory.mktemp("styles")
    for number, project in enumerate(_written):
        shutil.move(project, folder / f"project_{number}")
    settings = ("--config", ROOT / "pyproject.toml", "--no-cache", ".")
    # A method has the parameters of the one that it overrides, whether it uses them or not.
    _run(folder, "ruff", "check", "--ignore", "ARG002", *settings)
    commas = (
        "--config",
        "format.skip-magic-trailing-comma=false",
        "--config",
        "lint.isort.split-on-trailing-comma=true",
    )
    _run(folder, "ruff", "format", "--check", *settings, *commas)  # skeletons have a value a line, to be edited
    flat = tmp_path_factory.mktemp("modules")  # under names of their own: mypy takes no two of one name
    for number, path in enumerate(sorted(folder.rglob("*.py"))):
        shutil.copy(path, flat / f"file_{number}_{path.name}")
    _run(flat, "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache" / "projects", ".")


def check_style(project: Path) -> None:
    """Have it checked by shoal's own rules: ruff's, and mypy's at its strictest."""
    copy = Path(tempfile.mkdtemp(prefix="written-"))
    shutil.copytree(project, copy, dirs_exist_ok=True)
    _written.append(copy)


def _run(project: Path, *command: object) -> None:
    program = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(program, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_made(project: Path, printed: str, wanted: set[str], test: str) -> None:
    """Check that exactly the printed files were written, and that they pass check, ruff, their tests and a server."""
    assert set(re.findall("^written: (.*)$", printed, re.MULTILINE)) == wanted == files(project)
    assert check(project) == []
    assert max(len(path.read_text().splitlines()) for path in project.rglob("model.py")) < 40
    check_style(project)
    run_test(project, test)


MEMBERS = ("preprocess", "bert-large", "cuml", "postprocess")
