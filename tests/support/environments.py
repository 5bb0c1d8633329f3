"""Real environments for tests, each built once a run, without a network."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.environment.build import Request, build
from shoal.environment.built import Built
from shoal.environment.engines import find_python
from shoal.errors import SetupError
from tests.support.channel import build_channel

ROOT = Path(__file__).parents[2]
WHEELS = Path(sys.prefix) / "wheels"  # where `make test` puts them
NUMPY_1, NUMPY_2 = ROOT / "env" / "requirements-embedded.txt", ROOT / "tests" / "support" / "requirements-numpy-2.txt"
STUBS = "SHOAL_STUBS"  # a folder of stubs that are right for NumPy 2, such as 3.12/triton_python_backend_stub
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="session")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a conda channel with this Python and what the components import.

    rattler's cache is this run's own: another run's packages have the same names, and other bytes.
    """
    folder = tmp_path_factory.mktemp("channel")
    packages = ["numpy", "tokenizers", "array-api-compat", "pip"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATTLER_CACHE_DIR", str(folder / "cache"))
        yield build_channel(folder / "channel", Path(sys.base_prefix), packages, folder / "work")
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def environment_yml(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Asks for this Python and what the components import, from the local channel."""
    path = tmp_path_factory.mktemp("yml") / "environment.yml"
    names = [f"python ={RUNNING}", "numpy <2", "tokenizers", "array-api-compat"]
    lines = ["channels:", f"  - {channel}", "  - nodefaults", "dependencies:", *(f"  - {name}" for name in names)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def packed(environment_yml: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What rattler made and conda-pack packed."""
    return build(Request(environment_yml, tmp_path_factory.mktemp("packed") / "env", is_offline=True))


class Venvs:
    """Venvs by Python and requirements, built when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[tuple[str, Path, str], Built] = {}

    def __call__(self, python: str, requirements: Path = NUMPY_1, stub: str = "auto") -> Built:
        key = (python, requirements, stub)
        if key not in self._built:
            skip_without(python)
            out = self._folder / f"env{len(self._built)}"
            request = Request(requirements, out, python=python, engine="venv", stub=stub, is_offline=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PIP_FIND_LINKS", str(WHEELS))
                self._built[key] = build(request)
        return self._built[key]


def skip_without(python: str) -> None:
    """Skip where the interpreter is missing, or the wheels are that go into its environment."""
    try:
        find_python(python)
    except SetupError as error:
        pytest.skip(str(error))
    if not any(WHEELS.glob("*.whl")):
        pytest.skip(f"{WHEELS} holds no wheels: `make test` downloads them")


@pytest.fixture(scope="session")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Venvs]:
    folder = tmp_path_factory.mktemp("venvs")
    yield Venvs(folder)
    shutil.rmtree(folder)


def find_stub(python: str) -> str:
    """A stub for ``python`` that bears NumPy 2; skips where SHOAL_STUBS names none."""
    stub = Path(os.environ.get(STUBS, "")) / python / "triton_python_backend_stub"
    if not os.environ.get(STUBS) or not stub.is_file():
        pytest.skip(f"{STUBS} names no folder with {python}/triton_python_backend_stub, compiled for NumPy 2")
    return str(stub)
