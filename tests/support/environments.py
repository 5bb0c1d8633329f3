"""Real environments for tests, each built once per machine, without a network."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.authoring.environment.building import Built, build, read_built
from shoal.authoring.environment.engines import find_python
from shoal.authoring.environment.spec import BuildRequest
from shoal.errors import SetupError
from tests.support.channel import build_channel
from tests.support.once import ROOT, once

WHEELS = Path(sys.prefix) / "wheels"  # where `make test` puts them
NUMPY_1, NUMPY_2 = ROOT / "env" / "requirements-embedded.txt", ROOT / "tests" / "support" / "requirements-numpy-2.txt"
STUBS = "SHOAL_STUBS"  # a folder of stubs that are right for NumPy 2, such as 3.12/triton_python_backend_stub
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
SOURCES = [ROOT / "src" / "shoal" / "authoring" / "environment", ROOT / "constraints.txt", Path(__file__)]


@pytest.fixture(scope="session")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a conda channel with this Python and what the components import.

    rattler's cache is this run's own: another channel's packages have the same names, and other bytes.
    """
    packages = ["numpy", "tokenizers", "array-api-compat", "pip"]

    def make(folder: Path) -> None:
        build_channel(folder, Path(sys.base_prefix), packages, tmp_path_factory.mktemp("channel"))

    made = once("channel", make, depends_on=[*SOURCES, ROOT / "tests" / "support" / "channel.py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATTLER_CACHE_DIR", str(tmp_path_factory.mktemp("rattler")))
        yield made.as_uri()


@pytest.fixture(scope="session")
def environment_yml(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Asks for this Python and what the components import, from the local channel."""
    path = tmp_path_factory.mktemp("yml") / "environment.yml"
    names = [f"python ={RUNNING}", "numpy <2", "tokenizers", "array-api-compat"]
    lines = ["channels:", f"  - {channel}", "  - nodefaults", "dependencies:", *(f"  - {name}" for name in names)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def packed(environment_yml: Path) -> Built:
    """An environment made by rattler and packed by conda-pack. Nothing may be changed in there."""
    return _build_once("packed", lambda out: BuildRequest(environment_yml, out))


def _build_once(name: str, request: Callable[[Path], BuildRequest], *depends_on: Path) -> Built:
    built = read_built(once(name, lambda out: build(request(out)), depends_on=[*SOURCES, *depends_on]))
    assert built is not None
    return built


class Venvs:
    """Venvs by Python and requirements, built once per machine when asked for. Nothing may be changed in there."""

    def __call__(self, python: str, requirements: Path = NUMPY_1, stub: str = "auto") -> Built:
        skip_without(python)
        kind = hashlib.sha256(f"{python} {requirements} {stub}".encode()).hexdigest()[:8]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIP_FIND_LINKS", str(WHEELS))
            patch.setenv("PIP_NO_INDEX", "1")
            return _build_once(
                f"venv_{kind}",
                lambda out: BuildRequest(requirements, out, python=python, engine="venv", stub=stub),
                requirements,
            )


def skip_without(python: str) -> None:
    """Skip where the interpreter is missing, or the wheels are that go into its environment."""
    try:
        find_python(python)
    except SetupError as error:
        pytest.skip(str(error))
    if not any(WHEELS.glob("*.whl")):
        pytest.skip(f"{WHEELS} holds no wheels: `make test` downloads them")


@pytest.fixture(scope="session")
def venvs() -> Venvs:
    return Venvs()


def find_stub(python: str) -> str:
    """Return a stub for ``python`` that supports NumPy 2; skip the test if SHOAL_STUBS names none."""
    stub = Path(os.environ.get(STUBS, "")) / python / "triton_python_backend_stub"
    if not os.environ.get(STUBS) or not stub.is_file():
        pytest.skip(f"{STUBS} names no folder with {python}/triton_python_backend_stub, compiled for NumPy 2")
    return str(stub)
